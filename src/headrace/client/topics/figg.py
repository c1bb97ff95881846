"""Create a Figg client: its session and a TCP connection. Elsewhere: the API (`client.py`)."""

from headrace.client.options import exponential
from headrace.client.topics.client import Client
from headrace.client.topics.options import Options, Pace
from headrace.client.transport.connection import Owner
from headrace.client.transport.tcp import TcpConnection
from headrace.client.url import Url
from headrace.errors import ConfigError
from headrace.session.figg import client as figg_client
from headrace.session.figg.client import FiggClientSession

DEFAULT_PORT = 8119

PACE = Pace(
    backoff=exponential(),
    ping_interval_s=figg_client.PING_INTERVAL_S,
    pings_unanswered_max=figg_client.PINGS_UNANSWERED_MAX,
    resend_s=None,
)


def make_client(url: Url, options: Options) -> Client:
    if url.path not in ("", "/"):
        raise ConfigError(f"{url} has more than a host and a port")
    if options.ssl is not None:
        raise ConfigError(f"{url} is not encrypted: `ssl` is for wombats://")
    port = url.port or DEFAULT_PORT
    pace = options.pace(PACE)
    session = FiggClientSession(
        window_max=options.window_max,
        window_bytes_max=options.window_bytes_max,
        ping_interval_s=pace.ping_interval_s,
        pings_unanswered_max=pace.pings_unanswered_max,
    )

    def make_connection(owner: Owner) -> TcpConnection:
        return TcpConnection(owner, url.host, port)

    return Client(str(url), session, make_connection, options, pace)
