"""Send one request to the server's HTTP API; return its JSON answer or raise a clear error. No retries."""

import http.client
import json
from typing import Any, NamedTuple
from urllib.parse import urlencode, urlsplit

from headrace.cli.common.output import CommandError, UsageError, with_hint
from headrace.printing import masked, one_line, quoted, unreachable

_TIMEOUT_S = 30.0
_ANSWER_BYTES_MAX = 256 * 1024 * 1024
_WRONG_PORT = b"this is HTTP, and "
"""Start of the Figg port's answer to HTTP; after it, the answer says where HTTP listens."""


class HttpApi(NamedTuple):
    """Address of a server's HTTP API, and the token for it."""

    base: str
    """`http://host:port`"""
    token: str | None = None

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
    base, token = api
    headers = {"Content-Type": content_type} if content_type is not None else {}
    if token is not None:
        if not (token.isascii() and token.isprintable() and token == token.strip()):
            raise UsageError("the token has characters that no token has")
        headers["Authorization"] = f"Bearer {token}"
    parts = urlsplit(base)
    try:
        port = parts.port
    except ValueError:
        port = -1
    if parts.scheme != "http" or not parts.hostname or port == -1:
        raise UsageError(f"--http takes HOST:PORT or http://HOST:PORT, not {quoted(masked(base))}")
    text = urlencode({name: value for name, value in query.items() if value is not None})
    connection = http.client.HTTPConnection(parts.hostname, port, timeout=timeout_s)
    try:
        connection.request(method, f"{path}?{text}" if text else path, content, headers)
        response = connection.getresponse()
        status, body = response.status, response.read(_ANSWER_BYTES_MAX)
    except (OSError, http.client.HTTPException) as error:
        place = f"{parts.hostname}:{port}" if port else str(parts.hostname)
        reason = with_hint(unreachable(error, place))
        named = reason if place in reason else f"no answer from {base}: {reason}"
        raise UnreachableError(named) from None
    finally:
        connection.close()
    return _answer(base, status, body)


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
    raise (NotFoundError if status == 404 else CommandError)(str(reason))
