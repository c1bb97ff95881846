"""Run a command with a client; the command fails if it cannot reach a server."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.cli.common.options import url_or_default
from headrace.cli.common.output import CommandError, note, with_hint
from headrace.errors import ConnectTimeoutError

if TYPE_CHECKING:
    from headrace.client import Client

Work = Callable[["Client"], Awaitable[None]]


def run_with_client(
    url: str | None,
    timeout_s: float,
    work: Work,
    *,
    patient: bool = False,
    lake: Path | None = None,
) -> None:
    """Run `work`; raise CommandError after `timeout_s` without a connection.

    If `patient`, the limit is only for the first connection.
    """
    import uvloop

    try:
        uvloop.run(_run(url_or_default(url), timeout_s, work, patient, lake))
    except ConnectTimeoutError as error:
        raise CommandError(with_hint(str(error))) from None


async def _run(url: str, timeout_s: float, work: Work, patient: bool, lake: Path | None) -> None:
    from headrace.client import Options
    from headrace.client.connect import topics_client

    options = Options(connect_timeout_s=timeout_s, lake=lake)
    async with topics_client(url, options) as client:
        watch = _Watch(client, timeout_s, patient)
        working = asyncio.ensure_future(work(client))
        try:
            await asyncio.wait([working, watch.lost], return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                watch.lost.result()
            await working
        finally:
            watch.stop()
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)


class _Watch:
    """Print a note when the connection is lost, and fail `lost` if it stays lost for too long."""

    def __init__(self, client: "Client", timeout_s: float, patient: bool) -> None:
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._client = client
        self._timeout_s = timeout_s
        self._patient = patient
        self._timer: asyncio.TimerHandle | None = None
        self._down = False
        self._stop_listening = client.on("state", self._changed)

    def stop(self) -> None:
        self._stop_listening()
        self._hold()

    def _changed(self, state: str) -> None:
        if state == "connected":
            self._down = False
            self._hold()
        elif state == "disconnected" and not self._down:
            self._down = True
            reason = self._client.last_error or "no answer"
            note(f"headrace: lost {self._client.url} ({reason}); trying again")
            if not self._patient:
                loop = asyncio.get_running_loop()
                self._timer = loop.call_later(self._timeout_s, self._give_up)

    def _hold(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _give_up(self) -> None:
        if not self.lost.done():
            self.lost.set_exception(
                CommandError(
                    f"no connection to {self._client.url} for {self._timeout_s:g} s: "
                    + with_hint(self._client.last_error or "no answer")
                )
            )
