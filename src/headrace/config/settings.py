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
from headrace.config.values import (
    Address,
    Origins,
    ReaderNames,
    Section,
    count,
    seconds,
    setting,
    size,
)
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
    figg: Annotated[Address, setting("Address for Figg over TCP.", flag="--figg")] = Address(
        "127.0.0.1", 8119
    )
    ws: Annotated[
        Address,
        setting(
            "Address for Wombat, Logux and channels over WebSocket, and for health checks.",
            flag="--ws",
        ),
    ] = Address("127.0.0.1", 8120)
    http: Annotated[
        Address,
        setting("Address for the HTTP API, health checks and metrics.", flag="--http"),
    ] = Address("127.0.0.1", 8121)
    origins: Annotated[
        Origins,
        setting("Pages that may connect from a browser, by their `Origin` header.", reloads=True),
    ] = Origins((Origins.SAME_HOST,))


class Limits(Section, frozen=True):
    connections_max: Annotated[
        int,
        count(
            "Maximum number of open connections. The server closes further ones at once.",
            "connections",
            reloads=True,
        ),
    ] = 10_000
    topics_attached_max: Annotated[
        int,
        count(
            "Maximum number of topics that one connection may attach to.", "topics", reloads=True
        ),
    ] = 1_000
    output_bytes_max: Annotated[
        int,
        size(
            "Maximum output queued for one connection. A live subscriber whose queue is longer goes back "
            "to reading the log.",
            ge=4096,
            reloads=True,
        ),
    ] = 1024 * 1024
    publish_bytes_max: Annotated[
        int,
        size(
            "Maximum of received publishes that are not committed yet, over all connections. Publishers "
            "wait when it is reached.",
            ge=4096,
            reloads=True,
        ),
    ] = 256 * 1024 * 1024
    requests_bytes_max: Annotated[
        int,
        size(
            "Maximum memory for HTTP requests that are arriving or not answered yet, over all "
            "connections. The server answers further requests with 503.",
            ge=16 * 1024 * 1024,
            reloads=True,
        ),
    ] = 128 * 1024 * 1024
    silence_s: Annotated[
        float,
        seconds(
            "Time without a PING after which the server disconnects a Wombat client. It is also the time "
            "after which a silent named reader loses its topic to another process that waits for it. "
            "The protocol's value of 10 suits clients that send a PING every 5 seconds.",
            gt=0,
            le=86_400,
            reloads=True,
        ),
    ] = 10.0
    refusal_delay_s: Annotated[
        float,
        seconds(
            "Time that the server waits, without reading, before it closes a connection whose publish would "
            "be refused again: a reserved or bad topic name, or a payload that is too large. The time "
            "doubles with each refusal of the same address. 0 closes at once.",
            le=60,
            reloads=True,
        ),
    ] = 1.0
    refusal_delay_max_s: Annotated[
        float,
        seconds(
            "The longest such delay. With more than 5, clients that ping leave before the server closes, and "
            "cannot tell a refusal from an outage.",
            le=60,
            reloads=True,
        ),
    ] = 5.0
    refused_connections_max: Annotated[
        int,
        count(
            "Maximum number of connections that wait to be closed after a refused publish, or a quarter of "
            "`connections_max` if that is less. The server closes further ones at once.",
            "connections",
            ge=0,
            reloads=True,
        ),
    ] = 1_000
    refused_connections_per_address_max: Annotated[
        int,
        count(
            "The same for one address. All clients behind one proxy, or on one machine, share an address.",
            "connections",
            ge=0,
            reloads=True,
        ),
    ] = 250
    memory_topic_bytes_max: Annotated[
        int,
        size(
            "Maximum size of each `memory` topic. The server drops its oldest records first.",
            ge=64,
            reloads=True,
        ),
    ] = 64 * 1024 * 1024
    staged_bytes_max: Annotated[
        int,
        size(
            "Maximum size of all uploads that are not appended yet. The server refuses further uploads.",
            ge=4096,
            reloads=True,
        ),
    ] = 64 * 1024 * 1024 * 1024
    staged_age_s: Annotated[
        float,
        seconds(
            "Age at which the server deletes an upload that no batch has named.", gt=0, reloads=True
        ),
    ] = 86_400.0


class Journal(Section, frozen=True):
    file_bytes: Annotated[int, size("Size of one journal file.", ge=65_536, le=2**40)] = (
        64 * 1024 * 1024
    )
    files: Annotated[
        int,
        count(
            "Number of journal files, which are preallocated and reused. Commits wait when none is free.",
            "files",
            ge=2,
            le=1024,
        ),
    ] = 4
    rotate_s: Annotated[
        float,
        seconds(
            "Age at which the server closes a journal file and hands it to the applier.",
            gt=0,
            le=3600,
        ),
    ] = 2.0
    commit_bytes_max: Annotated[
        int,
        size("Maximum size of one commit, which is one synchronous write.", ge=4096, le=2**30),
    ] = 1024 * 1024
    fsync_s: Annotated[
        float, seconds("Seconds between fsyncs of `written` topics.", gt=0, le=3600)
    ] = 1.0


