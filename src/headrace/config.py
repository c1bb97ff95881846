"""The configuration: each setting with its meaning, unit, bounds and default, but not its origin.

Made once at the edge and passed down. The annotations here are the one source of validation, of
`headrace config` and of `docs/configuration.md`.
"""

from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, NamedTuple, TypeVar

from msgspec import Meta, Struct

from headrace.config_values import Address, Origins, Readers
from headrace.model import Durability

T = TypeVar("T")

NUMBER_MAX = 2**62  # offsets and sizes stay well inside what files and SQLite can count


def _setting(
    doc: str,
    unit: str = "",
    *,
    flag: str = "",
    pattern: str | None = None,
    allowed: str = "",
    secret: bool = False,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
) -> Meta:
    extra = {"unit": unit, "flag": flag, "allowed": allowed, "secret": secret}
    if pattern is not None:
        return Meta(description=doc, pattern=pattern, extra=extra)
    if gt is not None:
        return Meta(description=doc, gt=gt, le=le, extra=extra)
    return Meta(description=doc, ge=ge, le=le, extra=extra)


class LogFormat(StrEnum):
    HUMAN = "human"
    JSON = "json"


class LogLevel(StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class _Section(Struct, frozen=True, kw_only=True):
    pass


class Listen(_Section, frozen=True):
    figg: Annotated[Address, _setting("Figg over TCP.", flag="--figg")] = Address("127.0.0.1", 8119)
    ws: Annotated[
        Address,
        _setting("Wombat and Logux over WebSocket, and health.", flag="--ws"),
    ] = Address("127.0.0.1", 8120)
    http: Annotated[Address, _setting("The HTTP API, health and metrics.", flag="--http")] = (
        Address("127.0.0.1", 8121)
    )
    origins: Annotated[
        Origins,
        _setting("Which pages may connect from a browser, by their `Origin`."),
    ] = Origins((Origins.SAME_HOST,))


class Limits(_Section, frozen=True):
    connections_max: Annotated[
        int,
        _setting(
            "Open connections; further ones are closed at once.", "connections", ge=1, le=1_000_000
        ),
    ] = 10_000
    topics_attached_max: Annotated[
        int,
        _setting("Topics that one connection may be attached to.", "topics", ge=1, le=1_000_000),
    ] = 1_000
    output_bytes_max: Annotated[
        int,
        _setting(
            "Queued for one connection; above it a live subscriber goes back to reading the log.",
            "bytes",
            ge=4096,
            le=NUMBER_MAX,
        ),
    ] = 1024 * 1024
    publish_bytes_max: Annotated[
        int,
        _setting(
            "Received and not yet committed, of all connections; above it publishers wait.",
            "bytes",
            ge=4096,
            le=NUMBER_MAX,
        ),
    ] = 256 * 1024 * 1024
    silence_s: Annotated[
        float,
        _setting(
            "How long a Wombat client may be without a PING before it is given up; the protocol's 10 "
            "suits clients that send one every 5.",
            "seconds",
            gt=0,
            le=86_400,
        ),
    ] = 10.0
    memory_topic_bytes_max: Annotated[
        int,
        _setting(
            "Kept of each `memory` topic; the oldest records go first.",
            "bytes",
            ge=64,
            le=NUMBER_MAX,
        ),
    ] = 64 * 1024 * 1024
    staged_bytes_max: Annotated[
        int,
        _setting(
            "Uploaded for batches and not appended yet; above it uploads are refused.",
            "bytes",
            ge=4096,
            le=NUMBER_MAX,
        ),
    ] = 64 * 1024 * 1024 * 1024
    staged_age_s: Annotated[
        float,
        _setting(
            "How long an upload waits for its batch before it is deleted.",
            "seconds",
            gt=0,
            le=NUMBER_MAX,
        ),
    ] = 86_400.0


class Journal(_Section, frozen=True):
    file_bytes: Annotated[
        int, _setting("Size of one journal file.", "bytes", ge=16_384, le=2**40)
    ] = 64 * 1024 * 1024
    files: Annotated[
        int,
        _setting(
            "Journal files made ahead and recycled; commits wait when none is free.",
            "files",
            ge=2,
            le=1024,
        ),
    ] = 4
    rotate_s: Annotated[
        float,
        _setting(
            "Age at which a journal file is closed and handed to the applier.",
            "seconds",
            gt=0,
            le=3600,
        ),
    ] = 2.0
    commit_bytes_max: Annotated[
        int,
        _setting(
            "Gathered into one commit, that is one synchronous write.", "bytes", ge=4096, le=2**30
        ),
    ] = 1024 * 1024
    fsync_s: Annotated[
        float,
        _setting("How often data of `written` topics is synced to disk.", "seconds", gt=0, le=3600),
    ] = 1.0


class Segment(_Section, frozen=True):
    bytes: Annotated[
        int,
        _setting(
            "Size at which a topic's segment file is closed and the next begins.",
            "bytes",
            ge=64,
            le=NUMBER_MAX,
        ),
    ] = 1024 * 1024 * 1024
    open_files_max: Annotated[
        int, _setting("Segment and index files kept open for reading.", "files", ge=2, le=1_000_000)
    ] = 512


class Retention(_Section, frozen=True):
    age_s: Annotated[
        float,
        _setting(
            "How long records are kept; 0 keeps them for ever.",
            "seconds",
            ge=0,
            le=NUMBER_MAX,
        ),
    ] = 604_800.0
    bytes: Annotated[
        int,
        _setting(
            "How much of each topic is kept; 0 sets no limit.",
            "bytes",
            ge=0,
            le=NUMBER_MAX,
        ),
    ] = 0
    check_s: Annotated[
        float, _setting("How often expired segments are looked for.", "seconds", gt=0, le=86_400)
    ] = 60.0
    clock_jump_s: Annotated[
        float,
        _setting(
            "A check is skipped when the wall clock jumped by more than this since the last one.",
            "seconds",
            gt=0,
            le=NUMBER_MAX,
        ),
    ] = 3600.0

    wait_for: Annotated[
        Readers,
        _setting(
            "Readers that records are kept for until they have passed them, in topics where they have "
            "a cursor."
        ),
    ] = Readers()
    wait_s: Annotated[
        float,
        _setting(
            "How long beyond `age_s` records are kept for these readers.",
            "seconds",
            ge=0,
            le=NUMBER_MAX,
        ),
    ] = 604_800.0
    wait_bytes: Annotated[
        int,
        _setting(
            "How much beyond `bytes` of each topic is kept for these readers.",
            "bytes",
            ge=0,
            le=NUMBER_MAX,
        ),
    ] = 10 * 1024 * 1024 * 1024


class AccessToken(Struct, frozen=True, kw_only=True):
    """Who may use the HTTP API, and logs of Logux."""

    name: Annotated[
        str,
        _setting(
            "What it is called in diagnostics.",
            pattern=r"^[^\x00-\x1f]{1,255}\Z",
            allowed="a text of 1 to 255 characters",
        ),
    ]
    sha256: Annotated[
        str,
        _setting(
            "The SHA-256 of the token: the token itself is nowhere.",
            pattern=r"^[0-9a-fA-F]{64}\Z",
            allowed="64 hexadecimal digits",
            secret=True,
        ),
    ]
    user: Annotated[
        str | None,
        _setting(
            "The user whose it is: what the node id of a Logux client has before its first colon. Without "
            "one, any."
        ),
    ] = None
    grants: Annotated[
        tuple[str, ...] | None,
        _setting(
            "What it is good for: `http` for the HTTP API, and beginnings of the names of topics, such as "
            "`logux/main`. Without any, everything."
        ),
    ] = None


class Access(_Section, frozen=True):
    token: Annotated[
        tuple[AccessToken, ...],
        _setting(
            "Tokens that the HTTP API and Logux take. Without any, all may use the HTTP API, and Logux all "
            "from this machine."
        ),
    ] = ()


_HOOK = r"^(?:[A-Za-z_][\w.]*:[A-Za-z_]\w*)?\Z"


class LoguxSettings(_Section, frozen=True):
    host: Annotated[
        str,
        _setting(
            "What the server calls itself towards Logux clients.",
            pattern=r"^[^\s:]{1,255}\Z",
            allowed="a word",
        ),
    ] = "server"
    ping_s: Annotated[
        float,
        _setting(
            "How long a client may be silent before it is asked whether it is there.",
            "seconds",
            gt=0,
            le=NUMBER_MAX,
        ),
    ] = 10.0
    timeout_s: Annotated[
        float,
        _setting(
            "How long it has to answer, and to say who it is.", "seconds", gt=0, le=NUMBER_MAX
        ),
    ] = 20.0
    credentials: Annotated[
        str,
        _setting(
            "What the server shows of itself in `connected`, to clients that want to be sure."
        ),
    ] = ""
    subprotocol_min: Annotated[
        int,
        _setting(
            "The oldest subprotocol of the application that clients of protocol 5 may use.",
            "version",
            ge=0,
            le=NUMBER_MAX,
        ),
    ] = 0
    verify: Annotated[
        str,
        _setting(
            "A function of the application that says who is let in, as `module:function`; instead of tokens.",
            pattern=_HOOK,
            allowed="module:function",
        ),
    ] = ""
    filter: Annotated[
        str,
        _setting(
            "A function of the application that says who may send and who may see an event, as "
            "`module:function`.",
            pattern=_HOOK,
            allowed="module:function",
        ),
    ] = ""


class PrefixRule(Struct, frozen=True, kw_only=True):
    """What differs for topics whose name begins with `prefix`; None leaves it to shorter ones."""

    prefix: Annotated[str, _setting("Where the names of these topics begin.")]
    durability: Annotated[Durability | None, _setting("As `durability`, for these topics.")] = None
    retention_age_s: Annotated[
        float | None,
        _setting("As `retention.age_s`, for these topics.", "seconds", ge=0, le=NUMBER_MAX),
    ] = None
    retention_bytes: Annotated[
        int | None,
        _setting("As `retention.bytes`, for these topics.", "bytes", ge=0, le=NUMBER_MAX),
    ] = None
    retention_wait_for: Annotated[
        Readers | None, _setting("As `retention.wait_for`, for these topics.")
    ] = None
    segment_bytes: Annotated[
        int | None, _setting("As `segment.bytes`, for these topics.", "bytes", ge=64, le=NUMBER_MAX)
    ] = None


# These name spaces trim by rules of their own: age and size must never take a record from them.
BUILT_IN_RULES = (
    PrefixRule(prefix="channel/", retention_age_s=0, retention_bytes=0),
    PrefixRule(prefix="logux/", retention_age_s=0, retention_bytes=0),
)


class TopicRule(NamedTuple):
    """What holds for one topic, with every value resolved."""

    durability: Durability
    retention_age_s: float
    retention_bytes: int
    segment_bytes: int
    retention_wait_for: Readers = Readers()


class Config(_Section, frozen=True):
    data_dir: Annotated[
        Path,
        _setting(
            "Directory of the log; made when missing, relative to where the server starts.",
            flag="--data-dir",
        ),
    ] = Path("headrace-data")
    durability: Annotated[
        Durability,
        _setting(
            "When a record counts as published: on disk, handed to the system, or in memory.",
            flag="--durability",
        ),
    ] = Durability.SYNCED
    log_format: Annotated[
        LogFormat,
        _setting(
            "Diagnostics on standard error, for people or as JSON lines.", flag="--log-format"
        ),
    ] = LogFormat.HUMAN
    log_level: Annotated[
        LogLevel, _setting("The least important diagnostics shown.", flag="--log-level")
    ] = LogLevel.INFO
    listen: Annotated[Listen, _setting("Where the server answers.")] = Listen()
    limits: Annotated[Limits, _setting("What bounds memory.")] = Limits()
    journal: Annotated[Journal, _setting("Where commits are written first.")] = Journal()
    segment: Annotated[Segment, _setting("Where records are kept.")] = Segment()
    retention: Annotated[
        Retention, _setting("When records are deleted, whole segments at a time.")
    ] = Retention()
    access: Annotated[Access, _setting("Who is let in.")] = Access()
    logux: Annotated[LoguxSettings, _setting("Logs of events for Logux clients.")] = LoguxSettings()
    topics: Annotated[
        tuple[PrefixRule, ...], _setting("What differs by prefix of the topic's name.")
    ] = ()

    def rule(self, topic: str) -> TopicRule:
        """What holds for `topic`: each value from the longest matching prefix that sets it."""
        matching = [rule for rule in self.topics + BUILT_IN_RULES if topic.startswith(rule.prefix)]
        if not matching:
            return TopicRule(
                self.durability,
                self.retention.age_s,
                self.retention.bytes,
                self.segment.bytes,
                self.retention.wait_for,
            )
        # The sort is stable: a rule of the user comes before the built-in one of the same prefix.
        matching.sort(key=lambda rule: -len(rule.prefix))
        return TopicRule(
            durability=_first((rule.durability for rule in matching), self.durability),
            retention_age_s=_first(
                (rule.retention_age_s for rule in matching), self.retention.age_s
            ),
            retention_bytes=_first(
                (rule.retention_bytes for rule in matching), self.retention.bytes
            ),
            retention_wait_for=_first(
                (rule.retention_wait_for for rule in matching), self.retention.wait_for
            ),
            segment_bytes=_first((rule.segment_bytes for rule in matching), self.segment.bytes),
        )


def _first(values: Iterable[T | None], otherwise: T) -> T:
    return next((value for value in values if value is not None), otherwise)
