"""Sections of the configuration for protocols: access tokens, Logux and channels."""

from enum import StrEnum
from typing import Annotated

from msgspec import Struct

from headrace.config.values import NUMBER_MAX, Section, setting


class AccessToken(Struct, frozen=True, kw_only=True):
    """A token that allows the use of the HTTP API and of Logux logs."""

    name: Annotated[
        str,
        setting(
            "What it is called in diagnostics.",
            pattern=r"^[^\x00-\x1f]{1,255}\Z",
            allowed="a text of 1 to 255 characters",
            reloads=True,
        ),
    ]
    sha256: Annotated[
        str,
        setting(
            "The SHA-256 of the token: the token itself is nowhere.",
            pattern=r"^[0-9a-fA-F]{64}\Z",
            allowed="64 hexadecimal digits",
            secret=True,
            reloads=True,
        ),
    ]
    user: Annotated[
        str | None,
        setting(
            "The user whose it is: what the node id of a Logux client has before its first colon. Without "
            "one, any.",
            reloads=True,
        ),
    ] = None
    grants: Annotated[
        tuple[str, ...] | None,
        setting(
            "What it is good for: `http` for the HTTP API, and beginnings of the names of topics, such as "
            "`$logux/main`. Without any, everything.",
            reloads=True,
        ),
    ] = None


class Access(Section, frozen=True):
    token: Annotated[
        tuple[AccessToken, ...],
        setting(
            "Tokens that the HTTP API and Logux take. Without any, all may use the HTTP API, and Logux all "
            "from this machine."
        ),
    ] = ()


HOOK = r"^(?:[A-Za-z_][\w.]*:[A-Za-z_]\w*)?\Z"


REDUCERS = "last, merge, map, count, uploaded or module:function"
REDUCER = r"^(?:last|merge|map|count|uploaded|[A-Za-z_][\w.]*:[A-Za-z_]\w*)\Z"
POSTGRES = r"^(?:postgres(?:ql)?://[^\x00-\x20]*)?\Z"


class LoguxSettings(Section, frozen=True):
    host: Annotated[
        str,
        setting(
            "What the server calls itself towards Logux clients.",
            pattern=r"^[^\s:]{1,255}\Z",
            allowed="a word",
        ),
    ] = "server"
    ping_s: Annotated[
        float,
        setting(
            "How long a client may be silent before it is asked whether it is there.",
            "seconds",
            gt=0,
            le=NUMBER_MAX,
        ),
    ] = 10.0
    timeout_s: Annotated[
        float,
        setting("How long it has to answer, and to say who it is.", "seconds", gt=0, le=NUMBER_MAX),
    ] = 20.0
    credentials: Annotated[
        str,
        setting(
            "What the server shows of itself in `connected`, to clients that want to be sure.",
            secret=True,
        ),
    ] = ""
    subprotocol_min: Annotated[
        int,
        setting(
            "The oldest subprotocol of the application that clients of protocol 5 may use.",
            "version",
            ge=0,
            le=NUMBER_MAX,
        ),
    ] = 0
    verify: Annotated[
        str,
        setting(
            "A function of the application that says who is let in, as `module:function`; instead of tokens.",
            pattern=HOOK,
            allowed="module:function",
        ),
    ] = ""
    filter: Annotated[
        str,
        setting(
            "A function of the application that says who may send and who may see an event, as "
            "`module:function`.",
            pattern=HOOK,
            allowed="module:function",
        ),
    ] = ""


class LastState(StrEnum):
    KEPT = "kept"
    DROPPED = "dropped"


class ChannelSettings(Section, frozen=True):
    reducer: Annotated[
        str,
        setting(
            "How messages fold into the last known state: `last`, `merge`, `map`, `count`, `uploaded`, or a "
            "function of the application as `module:function`.",
            pattern=REDUCER,
            allowed=REDUCERS,
        ),
    ] = "last"
    lease_s: Annotated[
        float,
        setting(
            "How long the log is kept for a member that is not heard of.",
            "seconds",
            gt=0,
            le=NUMBER_MAX,
        ),
    ] = 604_800.0
    grace_s: Annotated[
        float,
        setting(
            "How long a channel without subscribers waits before its log is destroyed.",
            "seconds",
            gt=0,
            le=NUMBER_MAX,
        ),
    ] = 300.0
    presence_s: Annotated[
        float,
        setting(
            "How long a member that polls over HTTP counts as a subscriber after a request.",
            "seconds",
            gt=0,
            le=NUMBER_MAX,
        ),
    ] = 60.0
    remember_s: Annotated[
        float,
        setting(
            "How long a member's cursor and last number are known after its lease, or after it left.",
            "seconds",
            gt=0,
            le=NUMBER_MAX,
        ),
    ] = 7_776_000.0
    last_state: Annotated[
        LastState,
        setting(
            "Whether the last state of a channel is kept when its log is destroyed; dropped, the channel "
            "begins empty the next time."
        ),
    ] = LastState.KEPT
    snapshot_age_s: Annotated[
        float,
        setting(
            "How long the last state of a channel is kept after its log was destroyed; 0: for ever.",
            "seconds",
            ge=0,
            le=NUMBER_MAX,
        ),
    ] = 0.0
    ping_s: Annotated[
        float,
        setting(
            "How long a connection may be silent before it is pinged, and how long it has to answer.",
            "seconds",
            gt=0,
            le=NUMBER_MAX,
        ),
    ] = 15.0
    members_max: Annotated[
        int, setting("Members of one channel.", "members", ge=1, le=1_000_000)
    ] = 1_000
    snapshots_url: Annotated[
        str,
        setting(
            "The PostgreSQL database that snapshots are kept in, with the extra `postgres`; without one, the "
            "data directory.",
            pattern=POSTGRES,
            allowed="a URL such as postgresql://user:password@host/database, or nothing",
            secret=True,
        ),
    ] = ""