class Segment(Section, frozen=True):
    bytes: Annotated[
        int,
        size(
            "Size at which the applier closes a segment file of a topic and begins the next.", ge=64
        ),
    ] = 1024 * 1024 * 1024
    open_files_max: Annotated[
        int,
        count("Maximum number of segment and index files kept open for reading.", "files", ge=2),
    ] = 512


class Retention(Section, frozen=True):
    age_s: Annotated[
        float, seconds("Age at which records are deleted. 0 keeps them forever.", reloads=True)
    ] = 604_800.0
    bytes: Annotated[
        int, size("Maximum size of each topic. 0 means that there is no limit.", reloads=True)
    ] = 0
    check_s: Annotated[
        float,
        seconds("Seconds between searches for expired segments.", gt=0, le=86_400, reloads=True),
    ] = 60.0
    wait_for: Annotated[
        ReaderNames,
        setting(
            "Names of readers that retention waits for, in topics where they have a cursor. The reader "
            "`lake` counts in all topics.",
            reloads=True,
        ),
    ] = ReaderNames()
    wait_s: Annotated[
        float,
        seconds("Time beyond `age_s` for which records are kept for these readers.", reloads=True),
    ] = 604_800.0
    wait_bytes: Annotated[
        int,
        size("Size beyond `bytes` of each topic that is kept for these readers.", reloads=True),
    ] = 10 * 1024 * 1024 * 1024


class ClockSettings(Section, frozen=True):
    jump_s: Annotated[
        float,
        seconds(
            "Largest difference between the wall clock and the time that has passed. A larger one is a jump, "
            "which the server follows once it is confirmed.",
            gt=0,
        ),
    ] = 60.0
    confirm_s: Annotated[
        float,
        seconds("Time after which the server follows a lasting jump without an operator.", gt=0),
    ] = 86_400.0
    off_s: Annotated[
        float,
        seconds(
            "Longest time that the machine may have been off. After a reboot, a later time is a jump."
        ),
    ] = 2_678_400.0


class PrefixRule(Struct, frozen=True, kw_only=True):
    """Settings of topics whose name begins with `prefix`. None leaves a value to shorter prefixes."""

    prefix: Annotated[str, setting("Beginning of the names of these topics.")]
    durability: Annotated[Durability | None, setting("As `durability`, for these topics.")] = None
    retention_age_s: Annotated[
        float | None, seconds("As `retention.age_s`, for these topics.", reloads=True)
    ] = None
    retention_bytes: Annotated[
        int | None, size("As `retention.bytes`, for these topics.", reloads=True)
    ] = None
    retention_wait_for: Annotated[
        ReaderNames | None, setting("As `retention.wait_for`, for these topics.", reloads=True)
    ] = None
    segment_bytes: Annotated[int | None, size("As `segment.bytes`, for these topics.", ge=64)] = (
        None
    )
    reducer: Annotated[
        str | None,
        setting("As `channels.reducer`, for these topics.", pattern=REDUCER, allowed=REDUCERS),
    ] = None
    lease_s: Annotated[float | None, seconds("As `channels.lease_s`, for these topics.", gt=0)] = (
        None
    )
    grace_s: Annotated[float | None, seconds("As `channels.grace_s`, for these topics.", gt=0)] = (
        None
    )
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
            "Directory of the log, relative to the directory where the server starts. The server creates it.",
            flag="--data-dir",
        ),
    ] = Path("headrace-data")
    durability: Annotated[
        Durability,
        setting(
            "What must have happened to a record before it is acknowledged: it is on disk (`synced`), handed "
            "to the operating system (`written`), or in memory (`memory`).",
            flag="--durability",
        ),
    ] = Durability.SYNCED
    log_format: Annotated[
        LogFormat,
        setting("Format of log lines on standard error: for people, or JSON.", flag="--log-format"),
    ] = LogFormat.HUMAN
    log_level: Annotated[
        LogLevel,
        setting("Lowest level of log lines that are printed.", flag="--log-level", reloads=True),
    ] = LogLevel.INFO
    listen: Annotated[Listen, setting("Addresses that the server listens on.")] = Listen()
    limits: Annotated[Limits, setting("Limits of memory, connections and waiting times.")] = (
        Limits()
    )
    journal: Annotated[Journal, setting("The files that commits are written to first.")] = Journal()
    segment: Annotated[Segment, setting("The files that records are stored in.")] = Segment()
    retention: Annotated[
        Retention, setting("When records are deleted, whole segments at a time.")
    ] = Retention()
    clock: Annotated[
        ClockSettings, setting("When the server trusts the wall clock for times and ages.")
    ] = ClockSettings()
    access: Annotated[Access, setting("Tokens for clients.")] = Access()
    logux: Annotated[LoguxSettings, setting("Logux logs and their clients.")] = LoguxSettings()
    channels: Annotated[ChannelSettings, setting("Channels and their members.")] = ChannelSettings()
    pipeline: Annotated[
        Pipeline, setting("Jobs between the log and a lake. The server does not use this section.")
    ] = Pipeline()
    topics: Annotated[
        tuple[PrefixRule, ...], setting("Settings of topics whose names begin with a prefix.")
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
