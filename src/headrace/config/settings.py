"""The configuration: each setting with its meaning, unit, bounds and default. Elsewhere: origins of values.

The configuration is built once, at the edge, and passed down. The annotations here are the only source for
validation, `headrace config` and `docs/configuration.md`.
"""

from collections.abc import Iterable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, NamedTuple, TypeVar

from msgspec import Struct, structs

from headrace.config.pipeline import Pipeline
from headrace.config.protocols import (
    REDUCER,
    REDUCERS,
    Access,
    ChannelSettings,
    LastState,
    LoguxSettings,
)
from headrace.config.values import NUMBER_MAX, Address, Origins, ReaderNames, Section, setting
from headrace.model import CHANNEL_PREFIX, LOGUX_PREFIX, OLD_PREFIXES, Durability
from headrace.printing import quoted

T = TypeVar("T")


class LogFormat(StrEnum):
    HUMAN = "human"
    JSON = "json"


class LogLevel(StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class Listen(Section, frozen=True):
    figg: Annotated[Address, setting("Figg over TCP.", flag="--figg")] = Address("127.0.0.1", 8119)
    ws: Annotated[
        Address,
        setting("Wombat and Logux over WebSocket, and health.", flag="--ws"),
    ] = Address("127.0.0.1", 8120)
    http: Annotated[Address, setting("The HTTP API, health and metrics.", flag="--http")] = Address(
        "127.0.0.1", 8121
    )
    origins: Annotated[
        Origins,
        setting("Which pages may connect from a browser, by their `Origin`.", reloads=True),
    ] = Origins((Origins.SAME_HOST,))


class Limits(Section, frozen=True):
    connections_max: Annotated[
        int,
        setting(
            "Open connections; further ones are closed at once.",
            "connections",
            ge=1,
            le=1_000_000,
            reloads=True,
        ),
    ] = 10_000
    topics_attached_max: Annotated[
        int,
        setting(
            "Topics that one connection may be attached to.",
            "topics",
            ge=1,
            le=1_000_000,
            reloads=True,
        ),
    ] = 1_000
    output_bytes_max: Annotated[
        int,
        setting(
            "Queued for one connection; above it a live subscriber goes back to reading the log.",
            "bytes",
            ge=4096,
            le=NUMBER_MAX,
            reloads=True,
        ),
    ] = 1024 * 1024
    publish_bytes_max: Annotated[
        int,
        setting(
            "Received and not yet committed, of all connections; above it publishers wait.",
            "bytes",
            ge=4096,
            le=NUMBER_MAX,
            reloads=True,
        ),
    ] = 256 * 1024 * 1024
    requests_bytes_max: Annotated[
        int,
        setting(
            "Held for HTTP requests that are arriving or not answered yet, of all connections; above it "
            "further ones are answered with 503.",
            "bytes",
            ge=16 * 1024 * 1024,
            le=NUMBER_MAX,
            reloads=True,
        ),
    ] = 128 * 1024 * 1024
    silence_s: Annotated[
        float,
        setting(
            "How long a Wombat client may be without a PING before it is given up, and any client that reads "
            "under a name while another waits; the protocol's 10 suits clients that send one every 5.",
            "seconds",
            gt=0,
            le=86_400,
            reloads=True,
        ),
    ] = 10.0
    refusal_delay_s: Annotated[
        float,
        setting(
            "How long a connection is held, unread, after a publish that would be refused again (a reserved "
            "or bad topic name, a payload that is too large), before it is closed. Doubles with each refusal "
            "of the same address. 0 closes at once.",
            "seconds",
            ge=0,
            le=60,
            reloads=True,
        ),
    ] = 1.0
    refusal_delay_max_s: Annotated[
        float,
        setting(
            "The longest such delay. With more than 5, clients that ping leave before the server closes, and "
            "cannot tell a refusal from an outage.",
            "seconds",
            ge=0,
            le=60,
            reloads=True,
        ),
    ] = 5.0
    refused_connections_max: Annotated[
        int,
        setting(
            "Connections held after a refused publish; a quarter of `connections_max` if that is less. "
            "Further ones are closed at once.",
            "connections",
            ge=0,
            le=1_000_000,
            reloads=True,
        ),
    ] = 1_000
    refused_connections_per_address_max: Annotated[
        int,
        setting(
            "The same for one address. All clients behind a proxy, or on one machine, have one.",
            "connections",
            ge=0,
            le=1_000_000,
            reloads=True,
        ),
    ] = 250
    memory_topic_bytes_max: Annotated[
        int,
        setting(
            "Kept of each `memory` topic; the oldest records go first.",
            "bytes",
            ge=64,
            le=NUMBER_MAX,
            reloads=True,
        ),
    ] = 64 * 1024 * 1024
    staged_bytes_max: Annotated[
        int,
        setting(
            "Uploaded for batches and not appended yet; above it uploads are refused.",
            "bytes",
            ge=4096,
            le=NUMBER_MAX,
            reloads=True,
        ),
    ] = 64 * 1024 * 1024 * 1024
    staged_age_s: Annotated[
        float,
        setting(
            "How long an upload waits for its batch before it is deleted.",
            "seconds",
            gt=0,
            le=NUMBER_MAX,
            reloads=True,
        ),
    ] = 86_400.0


class Journal(Section, frozen=True):
    file_bytes: Annotated[
        int, setting("Size of one journal file.", "bytes", ge=65_536, le=2**40)
    ] = 64 * 1024 * 1024
    files: Annotated[
        int,
        setting(
            "Journal files made ahead and recycled; commits wait when none is free.",
            "files",
            ge=2,
            le=1024,
        ),
    ] = 4
    rotate_s: Annotated[
        float,
        setting(
            "Age at which a journal file is closed and handed to the applier.",
            "seconds",
            gt=0,
            le=3600,
        ),
    ] = 2.0
    commit_bytes_max: Annotated[
        int,
        setting(
            "Gathered into one commit, that is one synchronous write.", "bytes", ge=4096, le=2**30
        ),
    ] = 1024 * 1024
    fsync_s: Annotated[
        float,
        setting("How often data of `written` topics is synced to disk.", "seconds", gt=0, le=3600),
    ] = 1.0


class Segment(Section, frozen=True):
    bytes: Annotated[
        int,
        setting(
            "Size at which a topic's segment file is closed and the next begins.",
            "bytes",
            ge=64,
            le=NUMBER_MAX,
        ),
    ] = 1024 * 1024 * 1024
    open_files_max: Annotated[
        int, setting("Segment and index files kept open for reading.", "files", ge=2, le=1_000_000)
    ] = 512


class Retention(Section, frozen=True):
    age_s: Annotated[
        float,
        setting(
            "How long records are kept; 0 keeps them for ever.",
            "seconds",
            ge=0,
            le=NUMBER_MAX,
            reloads=True,
        ),
    ] = 604_800.0
    bytes: Annotated[
        int,
        setting(
            "How much of each topic is kept; 0 sets no limit.",
            "bytes",
            ge=0,
            le=NUMBER_MAX,
            reloads=True,
        ),
    ] = 0
    check_s: Annotated[
        float,
        setting(
            "How often expired segments are looked for.", "seconds", gt=0, le=86_400, reloads=True
        ),
    ] = 60.0
    wait_for: Annotated[
        ReaderNames,
        setting(
            "Readers that records are kept for until they have passed them, in topics where they have "
            "a cursor; `lake` in all topics.",
            reloads=True,
        ),
    ] = ReaderNames()
    wait_s: Annotated[
        float,
        setting(
            "How long beyond `age_s` records are kept for these readers.",
            "seconds",
            ge=0,
            le=NUMBER_MAX,
            reloads=True,
        ),
    ] = 604_800.0
    wait_bytes: Annotated[
        int,
        setting(
            "How much beyond `bytes` of each topic is kept for these readers.",
            "bytes",
            ge=0,
            le=NUMBER_MAX,
            reloads=True,
        ),
    ] = 10 * 1024 * 1024 * 1024


class ClockSettings(Section, frozen=True):
    jump_s: Annotated[
        float,
        setting(
            "By how much the wall clock may differ from the time that has passed; more is a jump, which is "
            "followed when it is confirmed.",
            "seconds",
            gt=0,
            le=NUMBER_MAX,
        ),
    ] = 60.0
    confirm_s: Annotated[
        float,
        setting(
            "How long a jump must stand until it is followed without an operator.",
            "seconds",
            gt=0,
            le=NUMBER_MAX,
        ),
    ] = 86_400.0
    off_s: Annotated[
        float,
        setting(
            "For how long the machine may have been off: after a reboot a later time is a jump.",
            "seconds",
            ge=0,
            le=NUMBER_MAX,
        ),
    ] = 2_678_400.0


class PrefixRule(Struct, frozen=True, kw_only=True):
    """Settings of topics whose name begins with `prefix`. None leaves a value to shorter prefixes."""

    prefix: Annotated[str, setting("Where the names of these topics begin.")]
    durability: Annotated[Durability | None, setting("As `durability`, for these topics.")] = None
    retention_age_s: Annotated[
        float | None,
        setting(
            "As `retention.age_s`, for these topics.", "seconds", ge=0, le=NUMBER_MAX, reloads=True
        ),
    ] = None
    retention_bytes: Annotated[
        int | None,
        setting(
            "As `retention.bytes`, for these topics.", "bytes", ge=0, le=NUMBER_MAX, reloads=True
        ),
    ] = None
    retention_wait_for: Annotated[
        ReaderNames | None, setting("As `retention.wait_for`, for these topics.", reloads=True)
    ] = None
    segment_bytes: Annotated[
        int | None, setting("As `segment.bytes`, for these topics.", "bytes", ge=64, le=NUMBER_MAX)
    ] = None
    reducer: Annotated[
        str | None,
        setting("As `channels.reducer`, for these topics.", pattern=REDUCER, allowed=REDUCERS),
    ] = None
    lease_s: Annotated[
        float | None,
        setting("As `channels.lease_s`, for these topics.", "seconds", gt=0, le=NUMBER_MAX),
    ] = None
    grace_s: Annotated[
        float | None,
        setting("As `channels.grace_s`, for these topics.", "seconds", gt=0, le=NUMBER_MAX),
    ] = None
    last_state: Annotated[
        LastState | None, setting("As `channels.last_state`, for these topics.")
    ] = None


# These name spaces have their own rules for trimming. Retention by age or size must never delete their
# records, whatever the user's rules say.
BUILT_IN_RULES = (
    PrefixRule(prefix=CHANNEL_PREFIX, retention_age_s=0, retention_bytes=0),
    PrefixRule(prefix=LOGUX_PREFIX, retention_age_s=0, retention_bytes=0),
)


class TopicRule(NamedTuple):
    """Settings of one topic, with every value resolved."""

    durability: Durability
    retention_age_s: float
    retention_bytes: int
    segment_bytes: int
    retention_wait_for: ReaderNames = ReaderNames()
    reducer: str = "last"
    lease_s: float = 0.0
    grace_s: float = 0.0
    last_state: LastState = LastState.KEPT


class Config(Section, frozen=True):
    data_dir: Annotated[
        Path,
        setting(
            "Directory of the log; made when missing, relative to where the server starts.",
            flag="--data-dir",
        ),
    ] = Path("headrace-data")
    durability: Annotated[
        Durability,
        setting(
            "When a record counts as published: on disk, handed to the system, or in memory.",
            flag="--durability",
        ),
    ] = Durability.SYNCED
    log_format: Annotated[
        LogFormat,
        setting("Diagnostics on standard error, for people or as JSON lines.", flag="--log-format"),
    ] = LogFormat.HUMAN
    log_level: Annotated[
        LogLevel,
        setting("The least important diagnostics shown.", flag="--log-level", reloads=True),
    ] = LogLevel.INFO
    listen: Annotated[Listen, setting("Where the server answers.")] = Listen()
    limits: Annotated[Limits, setting("What bounds memory.")] = Limits()
    journal: Annotated[Journal, setting("Where commits are written first.")] = Journal()
    segment: Annotated[Segment, setting("Where records are kept.")] = Segment()
    retention: Annotated[
        Retention, setting("When records are deleted, whole segments at a time.")
    ] = Retention()
    clock: Annotated[
        ClockSettings, setting("When the wall clock is believed, for times and ages.")
    ] = ClockSettings()
    access: Annotated[Access, setting("Who is let in.")] = Access()
    logux: Annotated[LoguxSettings, setting("Logs of events for Logux clients.")] = LoguxSettings()
    channels: Annotated[ChannelSettings, setting("Channels of a few processors each.")] = (
        ChannelSettings()
    )
    pipeline: Annotated[
        Pipeline, setting("Jobs between the log and a lake; the server does not read it.")
    ] = Pipeline()
    topics: Annotated[
        tuple[PrefixRule, ...], setting("What differs by prefix of the topic's name.")
    ] = ()

    def rule(self, topic: str) -> TopicRule:
        """Return the settings of `topic`: each value comes from the longest matching prefix that sets it."""
        by_length = sorted(_with_present_names(self.topics), key=lambda rule: -len(rule.prefix))
        matching = [rule for rule in (*BUILT_IN_RULES, *by_length) if topic.startswith(rule.prefix)]
        retention, channels = self.retention, self.channels
        durability = _first((rule.durability for rule in matching), self.durability)
        if durability is Durability.MEMORY and topic.startswith(CHANNEL_PREFIX):
            durability = Durability.WRITTEN  # the notes of a channel are always on disk
        return TopicRule(
            durability=durability,
            retention_age_s=_first((rule.retention_age_s for rule in matching), retention.age_s),
            retention_bytes=_first((rule.retention_bytes for rule in matching), retention.bytes),
            retention_wait_for=_first(
                (rule.retention_wait_for for rule in matching), retention.wait_for
            ),
            segment_bytes=_first((rule.segment_bytes for rule in matching), self.segment.bytes),
            reducer=_first((rule.reducer for rule in matching), channels.reducer),
            lease_s=_first((rule.lease_s for rule in matching), channels.lease_s),
            grace_s=_first((rule.grace_s for rule in matching), channels.grace_s),
            last_state=_first((rule.last_state for rule in matching), channels.last_state),
        )


def _with_present_names(rules: Sequence[PrefixRule]) -> list[PrefixRule]:
    """Return the rules, and the old rules for channels and Logux logs again under their present prefixes."""
    old = [structs.replace(rule, prefix=f"${rule.prefix}") for rule in _old_rules(rules)]
    return [*rules, *old]


def _old_rules(rules: Sequence[PrefixRule]) -> list[PrefixRule]:
    """Return rules with old prefixes of reserved topics, unless there is a rule for the present prefix."""
    prefixes = {rule.prefix for rule in rules}
    return [
        rule
        for rule in rules
        if rule.prefix.startswith(tuple(OLD_PREFIXES)) and f"${rule.prefix}" not in prefixes
    ]


def old_names(config: Config) -> list[str]:
    """Return a sentence for each setting that uses an old name for channels or Logux logs."""
    rules = [
        f"the [[topics]] rule for {quoted(rule.prefix)} counts for {quoted('$' + rule.prefix)} too, where "
        f"channels and logs of Logux are now: write {quoted('$' + rule.prefix)}, or add a rule for that if "
        f"{quoted(rule.prefix)} is meant"
        for rule in _old_rules(config.topics)
    ]
    grants = [
        f"the grant {quoted(grant)} of the token {quoted(token.name)} counts as {quoted('$' + grant)}: "
        "write that"
        for token in config.access.token
        for grant in token.grants or ()
        if grant.startswith(tuple(OLD_PREFIXES))
    ]
    return rules + grants


def _first(values: Iterable[T | None], otherwise: T) -> T:
    return next((value for value in values if value is not None), otherwise)
