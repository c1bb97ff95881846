"""`headrace channels send`, `follow` and `fetch`: send and print messages as a processor of a channel."""

import base64
import contextlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import typer

from headrace.cli.channels import Name
from headrace.cli.common import options
from headrace.cli.common.options import argument, option
from headrace.cli.common.output import discard_output, note, payload_line
from headrace.cli.common.server import HttpApi, UnreachableError, request
from headrace.cli.publish import Input, parse_json
from headrace.cli.subscribe import text_or_base64
from headrace.printing import counted, printable, printable_json, size

T = TypeVar("T")

PAGE_MAX = 500
"""Number of messages per request."""

WAIT_S = 20
"""Seconds that one request of `follow` waits for a message."""

RETRY_S = 0.5

Count = Annotated[int | None, option("--count N", "End after this many messages.", min=1)]
MessageJson = Annotated[
    bool,
    option(
        "--json", "Print one object per line: channel, next_offset, processor, number, payload."
    ),
]
Leave = Annotated[
    bool, option("--leave", "Leave the channel at the end: no more messages are kept for us.")
]


class MemberFlags(NamedTuple):
    """One processor of one channel, as the command line names it, and its requests."""

    name: Name
    processor: Annotated[
        str,
        option(
            "--as PROCESSOR",
            "The name of this processor: always the same, and no other may have it.",
        ),
    ]
    http: options.Http = None
    token: options.TokenFlags = options.NO_TOKEN_FLAGS
    tls: options.TlsFlags = options.TlsFlags()
    timeout_s: options.Timeout = 5.0

    @property
    def _api(self) -> HttpApi:
        return options.http_api(self.http, self.token, self.tls.files)

    def join(self) -> dict[str, Any]:
        return self._again(lambda: self._ask("POST", "join"))

    def leave(self) -> None:
        self._ask("POST", "leave")

    def send(self, number: int, content: bytes, *, as_json: bool) -> None:
        kind = "application/json" if as_json else "application/octet-stream"
        # The number makes a retry safe: the server does not store the same message twice.
        self._again(
            lambda: self._ask("POST", "messages", number=number, content=content, content_type=kind)
        )

    def poll(self, ack: int | None, limit: int, wait_s: int) -> dict[str, Any]:
        query = {"ack": ack, "max": limit, "wait_s": wait_s or None}
        return self._ask("GET", "messages", **query, timeout_s=wait_s + 30.0)

    def ack(self, offset: int) -> None:
        self._ask("POST", "ack", offset=offset)

    def _ask(self, method: str, what: str, **given: Any) -> dict[str, Any]:
        given |= {"name": self.name, "processor": self.processor}
        answer: dict[str, Any] = request(self._api, method, f"/v1/channel/{what}", **given)
        return answer

    def _again(self, ask: Callable[[], T]) -> T:
        """Send a request until the server answers, for at most the time of --timeout."""
        until_s = time.monotonic() + self.timeout_s
        while True:
            try:
                return ask()
            except UnreachableError:
                if time.monotonic() >= until_s:
                    raise
            time.sleep(min(RETRY_S, self.timeout_s))


def send(
    member: MemberFlags,
    data: Annotated[
        str | None,
        argument("DATA", "One message; `-` or nothing reads standard input, each line a message."),
    ] = None,
    file: Annotated[
        Path | None, option("--file FILE", "Read this file, each line a message.")
    ] = None,
    as_json: Annotated[
        bool, option("--json", "A message is a JSON value, and not just bytes.")
    ] = False,
) -> None:
    """Send messages to a channel as a processor.

    Each is stored once, also when the server had to be asked again; the command ends when all are durable. A
    processor that was no member joins for as long as this takes, and leaves.

    \b
    headrace channels send doc/1 --as script --json '{"title": "Plan"}'
    headrace channels send doc/1 --as importer --file lines.txt
    """
    given = Input(data, file, "a message")
    joined = member.join()
    number = joined["number"]
    sent = sent_bytes = 0
    try:
        for position, content in enumerate(given, 1):
            if as_json:
                parse_json(content, f"message {position}")
            member.send(number + position, content, as_json=as_json)
            sent, sent_bytes = position, sent_bytes + len(content)
    finally:
        if sent:
            note(f"sent {counted(sent, 'message')} ({size(sent_bytes)})")
        # After a lost answer, the retry finds the member of the first request. A member that stays too long
        # does less harm than one that loses the messages that wait for it.
        if not joined.get("was_member", True):
            member.leave()
    if not sent:
        note("sent nothing: there was no input")


