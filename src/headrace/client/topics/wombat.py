"""Create a Wombat client: its session and a WebSocket connection. Elsewhere: the API (`client.py`)."""

from headrace.client.options import exponential
from headrace.client.topics.client import Client
from headrace.client.topics.options import Options, Pace
from headrace.client.transport.connection import Owner
from headrace.client.transport.websocket import WebSocketTransport
from headrace.client.url import Url
from headrace.errors import ConfigError
from headrace.session.wombat import client as wombat_client
from headrace.session.wombat.client import WombatClientSession
from headrace.wire.wombat import messages as wombat

DEFAULT_PORT = 8120
DEFAULT_TLS_PORT = 443
"""The server does not support TLS. A load balancer does, and usually listens on this port."""

PACE = Pace(
    backoff=exponential(jitter=0.0),
    ping_interval_s=wombat_client.PING_INTERVAL_S,
    pings_unanswered_max=wombat_client.PINGS_UNANSWERED_MAX,
    resend_s=wombat_client.RESEND_S,
)

MESSAGE_BYTES_MAX = wombat.MESSAGE_BYTES_MAX + 4096


def make_client(url: Url, options: Options) -> Client:
    tls = url.scheme == "wombats"
    if options.ssl is not None and not tls:
        raise ConfigError(f"{url} is not encrypted: `ssl` is for wombats://")
    pace = options.pace(PACE)
    assert pace.resend_s is not None
    if pace.ping_interval_s is None:
        raise ConfigError(
            "ping_interval_s=None is for figg://: a Wombat server hangs up on clients without pings"
        )
    session = WombatClientSession(
        window_max=options.window_max,
        window_bytes_max=options.window_bytes_max,
        ping_interval_s=pace.ping_interval_s,
        pings_unanswered_max=pace.pings_unanswered_max,
        resend_s=pace.resend_s,
    )
    port = url.port or (DEFAULT_TLS_PORT if tls else DEFAULT_PORT)
    path = wombat.PATH if url.path in ("", "/") else url.path
    address = f"[{url.host}]" if ":" in url.host else url.host

    def make_connection(owner: Owner) -> WebSocketTransport:
        return WebSocketTransport(
            owner,
            url.host,
            port,
            url=f"{'wss' if tls else 'ws'}://{address}:{port}{path}",
            ssl=options.ssl,
            message_bytes_max=MESSAGE_BYTES_MAX,
        )

    return Client(str(url), session, make_connection, options, pace)
