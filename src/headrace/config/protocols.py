"""Sections of the configuration for protocols: access tokens, Logux and channels."""

from dataclasses import MISSING, dataclass
from enum import StrEnum

from headrace.config.jwt import JwtSettings
from headrace.config.values import NUMBER_MAX, Grants, count, seconds, setting


@dataclass(frozen=True, kw_only=True)
class AccessToken:
    """A token of the configuration. `headrace token create` makes tokens without it."""

    name: str = setting(
        MISSING,
        "Name of the token in log lines.",
        pattern=r"^[^\x00-\x1f]{1,255}\Z",
        allowed="a text of 1 to 255 characters",
        reloads=True,
    )
    sha256: str = setting(
        MISSING,
        "SHA-256 of the token. The token itself is stored nowhere.",
        pattern=r"^[0-9a-fA-F]{64}\Z",
        allowed="64 hexadecimal digits",
        secret=True,
        reloads=True,
    )
    user: str | None = setting(
        None,
        "User that the token belongs to, if its grants are prefixes: the part of a Logux client's node id, "
        "or of a processor's name, before its first colon. Without a user, the token is valid for any user.",
        reloads=True,
    )
    grants: tuple[str, ...] | None = setting(
        None,
        "What the token allows: grants such as `publish:orders/*` (see `docs/access.md`), `http` for the "
        "HTTP API, and prefixes of topic names, such as `$logux/main`. Without grants, the token allows "
        "everything.",
        reloads=True,
    )


@dataclass(frozen=True, kw_only=True)
class CertificateGrants:
    """Grants for the holders of some client certificates."""

    match: str = setting(
        MISSING,
        "What the certificate must state: a kind, a colon and a pattern, in which `*` matches any "
        "characters. The kinds are `CN`, `O` and `OU` of the subject, and `DNS`, `URI`, `IP` and `EMAIL` of "
        "the alternative names.",
        allowed="KIND:PATTERN such as CN:billing",
        reloads=True,
    )
    grants: tuple[str, ...] = setting(
        MISSING,
        "Grants such as `publish:orders/*`. Those of all rules that match count.",
        reloads=True,
    )


@dataclass(frozen=True, kw_only=True)
class Access:
    token: tuple[AccessToken, ...] = setting(
        (),
        "Tokens, in addition to those of `headrace token`. With any of them, peers without a token have only "
        "the grants of `access.anonymous`.",
    )
    certificate: tuple[CertificateGrants, ...] = setting(
        (), "Grants of clients with a certificate of `listen.tls.client_ca`."
    )
    anonymous: Grants = setting(
        Grants(),
        "Grants of peers without credentials. With any of them, the server has access control.",
        reloads=True,
    )
    jwt: JwtSettings = setting(JwtSettings(), "JSON Web Tokens of an issuer.", reloads=True)


HOOK = r"^(?:[A-Za-z_][\w.]*:[A-Za-z_]\w*)?\Z"


REDUCERS = "last, merge, map, count, uploaded or module:function"
REDUCER = r"^(?:last|merge|map|count|uploaded|[A-Za-z_][\w.]*:[A-Za-z_]\w*)\Z"
POSTGRES = r"^(?:postgres(?:ql)?://[^\x00-\x20]*)?\Z"


@dataclass(frozen=True, kw_only=True)
class LoguxSettings:
    host: str = setting(
        "server",
        "Name of the server in its node id, which Logux clients see.",
        pattern=r"^[^\s:]{1,255}\Z",
        allowed="a word",
    )
    ping_s: float = seconds(
        10.0, "Time without a message after which the server pings a client.", gt=0
    )
    timeout_s: float = seconds(
        20.0, "Time that a client has to answer a ping, and to send its `connect`.", gt=0
    )
    credentials: str = setting(
        "",
        "Credentials of the server, which it sends in `connected` so that clients can check them.",
        secret=True,
    )
    subprotocol_min: int = setting(
        0,
        "Oldest version of the application's subprotocol that clients of protocol 5 may use.",
        "version",
        ge=0,
        le=NUMBER_MAX,
    )
    verify: str = setting(
        "",
        "Function of the application that accepts or refuses a client, as `module:function`. It replaces "
        "the tokens.",
        pattern=HOOK,
        allowed="module:function",
    )
    filter: str = setting(
        "",
        "Function of the application that decides who may send and who may see an event, as "
        "`module:function`.",
        pattern=HOOK,
        allowed="module:function",
    )


@dataclass(frozen=True, kw_only=True)
class StreamSettings:
    long_poll_s: float = seconds(
        20.0,
        "Longest time that a request with `live=long-poll` waits for records.",
        gt=0,
        reloads=True,
    )
    sse_s: float = seconds(
        60.0,
        "Time after which an answer with server-sent events ends. Its reader asks again.",
        gt=0,
        reloads=True,
    )


class LastState(StrEnum):
    KEPT = "kept"
    DROPPED = "dropped"


@dataclass(frozen=True, kw_only=True)
class ChannelSettings:
    reducer: str = setting(
        "last",
        "Function that folds messages into the last known state: `last`, `merge`, `map`, `count`, "
        "`uploaded`, or a function of the application as `module:function`.",
        pattern=REDUCER,
        allowed=REDUCERS,
    )
    lease_s: float = seconds(604_800.0, "Time for which the log is kept for a silent member.", gt=0)
    grace_s: float = seconds(
        300.0, "Time without subscribers after which the log of a channel is destroyed.", gt=0
    )
    presence_s: float = seconds(
        60.0,
        "Time after a request for which a member that polls over HTTP counts as a subscriber.",
        gt=0,
    )
    remember_s: float = seconds(
        7_776_000.0,
        "Time for which the server remembers the cursor and the last number of a member after its lease "
        "has ended or it has left.",
        gt=0,
    )
    last_state: LastState = setting(
        LastState.KEPT,
        "What happens to the last state of a channel when its log is destroyed. A channel whose state "
        "was dropped begins empty the next time.",
    )
    snapshot_age_s: float = seconds(
        0.0,
        "Time for which the last state of a channel is kept after its log was destroyed. 0 means forever.",
    )
    ping_s: float = seconds(
        15.0,
        "Time without a message after which the server pings a connection. The client has the same time "
        "to answer.",
        gt=0,
    )
    members_max: int = count(1_000, "Maximum number of members of one channel.", "members")
    snapshots_url: str = setting(
        "",
        "PostgreSQL database for snapshots, which needs the extra `postgres`. Without one, snapshots are "
        "in the data directory.",
        pattern=POSTGRES,
        allowed="a URL such as postgresql://user:password@host/database, or nothing",
        secret=True,
    )
