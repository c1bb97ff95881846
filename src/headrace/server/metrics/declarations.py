"""Every metric of the server: its name, its meaning and its labels. Elsewhere: values.

Names are shown with the prefix `headrace_`. `docs/metrics.md` is generated from this file. The values of a
label are known in advance, or limited in number, so that no client can make the number of series grow.
"""

from typing import NamedTuple

from headrace.broker.broker import SubscriptionState
from headrace.model import Refusal

PREFIX = "headrace_"

READERS_SHOWN_MAX = 20
"""Named readers whose lag is shown: those that are furthest behind."""

PROTOCOLS = ("figg", "wombat", "logux", "channel")
"""The protocols of connections, as `Connection.protocol` names them."""

OPERATIONS = (
    *("publish", "subscribe", "inspect", "create", "delete"),
    *("cursors", "batches", "join", "as", "admin"),
)
"""Operations that access control decides about."""

CONNECTION_STATES = ("open", "paused", "held", "closing")

COUNTERS = {
    "connections_total": "Connections that arrived, including refused ones.",
    "connections_refused_total": "Connections refused because of connections_max, also of HTTP, or of "
    "handshakes_max, while stopping, or ended because another address needed their place.",
    "connections_closed_for_bad_input_total": "Connections closed because "
    "their peer broke the protocol or a limit.",
    "http_requests_refused_total": "HTTP requests that broke a limit of size, number "
    "or time, on both listeners.",
    "records_published_total": "Records accepted for publishing.",
    "subscriptions_total": "Subscriptions started.",
    "duplicates_refused_total": "Duplicates that were not stored again: publishes of a Wombat "
    "connection, events of Logux, messages of channels, batches.",
    "channels_trimmed_total": "Times that the beginning of a channel's log was deleted.",
    "channels_destroyed_total": "Logs of channels destroyed, by an operator or because they had no members.",
    "channels_states_expired_total": "Last states of channels that were deleted because of their age.",
    "retention_segments_deleted_total": "Segments that retention has deleted.",
    "retention_bytes_deleted_total": "Bytes of the segments that retention has deleted.",
    "trace_lines_lost_total": "Lines that a trace lost because its reader was too slow.",
}
"""Counters without labels."""

GAUGES = {
    "connections": "Open connections of Figg, Wombat, Logux and channel clients.",
    "connections_held": "Connections that are held without being read after a refused publish.",
    "http_requests_bytes": "Bytes of HTTP requests that are arriving or not answered yet.",
    "pending_bytes": "Bytes received and not yet committed.",
    "journal_files_waiting": "Full journal files that are not applied to segments yet.",
    "held_back": "1 while publishes are held back, else 0.",
    "ready": "1 while /readyz answers 200, else 0.",
    "clock_jump_seconds": "Seconds of a jump of the wall clock that the server does not follow yet; else 0.",
    "damaged_runs": "Damaged ranges that readers have found since the start.",
    "staged_bytes": "Bytes uploaded for batches and not appended and deleted yet.",
    "batches_pending": "Batches that are decided and not completely appended yet.",
    "damaged_blocks": "Parts of staged files that could not be read when their batch was appended.",
    "recovery_seconds": "Duration of the recovery at the start.",
    "recovery_replayed_records": "Records that the recovery replayed from the journal.",
    "recovery_damages": "Descriptions of damage that the recovery has logged.",
    "cursors": "Cursors of named readers that the last measurement of their lag has looked at.",
    "lake_lag_records": "Records that are not exported to the lake yet: the lag of the reader `lake`.",
    "lake_topics": "Topics in which the reader `lake` has a cursor.",
    "traces": "Clients that follow a trace.",
}
"""Gauges without labels."""


LIMITS = (
    *("records_per_s", "bytes_per_s", "topics_per_s", "quota_bytes"),
    *("connections_max", "subscriptions_max", "waiting_max", "topics_max", "channels_max"),
    *("topics_attached_max", "output_bytes_max", "output_total_bytes_max", "held_bytes_max"),
    *("authentication_s", "authentication_bytes_max", "handshakes_max"),
)
"""Settings that are limits. Rates and quotas let publishers wait, the others refuse."""

