"""Reach the server: one request to its HTTP API without retries, or a client that must connect in time."""

import asyncio
import http.client
import json
import ssl
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlencode, urlsplit

from headrace.cli.common.output import CommandError, UsageError, note, with_hint
from headrace.errors import ConnectTimeoutError
from headrace.printing import masked, one_line, quoted, unreachable
from headrace.tls import DEFAULT_FILES, TlsFiles, TlsOptions, failure
from headrace.tokens import exposure_of

if TYPE_CHECKING:
    from headrace.cli.common.options import TokenFlags
    from headrace.client import Client, Options


_TIMEOUT_S = 30.0
_ANSWER_BYTES_MAX = 256 * 1024 * 1024
_WRONG_PORT = (b"this is HTTP, and ", b"this is not TLS, and ")
"""Starts of answers of the Figg port and of ports with TLS, which say what to do."""


class HttpApi(NamedTuple):
    """Address of a server's HTTP API, and the token for it."""

    base: str
    """`http://host:port` or `https://host:port`"""
    token: str | None = None
    tls: TlsFiles = TlsFiles()
    """Files for an address that begins with `https`."""
    insecure_token: bool = False
    """True: send the token also where others can read it."""

    def __repr__(self) -> str:
        return f"HttpApi({self.base!r})"  # a token is never shown


class UnreachableError(CommandError):
    """No server answers at the address: start one, or name the right address."""


class NotFoundError(CommandError):
    """The server answered 404: the requested object does not exist."""


def request(
    api: HttpApi,
    method: str,
    path: str,
    *,
    timeout_s: float = _TIMEOUT_S,
    content: bytes | None = None,
    content_type: str | None = None,
    **query: object,
) -> Any:
    """Send one request and return the answer; query values of None are left out."""
    headers = {"Content-Type": content_type} if content_type is not None else {}
    text = urlencode({name: value for name, value in query.items() if value is not None})
    connection = _connection(api, timeout_s)
    try:
        _connect(connection, api, headers)
        connection.request(method, f"{path}?{text}" if text else path, content, headers)
        response = connection.getresponse()
        status, body = response.status, response.read(_ANSWER_BYTES_MAX)
    except (OSError, http.client.HTTPException) as error:
        raise _unreachable(api, error, connection) from None
    finally:
        connection.close()
    return _answer(api.base, status, body)


def stream(api: HttpApi, path: str, **query: object) -> Iterator[bytes]:
    """Yield the lines of an answer that lasts as long as the server runs; query values as above."""
    headers: dict[str, str] = {}
    text = urlencode({name: value for name, value in query.items() if value is not None})
    connection = _connection(api, _TIMEOUT_S)
    try:
        _connect(connection, api, headers)
        connection.request("GET", f"{path}?{text}", headers=headers)
        response = connection.getresponse()
        if response.status != 200:
            _answer(api.base, response.status, response.read(_ANSWER_BYTES_MAX))
        while line := response.readline():
            if line.strip():  # empty lines only keep the connection open
                yield line
    except (OSError, http.client.HTTPException) as error:
        raise _unreachable(api, error, connection) from None
    finally:
        connection.close()


def _connection(api: HttpApi, timeout_s: float) -> http.client.HTTPConnection:
    """Return a connection to an API that is not open yet."""
    parts = urlsplit(api.base)
    try:
        port = parts.port
    except ValueError:
        port = -1
    host = parts.hostname
    if parts.scheme not in ("http", "https") or not host or port == -1:
        shown = quoted(masked(api.base))
        raise UsageError(f"--http takes HOST:PORT or https://HOST:PORT, not {shown}")
    if parts.scheme == "https":
        context = api.tls.context()
        return http.client.HTTPSConnection(host, port, timeout=timeout_s, context=context)
    return http.client.HTTPConnection(host, port, timeout=timeout_s)


