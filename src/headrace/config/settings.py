"""The configuration: each setting with its meaning, unit, bounds and default. Elsewhere: origins of values.

The configuration is built once, at the edge, and passed down. The fields here are the only source for
validation, `headrace config` and `docs/configuration.md`.
"""

from collections.abc import Sequence
from dataclasses import MISSING, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

from headrace.config.pipeline import Pipeline
from headrace.config.protocols import (
    REDUCER,
    REDUCERS,
    Access,
    ChannelSettings,
    LastState,
    LoguxSettings,
    StreamSettings,
)
from headrace.config.values import (
    BYTES,
    FILE,
    Address,
    HostNames,
    ListenerNames,
    Origins,
    ReaderNames,
    count,
    no_limit,
    rate,
    seconds,
    setting,
    size,
)
from headrace.model import (
    AUDIT_TOPIC,
    CHANNEL_PREFIX,
    LOGUX_PREFIX,
    OLD_PREFIXES,
    Durability,
)
from headrace.printing import quoted


class LogFormat(StrEnum):
    HUMAN = "human"
    JSON = "json"


class LogLevel(StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class TlsVersion(StrEnum):
    TLS_1_2 = "1.2"
    TLS_1_3 = "1.3"


@dataclass(frozen=True, kw_only=True)
class Tls:
    cert: str = setting(
        "",
        "File with the server's certificate and those of the authorities between it and a known one, in "
        "PEM. It turns TLS on: plain connections are then refused.",
        pattern=FILE,
        allowed="a path, or nothing",
        reloads=True,
    )
    key: str = setting(
        "",
        "File with the private key in PEM, without a passphrase. Without a value, the key is in the file "
        "of the certificate.",
        pattern=FILE,
        allowed="a path, or nothing",
        reloads=True,
    )
    client_ca: str = setting(
        "",
        "File with the authorities of client certificates, in PEM. With it, the server asks each client "
        "for a certificate; a client may have none.",
        pattern=FILE,
        allowed="a path, or nothing",
        reloads=True,
    )
    min_version: TlsVersion = setting(
        TlsVersion.TLS_1_2, "Oldest version of TLS that a client may use.", reloads=True
    )
    off: ListenerNames = setting(ListenerNames(), "Listeners that stay without TLS.")

    def covers(self, listener: str) -> bool:
        """True if this listener speaks TLS."""
        return bool(self.cert) and listener not in self.off


@dataclass(frozen=True, kw_only=True)
class Listen:
    figg: Address = setting(Address("127.0.0.1", 8119), "Address for Figg over TCP.", flag="--figg")
    ws: Address = setting(
        Address("127.0.0.1", 8120),
        "Address for Wombat, Logux and channels over WebSocket, and for health checks.",
        flag="--ws",
    )
    http: Address = setting(
        Address("127.0.0.1", 8121),
        "Address for the HTTP API, health checks and metrics.",
        flag="--http",
    )
    origins: Origins = setting(
        Origins((Origins.SAME_HOST,)),
        "Pages that may connect from a browser, by their `Origin` header.",
        reloads=True,
    )
    hosts: HostNames = setting(
        HostNames(),
        "Names by which clients without credentials may call the server, besides `localhost` and loopback "
        "addresses. Their requests for other hosts get 421: a page of another site may have pointed its "
        "own name at this machine. They only count without access control and with `access.anonymous`.",
        reloads=True,
    )
    insecure_open: bool = setting(
        default=False,
        doc="Listen on addresses that other machines reach, although there is no access control. Everyone "
        "who reaches them may then do everything. `/healthz` shows it.",
        flag="--insecure-open",
    )
    tls: Tls = setting(Tls(), "TLS on the listeners.")


@dataclass(frozen=True, kw_only=True)
class PeerLimits:
    """Limits of one kind of peer, or of one peer. 0 means that there is no limit."""

    of: str = setting(
        MISSING,
        "The peers that these limits are for: `connection`, `address` or `principal` for each of these on "
        "its own, or one principal, such as `token:shipper`, whose limits replace those of `principal`.",
        pattern=r"^(?:connection|address|principal|anonymous|(?:token|jwt|cert|app):[^\x00-\x1f]{1,255})\Z",
        allowed="connection, address, principal, or a principal such as token:NAME, jwt:NAME or cert:NAME",
        reloads=True,
    )
    records_per_s: int | None = rate("Records that may be published per second.", "records")
    bytes_per_s: int | None = rate("Bytes that may be published per second.", BYTES)
    topics_per_s: int | None = rate("Topics that publishes may create per second.", "topics")
    connections_max: int | None = rate(
        "Maximum number of open connections. Connections of HTTP are counted apart.", "connections"
    )
    subscriptions_max: int | None = rate(
        "Maximum number of subscriptions, named readers and joined channels.", "subscriptions"
    )
    waiting_max: int | None = rate(
        "Maximum number of HTTP requests that wait for news at the same time.", "requests"
    )


@dataclass(frozen=True, kw_only=True)
class Limits:
    connections_max: int = count(
        10_000,
        "Maximum number of open connections. The server closes further ones at once, unless a peer without "
        "credentials can give way: the one that has waited longest, of the address that has most of them. "
        "Connections of HTTP are counted apart, with the same limit; further ones get 503.",
        "connections",
    )
    records_per_s: int = no_limit(
        "Records that all clients together may publish per second. The server reads no more of a publisher "
        "until its turn comes; a second's worth may come at once.",
        "records",
    )
    bytes_per_s: int = no_limit(
        "Bytes that all clients together may publish per second, in the same way.", BYTES
    )
    topics_per_s: int = no_limit(
        "Topics that publishes of all clients together may create per second, in the same way.",
        "topics",
    )
    topics_max: int = no_limit(
        "Maximum number of topics. The server refuses publishes that would create further ones.",
        "topics",
    )
    channels_max: int = no_limit(
        "Maximum number of channels that have a log. The server refuses to create further ones.",
        "channels",
    )
    subscriptions_max: int = no_limit(
        "Maximum number of subscriptions, named readers and joined channels of all connections.",
        "subscriptions",
    )
    waiting_max: int = no_limit(
        "Maximum number of HTTP requests that wait for news at the same time.",
        "requests",
        default=1_000,
    )
    held_bytes_max: int = size(
        256 * 1024 * 1024,
        "Maximum memory for publishes that wait for a rate or a quota. Above three quarters, the server "
        "reads nothing more of such publishers, not even PINGs. At the limit, it keeps nothing more of "
        "further ones, and ends their connections when there is memory: their clients send again.",
        ge=4096,
    )
    output_total_bytes_max: int = size(
        1024 * 1024 * 1024,
        "Maximum output queued for all connections. Above it, live subscribers whose connection is slow go "
        "back to reading the log.",
        ge=4096,
    )
    admitted_max: int = count(
        32,
        "Maximum number of new connections of a listener that the server accepts before other connections "
        "have their turn.",
        "connections",
    )
    handshakes_max: int = count(
        1_024,
        "Maximum number of peers in a TLS handshake, and of peers whose request for a WebSocket is not "
        "complete. When it is reached, the address that has most of them gives up the one that has waited "
        "longest.",
        "handshakes",
    )
    authentication_s: float = seconds(
        10.0,
        "Time in which a peer that needs credentials must show them.",
        gt=0,
        le=3600,
    )
    authentication_bytes_max: int = size(
        65_536,
        "Maximum size of what such a peer may send before.",
        ge=1024,
    )
    peer: tuple[PeerLimits, ...] = setting(
        (), "Limits of each connection, address and principal, and of single principals."
    )
    topics_attached_max: int = count(
        1_000, "Maximum number of topics that one connection may attach to.", "topics"
    )
    output_bytes_max: int = size(
        1024 * 1024,
        "Maximum output queued for one connection. A live subscriber whose queue is longer goes back "
        "to reading the log.",
        ge=4096,
    )
    publish_bytes_max: int = size(
        256 * 1024 * 1024,
        "Maximum of received publishes that are not committed yet, over all connections. Publishers "
        "wait when it is reached.",
        ge=4096,
    )
    requests_bytes_max: int = size(
        128 * 1024 * 1024,
        "Maximum memory for HTTP requests that are arriving or not answered yet, over all "
        "connections. The server answers further requests with 503.",
        ge=16 * 1024 * 1024,
    )
    silence_s: float = seconds(
        10.0,
        "Time without a PING after which the server disconnects a Wombat client. It is also the time "
        "after which a silent named reader loses its topic to another process that waits for it. "
        "The protocol's value of 10 suits clients that send a PING every 5 seconds.",
        gt=0,
        le=86_400,
    )
    refusal_delay_s: float = seconds(
        1.0,
        "Time that the server waits, without reading, before it closes a connection whose publish would "
        "be refused again: a reserved or bad topic name, or a payload that is too large. The time "
        "doubles with each refusal of the same address. 0 closes at once.",
        le=60,
    )
    refusal_delay_max_s: float = seconds(
        5.0,
        "The longest such delay. With more than 5, clients that ping leave before the server closes, and "
        "cannot tell a refusal from an outage.",
        le=60,
    )
    refused_connections_max: int = count(
        1_000,
        "Maximum number of connections that wait to be closed after a refused publish, or a quarter of "
        "`connections_max` if that is less. The server closes further ones at once.",
        "connections",
        ge=0,
    )
    refused_connections_per_address_max: int = count(
        250,
        "The same for one address. All clients behind one proxy, or on one machine, share an address.",
        "connections",
        ge=0,
    )
    memory_topic_bytes_max: int = size(
        64 * 1024 * 1024,
        "Maximum size of each `memory` topic. The server drops its oldest records first.",
        ge=64,
    )
    staged_bytes_max: int = size(
        64 * 1024 * 1024 * 1024,
        "Maximum size of all uploads that are not appended yet. The server refuses further uploads.",
        ge=4096,
    )
    staged_age_s: float = seconds(
        86_400.0,
        "Age at which the server deletes an upload that no batch has named.",
        gt=0,
    )


@dataclass(frozen=True, kw_only=True)
class Journal:
    file_bytes: int = size(64 * 1024 * 1024, "Size of one journal file.", ge=65_536, le=2**40)
    files: int = count(
        4,
        "Number of journal files, which are preallocated and reused. Commits wait when none is free.",
        "files",
        ge=2,
        le=1024,
    )
    rotate_s: float = seconds(
        2.0,
        "Age at which the server closes a journal file and hands it to the applier.",
        gt=0,
        le=3600,
    )
    commit_bytes_max: int = size(
        1024 * 1024,
        "Maximum size of one commit, which is one synchronous write.",
        ge=4096,
        le=2**30,
    )
    fsync_s: float = seconds(1.0, "Seconds between fsyncs of `written` topics.", gt=0, le=3600)


@dataclass(frozen=True, kw_only=True)
class Segment:
    bytes: int = size(
        1024 * 1024 * 1024,
        "Size at which the applier closes a segment file of a topic and begins the next.",
        ge=64,
    )
    open_files_max: int = count(
        512, "Maximum number of segment and index files kept open for reading.", "files", ge=2
    )


@dataclass(frozen=True, kw_only=True)
class Retention:
    age_s: float = seconds(604_800.0, "Age at which records are deleted. 0 keeps them forever.")
    bytes: int = size(0, "Maximum size of each topic. 0 means that there is no limit.")
    check_s: float = seconds(
        60.0, "Seconds between searches for expired segments.", gt=0, le=86_400
    )
    wait_for: ReaderNames = setting(
        ReaderNames(),
        "Names of readers that retention waits for, in topics where they have a cursor. The reader "
        "`lake` counts in all topics.",
    )
    wait_s: float = seconds(
        604_800.0, "Time beyond `age_s` for which records are kept for these readers."
    )
    wait_bytes: int = size(
        10 * 1024 * 1024 * 1024,
        "Size beyond `bytes` of each topic that is kept for these readers.",
    )


@dataclass(frozen=True, kw_only=True)
class ClockSettings:
    jump_s: float = seconds(
        60.0,
        "Largest step of the wall clock that the server follows, and largest sum of such steps in an hour. "
        "A larger one is a jump, which the server follows once it is confirmed.",
        gt=0,
    )
    confirm_s: float = seconds(
        86_400.0, "Time after which the server follows a lasting jump without an operator.", gt=0
    )
    off_s: float = seconds(
        2_678_400.0,
        "Longest time that the machine may have been off. After a reboot, the server follows a clock that "
        "is up to this much later as soon as NTP has synchronised it. A later time is a jump.",
    )


@dataclass(frozen=True, kw_only=True)
class PrefixRule:
    """Settings of topics whose name begins with `prefix`. None leaves a value to shorter prefixes."""

    prefix: str = setting(MISSING, "Beginning of the names of these topics.")
    durability: Durability | None = setting(None, "As `durability`, for these topics.")
    retention_age_s: float | None = seconds(
        None, "As `retention.age_s`, for these topics.", reloads=True
    )
    retention_bytes: int | None = size(
        None, "As `retention.bytes`, for these topics.", reloads=True
    )
    retention_wait_for: ReaderNames | None = setting(
        None, "As `retention.wait_for`, for these topics.", reloads=True
    )
    quota_bytes: int | None = size(
        None,
        "Maximum size of all these topics together. Publishers wait until records are deleted. "
        "0 means that there is no limit.",
        reloads=True,
    )
    segment_bytes: int | None = size(None, "As `segment.bytes`, for these topics.", ge=64)
    reducer: str | None = setting(
        None, "As `channels.reducer`, for these topics.", pattern=REDUCER, allowed=REDUCERS
    )
    lease_s: float | None = seconds(None, "As `channels.lease_s`, for these topics.", gt=0)
    grace_s: float | None = seconds(None, "As `channels.grace_s`, for these topics.", gt=0)
    last_state: LastState | None = setting(None, "As `channels.last_state`, for these topics.")


# These name spaces have their own rules for trimming. Retention by age or size must never delete their
# records, whatever the user's rules say.
BUILT_IN_RULES = (
    PrefixRule(prefix=CHANNEL_PREFIX, retention_age_s=0, retention_bytes=0),
    PrefixRule(prefix=LOGUX_PREFIX, retention_age_s=0, retention_bytes=0),
)


_ALWAYS_ON_DISK = (CHANNEL_PREFIX, AUDIT_TOPIC)
"""Beginnings of topics that are on disk whatever the rules say: notes of channels, and the audit trail."""

AUDIT_AGE_S = 31_536_000.0
"""Age at which records of the audit trail are deleted, unless a rule for its topic says otherwise: a year."""


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


@dataclass(frozen=True, kw_only=True)
class Config:
    data_dir: Path = setting(
        Path("headrace-data"),
        "Directory of the log, relative to the directory where the server starts. The server creates it.",
        flag="--data-dir",
    )
    durability: Durability = setting(
        Durability.SYNCED,
        "What must have happened to a record before it is acknowledged: it is on disk (`synced`), handed "
        "to the operating system (`written`), or in memory (`memory`).",
        flag="--durability",
    )
    log_format: LogFormat = setting(
        LogFormat.HUMAN,
        "Format of log lines on standard error: for people, or JSON.",
        flag="--log-format",
    )
    log_level: LogLevel = setting(
        LogLevel.INFO,
        "Lowest level of log lines that are printed.",
        flag="--log-level",
        reloads=True,
    )
    listen: Listen = setting(Listen(), "Addresses that the server listens on.")
    limits: Limits = setting(
        Limits(), "Limits of memory, connections and waiting times.", reloads=True
    )
    journal: Journal = setting(Journal(), "The files that commits are written to first.")
    segment: Segment = setting(Segment(), "The files that records are stored in.")
    retention: Retention = setting(
        Retention(), "When records are deleted, whole segments at a time.", reloads=True
    )
    clock: ClockSettings = setting(
        ClockSettings(), "When the server trusts the wall clock for times and ages."
    )
    access: Access = setting(Access(), "Tokens for clients.")
    logux: LoguxSettings = setting(LoguxSettings(), "Logux logs and their clients.")
    channels: ChannelSettings = setting(ChannelSettings(), "Channels and their members.")
    streams: StreamSettings = setting(StreamSettings(), "Durable Streams over HTTP.", reloads=True)
    pipeline: Pipeline = setting(
        Pipeline(), "Jobs between the log and a lake. The server does not use this section."
    )
    topics: tuple[PrefixRule, ...] = setting(
        (), "Settings of topics whose names begin with a prefix."
    )

    def rule(self, topic: str) -> TopicRule:
        """Return the settings of `topic`: each value comes from the longest matching prefix that sets it."""
        by_length = sorted(_with_present_names(self.topics), key=lambda rule: -len(rule.prefix))
        matching = [rule for rule in (*BUILT_IN_RULES, *by_length) if topic.startswith(rule.prefix)]
        retention, channels = self.retention, self.channels
        values: dict[str, Any] = {
            "durability": self.durability,
            "retention_age_s": retention.age_s,
            "retention_bytes": retention.bytes,
            "retention_wait_for": retention.wait_for,
            "segment_bytes": self.segment.bytes,
            "reducer": channels.reducer,
            "lease_s": channels.lease_s,
            "grace_s": channels.grace_s,
            "last_state": channels.last_state,
        }
        if topic == AUDIT_TOPIC:
            values |= {"retention_age_s": AUDIT_AGE_S, "retention_bytes": 0}
        for rule in reversed(matching):
            values |= {key: own for key in values if (own := getattr(rule, key)) is not None}
        if values["durability"] is Durability.MEMORY and topic.startswith(_ALWAYS_ON_DISK):
            values["durability"] = Durability.WRITTEN
        return TopicRule(**values)


def _with_present_names(rules: Sequence[PrefixRule]) -> list[PrefixRule]:
    """Return the rules, and the old rules for channels and Logux logs again under their present prefixes."""
    old = [replace(rule, prefix=f"${rule.prefix}") for rule in _old_rules(rules)]
    return [*rules, *old]


def _old_rules(rules: Sequence[PrefixRule]) -> list[PrefixRule]:
    """Return rules with old prefixes of reserved topics, unless there is a rule for the present prefix."""
    prefixes = {rule.prefix for rule in rules}
    return [
        rule
        for rule in rules
        if rule.prefix.startswith(OLD_PREFIXES) and f"${rule.prefix}" not in prefixes
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
        if grant.startswith(OLD_PREFIXES)
    ]
    return rules + grants