SCOPES = ("server", "connection", "address", "principal")


class Labelled(NamedTuple):
    help: str
    labels: dict[str, tuple[str, ...]]
    """The values of each label."""


LABELLED_COUNTERS = {
    "refusals_total": Labelled(
        "Publishes that were refused and would be refused again, by protocol and reason.",
        {"protocol": ("figg", "wombat"), "reason": tuple(Refusal)},
    ),
    "limits_applied_total": Labelled(
        "Times that a limit applied, by its setting: something was refused, or a publisher had to wait. "
        "`of`: the limit of the whole server, or of each connection, address or principal.",
        {"limit": LIMITS, "of": SCOPES},
    ),
    "access_decisions_total": Labelled(
        "Decisions of access control, by operation.",
        {"operation": OPERATIONS, "decision": ("allowed", "refused")},
    ),
    "credentials_refused_total": Labelled(
        "Peers and requests that were refused because of wrong, missing or expired credentials.",
        {"protocol": (*PROTOCOLS, "http")},
    ),
}

LABELLED_GAUGES = {
    "open_connections": Labelled(
        "Open connections. `paused`: not read because of a limit. `held`: after a refused publish, "
        "or until there is memory for publishes that wait.",
        {"protocol": (*PROTOCOLS, "http"), "state": CONNECTION_STATES},
    ),
    "open_subscriptions": Labelled(
        "Open subscriptions. `resuming`: behind the end of the topic. `live`: at the end.",
        {
            "protocol": ("figg", "wombat", "logux", "http"),
            "state": tuple(state.value for state in SubscriptionState if state.value != "closed"),
        },
    ),
}


class Limited(NamedTuple):
    """A gauge with a label whose values are not known in advance, but limited in number."""

    help: str
    label: str
    limit: str
    """Why there are few values."""


LIMITED_GAUGES = {
    "reader_lag_records": Limited(
        "Records that a named reader has not acknowledged, over all topics.",
        "reader",
        f"the {READERS_SHOWN_MAX} readers that are furthest behind",
    ),
    "tls_certificate_expires_seconds": Limited(
        "Time when the certificate of a listener expires, in Unix seconds.",
        "listener",
        "listeners with TLS",
    ),
    "info": Limited("Always 1.", "version", "the version of this server"),
}


class Distribution(NamedTuple):
    help: str
    bounds: tuple[float, ...]
    """Upper bounds of the buckets; a last bucket takes larger values."""


_SECONDS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025),
    *(0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0),
)
_COUNTS = tuple(float(1 << bits) for bits in range(0, 17, 2))
_BYTES = tuple(float(1 << bits) for bits in range(8, 27, 2))

HISTOGRAMS = {
    "commit_seconds": Distribution(
        "From the start of a commit's write to the journal until the commit is as durable as its topics ask.",
        _SECONDS,
    ),
    "fsync_seconds": Distribution(
        "Time for which a flush of the journal waited for the disk, with the write before it.",
        _SECONDS,
    ),
    "publish_to_ack_seconds": Distribution(
        "From the arrival of a publish until its acknowledgement is about to be written, after the "
        "deliveries. Each commit counts once, with its oldest publish.",
        _SECONDS,
    ),
    "publish_to_delivery_seconds": Distribution(
        "From the arrival of a publish until live subscriptions have got it. Each commit with a live "
        "subscription counts once, with its oldest publish.",
        _SECONDS,
    ),
    "commit_records": Distribution("Records per commit: the size of a batch.", _COUNTS),
    "commit_bytes": Distribution("Bytes per commit.", _BYTES),
}

PROCESS = {
    "process_cpu_seconds_total": "User and system CPU time of the server process, in seconds.",
    "process_open_fds": "Open file descriptors of the server process.",
    "process_max_fds": "Largest number of open file descriptors that the system allows.",
    "process_resident_memory_bytes": "Resident memory of the server process.",
    "process_virtual_memory_bytes": "Virtual memory of the server process.",
    "process_start_time_seconds": "Start of the server process, in Unix seconds.",
}
"""Metrics that the Prometheus client library measures, without our prefix; on Linux only."""

APPLIER = PREFIX + "applier"
"""Prefix of the same metrics of the applier process."""
