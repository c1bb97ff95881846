"""Create a Logux client from a URL. Elsewhere: the API for applications (`client.py`)."""

from urllib.parse import quote, unquote

from headrace.client.logux.client import LoguxClient
from headrace.client.logux.options import LoguxOptions
from headrace.client.transport.connection import Owner
from headrace.client.transport.websocket import WebSocketTransport
from headrace.client.url import Url
from headrace.errors import BadTopicNameError, ConfigError
from headrace.model import LOGUX_PREFIX, check_topic_name
from headrace.wire.logux import messages as logux

DEFAULT_PORT = 8120
DEFAULT_TLS_PORT = 443
"""The server does not support TLS. A load balancer does, and usually listens on this port."""

MAIN = "main"

MESSAGE_BYTES_MAX = logux.MESSAGE_BYTES_MAX + 4096


def make_client(url: Url, options: LoguxOptions) -> LoguxClient:
    tls = url.scheme == "loguxs"
    if options.ssl is not None and not tls:
        raise ConfigError(f"{url} is not encrypted: `ssl` is for loguxs://")
    log = _log_of(url)
    port = url.port or (DEFAULT_TLS_PORT if tls else DEFAULT_PORT)
    address = f"[{url.host}]" if ":" in url.host else url.host

    def make_connection(owner: Owner) -> WebSocketTransport:
        return WebSocketTransport(
            owner,
            url.host,
            port,
            url=f"{'wss' if tls else 'ws'}://{address}:{port}{logux.PATH}/{quote(log)}",
            ssl=options.ssl,
            message_bytes_max=MESSAGE_BYTES_MAX,
        )

    return LoguxClient(str(url), log, make_connection, options)


def _log_of(url: Url) -> str:
    try:
        log = unquote(url.path.removeprefix("/"), errors="strict") or MAIN
        check_topic_name(LOGUX_PREFIX + log)
    except (UnicodeDecodeError, BadTopicNameError) as error:
        raise ConfigError(f"{url} names no log: {error}") from None
    return log