def follow(
    member: MemberFlags,
    count: Count = None,
    until_end: Annotated[
        bool, option("--until-end", "End where the channel ends now, as `fetch` does.")
    ] = False,
    leave: Leave = False,
    as_json: MessageJson = False,
) -> None:
    """Print the messages of a channel as a processor, and wait for more.

    Begins where this processor stopped, and acknowledges what is printed. The processor stays a member
    when the command ends (--leave ends that): its messages wait for the next time. Own messages do not
    come. A new member gets the last known state, where there is one, and not the messages in it: --json
    prints it as `snapshot`.

    \b
    headrace channels follow doc/1 --as watcher
    headrace channels follow doc/1 --as watcher --json --count 10
    """
    _print(member, count, until_end=until_end, leave=leave, as_json=as_json)


def fetch(
    member: MemberFlags,
    count: Count = None,
    leave: Leave = False,
    as_json: MessageJson = False,
) -> None:
    """Print the messages that wait for a processor, acknowledge them and end.

    \b
    headrace channels fetch doc/1 --as nightly-job
    """
    _print(member, count, until_end=True, leave=leave, as_json=as_json)


# Printing


def _print(
    member: MemberFlags, count: int | None, *, until_end: bool, leave: bool, as_json: bool
) -> None:
    printer = _Printer(member, count, as_json=as_json)
    try:
        printer.print_all(until_end=until_end)
    except KeyboardInterrupt:
        pass  # the user ends the command
    except BrokenPipeError:
        discard_output()  # the program that reads our output ends it
    with contextlib.suppress(UnreachableError):  # the server has the earlier acknowledgements
        printer.acknowledge()
        if leave:
            member.leave()


class _Printer:
    def __init__(self, member: MemberFlags, count: int | None, *, as_json: bool) -> None:
        self._member = member
        self._left = count
        self._as_json = as_json
        self._printed: int | None = None
        """Offset just past the last message printed."""
        self._acked: int | None = None

    def print_all(self, *, until_end: bool) -> None:
        self._print_joined(self._member.join())
        while self._left != 0:
            limit = min(PAGE_MAX, self._left or PAGE_MAX)
            try:
                page = self._member.poll(self._printed, limit, 0 if until_end else WAIT_S)
            except UnreachableError as error:
                self._wait_for_server(error)
                continue
            self._acked = self._printed
            self._print_page(page)
            if until_end and not page["more"]:
                return

    def acknowledge(self) -> None:
        if self._printed is not None and self._printed != self._acked:
            self._member.ack(self._printed)
            self._acked = self._printed

    def _print_page(self, page: dict[str, Any]) -> None:
        if lost := page.get("lost"):
            self._warn(f"{counted(lost, 'message')} cannot be read: damaged, or lost in a crash")
        for message in page["messages"]:
            # After a restart, the server resends messages whose acknowledgement it does not have.
            if self._printed is None or message["offset"] > self._printed:
                self._write(message)
                self._printed = message["offset"]
                self._left = None if self._left is None else self._left - 1
        sys.stdout.flush()

    def _print_joined(self, joined: dict[str, Any]) -> None:
        if missed := joined.get("missed"):
            gone = counted(missed["messages"], "message") if missed["messages"] else "messages"
            self._warn(f"missed {gone}: {missed['reason']}")
        snapshot = joined.get("snapshot")
        if snapshot is None:
            return
        if self._as_json:
            self._write(snapshot, field="snapshot")
            sys.stdout.flush()
        else:
            self._warn(
                f"the messages up to offset {snapshot['offset']} are in the last known state, "
                "which --json prints"
            )
        self._printed = snapshot["offset"]

    def _write(self, told: dict[str, Any], field: str = "payload") -> None:
        out = sys.stdout.buffer
        data = base64.b64decode(told["bytes"]) if "bytes" in told else None
        value = told.get("payload")
        if not self._as_json:
            text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
            out.write(payload_line(text.encode() if data is None else data))
            return
        # On the wire, a message's `offset` is the offset just past it.
        place = "offset" if field == "snapshot" else "next_offset"
        line: dict[str, Any] = {"channel": self._member.name, place: told["offset"]}
        line |= {key: told[key] for key in ("processor", "number", "ms") if key in told}
        line |= {field: value} if data is None else text_or_base64(f"{field}_bytes", data)
        out.write(printable_json(line).encode() + b"\n")

    def _wait_for_server(self, error: UnreachableError) -> None:
        self._warn(f"{error}; trying again")
        while True:
            time.sleep(RETRY_S)
            with contextlib.suppress(UnreachableError):
                self._print_joined(self._member.join())
                return

    def _warn(self, text: str) -> None:
        typer.echo(f"headrace: channel {printable(self._member.name)}: {text}", err=True)
