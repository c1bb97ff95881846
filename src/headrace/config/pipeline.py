"""Options of the pipeline's jobs: each is described once, as an annotated field of its job's class.

The command line, the section `[pipeline]`, the keywords of the Python functions, their checks and the tables
in docs/pipeline.md follow from these classes. Elsewhere: arguments that only Python has, such as callbacks
(`pipeline/job.py`).
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, get_args, get_type_hints

from headrace.config.values import BYTES, NUMBER_MAX, SECONDS, KeyValues, Quantity, setting
from headrace.errors import OptionError


class LakeFormat(StrEnum):
    AUTO = "auto"
    DELTA = "delta"
    PARQUET = "parquet"
    ICEBERG = "iceberg"


class LakePartition(StrEnum):
    AUTO = "auto"
    DATE = "date"
    TOPIC = "topic"


@dataclass(frozen=True)
class Option:
    """Description of an option."""

    help: str
    usage: str = ""
    """Flag with its value, such as `--lake DIR`, or a positional argument; empty if it has neither."""
    _: KW_ONLY
    setting: str = ""
    """Name in `[pipeline]`; several jobs may share one."""
    otherwise: str = ""
    """Origin of the value if the flag is not given, for options without a setting."""
    unit: str = ""
    ge: float | None = None
    le: float | None = None
    is_secret: bool = False
    values: type[StrEnum] | None = None
    """Allowed values of the setting; the first is the default."""
    keyword: Callable[[Any], Any] = lambda value: value
    """Turns the value of the setting into the keyword of the Python function."""

    @property
    def flag(self) -> str:
        return self.usage.split(" ")[0] if self.usage.startswith("--") else ""


Directory = str | Path
Moment = datetime | int
"""Time with a zone or in UTC, or milliseconds since 1970."""


def _size(help_: str, usage: str = "", *, setting: str) -> Option:
    return Option(help_, usage, setting=setting, unit=BYTES, ge=1, le=NUMBER_MAX)


def _data_dir(help_: str) -> Option:
    return Option(help_, "--data-dir DIR")


# Options of several jobs.

Topics = Annotated[Iterable[str], Option("Only these topics.", "TOPIC")]
Pattern = Annotated[
    str,
    Option(
        "Only topics whose whole name matches this regular expression; all topics if it is empty.",
        "--pattern RE",
        setting="pattern",
    ),
]
Lake = Annotated[
    Directory,
    Option(
        "Directory or address of the lake, such as s3://bucket/lake.", "--lake DIR", setting="lake"
    ),
]
EveryS = Annotated[
    float,
    Option(
        "Time between batches of an export, and between commits of `aggregate --stream`.",
        "--every DURATION",
        setting="every_s",
        unit=SECONDS,
        ge=0,
        le=86_400,
    ),
]
BatchBytes = Annotated[
    int,
    _size(
        "How much of the log one batch reads, up to the end of a record.",
        "--batch-bytes SIZE",
        setting="batch_bytes",
    ),
]
TaskBytes = Annotated[
    int,
    _size(
        "About how much one task reads; an exported file has about this size.", setting="part_bytes"
    ),
]
EVERY_S = 5.0
BATCH_BYTES = 1 << 30
TASK_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """Options of all jobs."""

    storage_options: Annotated[
        Mapping[str, str] | None,
        Option(
            "Option of the object storage, named as its library does, such as "
            "AWS_ENDPOINT_URL=http://host:9000; may be repeated. Other users of this machine can see it.",
            "--storage-option KEY=VALUE",
            setting="storage_options",
            is_secret=True,
            keyword=lambda pairs: pairs.mapping or None,
        ),
    ] = dataclasses.field(default=None, repr=False)
    catalog_options: Annotated[
        Mapping[str, str] | None,
        Option(
            "Property of the Iceberg catalogue of the lake, named as pyiceberg does, such as "
            "uri=https://host; may be repeated. Other users of this machine can see it.",
            "--catalog-option KEY=VALUE",
            setting="catalog_options",
            is_secret=True,
            keyword=lambda pairs: pairs.mapping or None,
        ),
    ] = dataclasses.field(default=None, repr=False)
    master: Annotated[
        str,
        Option(
            "Where Spark runs: on this machine, or the address of a cluster.",
            "--master URL",
            setting="master",
        ),
    ] = "local[*]"


@dataclass(frozen=True, kw_only=True)
class ServerOptions(JobOptions):
    """Options of all jobs that may ask a server."""

    url: Annotated[
        str,
        Option(
            "The server's HTTP address; https://HOST:PORT with TLS.",
            "--http HOST:PORT",
            otherwise="env HEADRACE_HTTP, else 127.0.0.1:8121",
        ),
    ] = ""
    token: Annotated[
        str,
        Option(
            "The server's access token; other users of this machine can see it here.",
            "--token TOKEN",
            otherwise="env HEADRACE_TOKEN",
        ),
    ] = dataclasses.field(default="", repr=False)
    token_file: Annotated[
        Directory,
        Option(
            "File with the token, which is read for each request. Executors do not need it.",
            "--token-file FILE",
        ),
    ] = ""
    insecure_token: Annotated[
        bool,
        Option(
            "Send the token also without TLS to another machine, where others can read it.",
            "--insecure-token",
        ),
    ] = False
    ca: Annotated[
        str,
        Option(
            "File in PEM, on every machine, with the authority of an https server's certificate.",
            "--ca FILE",
            otherwise="env HEADRACE_CA, else the system's authorities",
        ),
    ] = ""


@dataclass(frozen=True)
class ExportOptions(ServerOptions):
    lake: Lake
    topics: Topics = ()
    _: KW_ONLY
    pattern: Pattern = ""
    format: Annotated[
        str,
        Option(
            "Format of a new lake: delta, parquet or iceberg. auto: the lake's format, or delta.",
            "--format NAME",
            setting="format",
            values=LakeFormat,
            keyword=str,
        ),
    ] = LakeFormat.AUTO.value
    by_topic: Annotated[
        bool | None,
        Option(
            "Partitions of a new lake: by date, or with --by-topic by topic and date.",
            "--by-topic",
            setting="partition",
            values=LakePartition,
            keyword={
                LakePartition.AUTO: None,
                LakePartition.DATE: False,
                LakePartition.TOPIC: True,
            }.__getitem__,
        ),
    ] = None
    decode: Annotated[
        str,
        Option(
            "Kind of payloads, to add columns that are decoded from them: json, logux or channel.",
            "--decode NAME",
            setting="decode",
        ),
    ] = ""
    schema: Annotated[
        str,
        Option(
            "Decoded columns, such as 'id bigint, name string'; all known ones if it is empty.",
            "--schema COLUMNS",
            setting="schema",
        ),
    ] = ""
    once: Annotated[
        bool, Option("Stop when the lake has all records that the log has now.", "--once")
    ] = True
    every_s: EveryS = EVERY_S
    batch_bytes: BatchBytes = BATCH_BYTES
    part_bytes: TaskBytes = TASK_BYTES
    skip_lost: Annotated[
        bool, Option("Continue without records that are deleted or damaged.", "--skip-lost")
    ] = False
    take_over: Annotated[
        bool,
        Option(
            "Make this the lake that the server's retention waits for, in place of another one.",
            "--take-over",
        ),
    ] = False
    data_dir: Annotated[
        str,
        _data_dir(
            "Read the files of this data directory. The server learns how far the lake is only with --http."
        ),
    ] = ""


@dataclass(frozen=True)
class CompactOptions(JobOptions):
    lake: Lake
    _: KW_ONLY
    file_bytes: Annotated[
        int,
        _size(
            "Size of merged files. Files of half this size or more stay as they are.",
            "--file-bytes SIZE",
            setting="file_bytes",
        ),
    ] = 128 << 20
    sweep_after_s: Annotated[
        float,
        Option(
            # Files that an export has not committed yet are not in the table either.
            "Age at which files are deleted that the table no longer names; an hour at least.",
            "--sweep-after DURATION",
            setting="sweep_after_s",
            unit=SECONDS,
            ge=3600,
            le=NUMBER_MAX,
        ),
    ] = 604_800.0
    dry_run: Annotated[
        bool, Option("Print what there is to do, and change nothing.", "--dry-run")
    ] = False


@dataclass(frozen=True)
class DedupeOptions(JobOptions):
    lake: Lake
    into: Annotated[
        Directory,
        Option(
            "Directory or address of the table without duplicates; created if it is missing.",
            "--into DIR",
            setting="dedupe_into",
        ),
    ]
    topics: Topics = ()
    _: KW_ONLY
    key: Annotated[
        str,
        Option(
            "Column of the lake that identifies a row; `payload` is one.",
            "--key COLUMN",
            setting="dedupe_key",
        ),
    ] = ""
    json_path: Annotated[
        str,
        Option(
            "Place in JSON payloads of the value that identifies a row, such as $.order.id.",
            "--json-path PATH",
            setting="dedupe_json_path",
        ),
    ] = ""
    payload: Annotated[bool, Option("Identify rows by their whole payload.", "--payload")] = False
    window_s: Annotated[
        float | None,
        Option(
            "How long a key counts after a row that is kept. `--window all`, or 0 as a setting: forever.",
            "--window DURATION",
            setting="dedupe_window_s",
            unit=SECONDS,
            ge=0,
            le=10_000_000_000,
            keyword=lambda seconds: seconds or None,
        ),
    ] = 86_400.0
    pattern: Pattern = ""
    task_bytes: TaskBytes = TASK_BYTES


@dataclass(frozen=True)
class ReplayOptions(ServerOptions):
    lake: Lake
    topic: Annotated[str, Option("Topic in the lake.", "TOPIC")]
    to: Annotated[str, Option("Topic to publish to.", "--to TOPIC")]
    _: KW_ONLY
    from_offset: Annotated[int | None, Option("Begin at this offset.", "--from-offset N", ge=0)] = (
        None
    )
    to_offset: Annotated[int | None, Option("End before this offset.", "--to-offset N", ge=1)] = (
        None
    )
    since: Annotated[
        Moment | None,
        Option("Begin at this time: an ISO 8601 time, or milliseconds since 1970.", "--since TIME"),
    ] = None
    until: Annotated[Moment | None, Option("End before this time.", "--until TIME")] = None
    rate: Annotated[
        float | None,
        Option("Records per second; as fast as possible by default.", "--rate N", ge=0.001),
    ] = None
    name: Annotated[
        str,
        Option(
            "Name that makes this another replay than earlier ones with the same options.",
            "--name NAME",
        ),
    ] = ""


@dataclass(frozen=True)
class ReportOptions(ServerOptions):
    out: Annotated[Directory, Option("File of the page.", "--out FILE", setting="report_out")] = (
        "report.html"
    )
    topics: Topics = ()
    _: KW_ONLY
    json: Annotated[Directory, Option("File for the same numbers as JSON.", "--json FILE")] = ""
    pattern: Pattern = ""
    lake: Lake = ""
    data_dir: Annotated[
        str,
        _data_dir(
            "Read the files of this data directory. Only with --http, a server is asked about its readers."
        ),
    ] = ""


@dataclass(frozen=True, kw_only=True)
class StatesOptions(ServerOptions):
    """Options of an aggregation, whether it runs once or as a stream."""

    reducer: Annotated[
        str,
        Option(
            "How messages become a state: last, count, merge, map, or module:function.",
            "--reducer NAME",
            setting="reducer",
        ),
    ]
    pattern: Pattern = ""
    publish: Annotated[
        bool,
        Option(
            "Send states to the server as snapshots, for channels with the reducer `uploaded`.",
            "--publish",
        ),
    ] = False
    task_bytes: TaskBytes = TASK_BYTES
    data_dir: Annotated[
        str,
        _data_dir("Read records that are not in the lake from the files of this data directory."),
    ] = ""


StatesInto = Annotated[
    Directory,
    Option(
        "Directory or address of the table of states; created if it is missing.",
        "--into DIR",
        setting="aggregate_into",
    ),
]


@dataclass(frozen=True)
class AggregateOptions(StatesOptions):
    lake: Lake
    into: StatesInto
    topics: Topics = ()


@dataclass(frozen=True)
class AggregateStreamOptions(StatesOptions):
    into: StatesInto
    topics: Topics = ()
    _: KW_ONLY
    lake: Lake = ""
    every_s: EveryS = EVERY_S
    batch_bytes: BatchBytes = BATCH_BYTES


@dataclass(frozen=True)
class AuditOptions(ServerOptions):
    lake: Lake = ""
    topics: Topics = ()
    _: KW_ONLY
    data_dir: Annotated[
        Directory,
        Option(
            "Read the log in this data directory.",
            "--data-dir DIR",
            otherwise="data_dir, if it exists",
        ),
    ] = ""
    url: Annotated[
        str,
        Option(
            "Read the log from this server.",
            "--http HOST:PORT",
            otherwise="if there is no data directory",
        ),
    ] = ""


JOBS: dict[str, tuple[type[JobOptions], ...]] = {
    "export": (ExportOptions,),
    "compact": (CompactOptions,),
    "dedupe": (DedupeOptions,),
    "replay": (ReplayOptions,),
    "report": (ReportOptions,),
    "aggregate": (AggregateOptions, AggregateStreamOptions),
    "audit": (AuditOptions,),
}
"""Options of each command `headrace pipeline JOB`."""


class Field(NamedTuple):
    """An option with the field that it describes."""

    name: str
    """Keyword of the Python function."""
    type: Any
    default: Any
    """Default of the Python function; None if it has none."""
    is_required: bool
    option: Option

    @property
    def key(self) -> str:
        """Key of the setting; empty without one."""
        return self.option.setting and f"pipeline.{self.option.setting}"

    @property
    def shown_default(self) -> str:
        """Default as users write it; empty if there is none to mention."""
        if isinstance(self.default, bool) or self.default in (None, "", ()):
            return ""
        unit = self.option.unit
        return str(Quantity(self.default, unit)) if unit else str(self.default)


def fields_of(*classes: type[JobOptions]) -> list[Field]:
    """Return the options of some jobs: their own first, then those that they share with others."""
    found: dict[str, Field] = {}
    for options in classes:
        hints = get_type_hints(options, include_extras=True)
        for one in dataclasses.fields(options):
            description = _description(hints[one.name])
            if description is not None and one.name not in found:
                is_required = one.default is dataclasses.MISSING
                found[one.name] = Field(
                    name=one.name,
                    type=get_args(hints[one.name])[0],
                    default=None if is_required else one.default,
                    is_required=is_required,
                    option=description,
                )
    return sorted(found.values(), key=lambda field: _SHARED.get(field.name, 0))


_SHARED = {
    "url": 1,
    "token": 2,
    "token_file": 3,
    "insecure_token": 4,
    "ca": 5,
    "data_dir": 6,
    "storage_options": 7,
    "catalog_options": 8,
    "master": 9,
}
"""Order of the options that most jobs have; all others come before."""


def _description(hint: Any) -> Option | None:
    return next((one for one in get_args(hint) if isinstance(one, Option)), None)


def check(options: JobOptions) -> None:
    """Raise OptionError for a number that is out of bounds."""
    for field in fields_of(type(options)):
        value, option = getattr(options, field.name), field.option
        if value is None or option.ge is None:
            continue
        is_high = option.le is not None and value > option.le
        if is_high or not value >= option.ge:  # also refuses NaN
            is_shown = is_high or option.le not in (None, NUMBER_MAX)
            high = f" and at most {option.le:g}" if is_shown else ""
            unit = f" {option.unit}" if option.unit else ""
            raise OptionError(
                f"{field.name} must be at least {option.ge:g}{high}{unit}, not {value:g}"
            )


def _settings() -> list[tuple[str, Any, Any]]:
    """Return name, type and description of each setting in `[pipeline]`."""
    found: dict[str, tuple[str, Any, Any]] = {}
    for field in (field for some in JOBS.values() for one in some for field in fields_of(one)):
        option = field.option
        if not option.setting or option.setting in found:
            continue
        kinds = [one for one in (get_args(field.type) or (field.type,)) if one is not type(None)]
        kind: Any = option.values or (KeyValues if kinds[0] == Mapping[str, str] else kinds[0])
        default = next(iter(option.values)) if option.values else field.default
        described = setting(
            kind() if default is None else default,
            option.help,
            option.unit,
            flag=option.flag,
            secret=option.is_secret,
            ge=option.ge,
            le=option.le,
        )
        found[option.setting] = (option.setting, kind, described)
    return list(found.values())


if TYPE_CHECKING:
    Pipeline = object
else:
    Pipeline = dataclasses.make_dataclass(
        "Pipeline", _settings(), namespace={"__module__": __name__}, frozen=True, kw_only=True
    )