def _connect(connection: http.client.HTTPConnection, api: HttpApi, headers: dict[str, str]) -> None:
    """Open a connection, and add the token to the headers if nobody else can read it there."""
    token = api.token
    if token is not None:
        if not (token.isascii() and token.isprintable() and token == token.strip()):
            raise UsageError("the token has characters that no token has")
        headers["Authorization"] = f"Bearer {token}"
    connection.connect()
    # The address of the connection counts: a name may stand for any machine.
    is_checked = token is not None and api.base.startswith("http:") and not api.insecure_token
    if is_checked and (reason := exposure_of(connection.sock.getpeername())):
        raise UsageError(f"{api.base}: {reason}")


def _unreachable(
    api: HttpApi, error: Exception, connection: http.client.HTTPConnection
) -> UnreachableError:
    port = urlsplit(api.base).port
    place = f"{connection.host}:{port}" if port else connection.host
    if isinstance(error, ssl.SSLError):
        return UnreachableError(failure(error, place))
    reason = with_hint(unreachable(error, place))
    return UnreachableError(reason if place in reason else f"no answer from {api.base}: {reason}")


def listed(api: HttpApi, path: str, what: str, **query: Any) -> Iterator[dict[str, Any]]:
    """Yield all entries of a list that the server answers in pages; `what` is the name of the list."""
    after = None
    while True:
        page = request(api, "GET", path, after=after, **query)
        yield from page[what]
        if not page["more"]:
            return
        after = page[what][-1]["name"]


def none_listed(what: str, prefix: str, api: HttpApi) -> str:
    """Return a sentence for an empty list, which leaves out what the token does not allow to inspect."""
    scope = f" begin with {quoted(prefix)}" if prefix else " yet"
    return f"no {what}{scope}" + (", or none that the token may inspect" if api.token else "")


def _answer(base: str, status: int, body: bytes) -> Any:
    try:
        answer = json.loads(body)
    except ValueError:
        if body.startswith(_WRONG_PORT):
            raise CommandError(
                f"{base}: {one_line(body.decode(errors='replace').strip())}"
            ) from None
        raise CommandError(
            f"{base} answers {status} without JSON: is it Headrace's HTTP address?"
        ) from None
    if status in (200, 201):
        return answer
    reason = answer.get("error", body.decode()) if isinstance(answer, dict) else body.decode()
    if status == 401:
        reason = f"{base} lets nobody in without a token it knows: give it with HEADRACE_TOKEN"
    raise (NotFoundError if status == 404 else CommandError)(with_hint(str(reason)))


Work = Callable[["Client"], Awaitable[None]]


def run_with_client(
    url: str,
    timeout_s: float,
    work: Work,
    *,
    tls: TlsFiles = DEFAULT_FILES,
    token: "TokenFlags | None" = None,
    patient: bool = False,
    lake: str | None = None,
    lake_options: Mapping[str, str] | None = None,
    lake_catalog: Mapping[str, str] | None = None,
) -> None:
    """Run `work`; raise CommandError after `timeout_s` without a connection.

    If `patient`, the limit is only for the first connection.
    """
    import uvloop

    from headrace.client import Options

    options = Options(
        connect_timeout_s=timeout_s,
        **tls_options(url, tls),
        **({} if token is None else token.for_client()),
        lake=lake,
        lake_options=lake_options,
        lake_catalog=lake_catalog,
    )
    try:
        uvloop.run(_run(url, options, timeout_s, work, patient=patient))
    except ConnectTimeoutError as error:
        raise CommandError(with_hint(str(error))) from None


def tls_options(url: str, files: TlsFiles) -> TlsOptions:
    """Return a client's options for TLS. The environment may name files that a plain URL does not need."""
    is_encrypted = url.partition("://")[0].endswith("s")
    ca, cert, key = files.or_environment() if is_encrypted else files
    return {"ca": ca or None, "cert": cert or None, "key": key or None}


async def _run(
    url: str, options: "Options", timeout_s: float, work: Work, *, patient: bool
) -> None:
    from headrace.client.connect import topics_client

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
