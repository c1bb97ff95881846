"""Sections of the configuration for protocols: access tokens, Logux and channels."""

from enum import StrEnum
from typing import Annotated

from msgspec import Struct

from headrace.config.values import NUMBER_MAX, Section, count, seconds, setting


class AccessToken(Struct, frozen=True, kw_only=True):
    """A token that allows the use of the HTTP API and of Logux logs."""

    name: Annotated[
        str,
        setting(
            "Name of the token in log lines.",
            pattern=r"^[^\x00-\x1f]{1,255}\Z",
            allowed="a text of 1 to 255 characters",
            reloads=True,
        ),
    ]
    sha256: Annotated[
        str,
        setting(
            "SHA-256 of the token. The token itself is stored nowhere.",
            pattern=r"^[0-9a-fA-F]{64}\Z",
            allowed="64 hexadecimal digits",
            secret=True,
            reloads=True,
        ),
    ]
    user: Annotated[
        str | None,
        setting(
            "User that the token belongs to: the part of a Logux client's node id before its first colon. "
            "Without a user, the token is valid for any user.",
            reloads=True,
        ),
    ] = None
    grants: Annotated[
        tuple[str, ...] | None,
        setting(
            "What the token allows: `http` for the HTTP API, and prefixes of topic names, such as "
            "`$logux/main`. Without grants, the token allows everything.",
            reloads=True,
        ),
    ] = None


class Access(Section, frozen=True):
    token: Annotated[
        tuple[AccessToken, ...],
        setting(
            "Tokens for the HTTP API and Logux. Without any token, everyone may use the HTTP API, and "
            "everyone on this machine may use Logux."
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
            "Name of the server in its node id, which Logux clients see.",
            pattern=r"^[^\s:]{1,255}\Z",
            allowed="a word",
        ),
    ] = "server"
    ping_s: Annotated[
        float,
        seconds("Time without a message after which the server pings a client.", gt=0),
    ] = 10.0
    timeout_s: Annotated[
        float,
        seconds("Time that a client has to answer a ping, and to send its `connect`.", gt=0),
    ] = 20.0
    credentials: Annotated[
        str,
        setting(
            "Credentials of the server, which it sends in `connected` so that clients can check them.",
            secret=True,
        ),
    ] = ""
    subprotocol_min: Annotated[
        int,
        setting(
            "Oldest version of the application's subprotocol that clients of protocol 5 may use.",
            "version",
            ge=0,
            le=NUMBER_MAX,
        ),
    ] = 0
    verify: Annotated[
        str,
        setting(
            "Function of the application that accepts or refuses a client, as `module:function`. It replaces "
            "the tokens.",
            pattern=HOOK,
            allowed="module:function",
        ),
    ] = ""
    filter: Annotated[
        str,
        setting(
            "Function of the application that decides who may send and who may see an event, as "
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
            "Function that folds messages into the last known state: `last`, `merge`, `map`, `count`, "
            "`uploaded`, or a function of the application as `module:function`.",
            pattern=REDUCER,
            allowed=REDUCERS,
        ),
    ] = "last"
    lease_s: Annotated[
        float,
        seconds("Time for which the log is kept for a silent member.", gt=0),
    ] = 604_800.0
    grace_s: Annotated[
        float,
        seconds("Time without subscribers after which the log of a channel is destroyed.", gt=0),
    ] = 300.0
    presence_s: Annotated[
        float,
        seconds(
            "Time after a request for which a member that polls over HTTP counts as a subscriber.",
            gt=0,
        ),
    ] = 60.0
    remember_s: Annotated[
        float,
        seconds(
            "Time for which the server remembers the cursor and the last number of a member after its lease "
            "has ended or it has left.",
            gt=0,
        ),
    ] = 7_776_000.0
    last_state: Annotated[
        LastState,
        setting(
            "What happens to the last state of a channel when its log is destroyed. A channel whose state "
            "was dropped begins empty the next time."
        ),
    ] = LastState.KEPT
    snapshot_age_s: Annotated[
        float,
        seconds(
            "Time for which the last state of a channel is kept after its log was destroyed. 0 means forever."
        ),
    ] = 0.0
    ping_s: Annotated[
        float,
        seconds(
            "Time without a message after which the server pings a connection. The client has the same time "
            "to answer.",
            gt=0,
        ),
    ] = 15.0
    members_max: Annotated[int, count("Maximum number of members of one channel.", "members")] = (
        1_000
    )
    snapshots_url: Annotated[
        str,
        setting(
            "PostgreSQL database for snapshots, which needs the extra `postgres`. Without one, snapshots are "
            "in the data directory.",
            pattern=POSTGRES,
            allowed="a URL such as postgresql://user:password@host/database, or nothing",
            secret=True,
        ),
    ] = ""
