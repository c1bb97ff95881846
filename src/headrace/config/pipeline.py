"""Options of the pipeline's jobs: each is described once, as an annotated field of its job's class.

The command line, the section `[pipeline]`, the keywords of the Python functions, their checks and the tables
in docs/pipeline.md follow from these classes. Elsewhere: arguments that only Python has, such as callbacks
(`pipeline/job.py`).
"""

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, get_args, get_type_hints

import msgspec

from headrace.config.values import BYTES, NUMBER_MAX, SECONDS, Quantity, Section, setting
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


@dataclass(frozen=True, kw_only=True)
class Option:
    """Description of an option."""

    help: str
    flag: str = ""
    """Flag of the command line. An option with a `metavar` and without a flag is a positional argument."""
    metavar: str = ""
    setting: str = ""
    """Name in `[pipeline]`; several jobs may share one."""
    otherwise: str = ""
    """Origin of the value if the flag is not given, for options without a setting."""
    unit: str = ""
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    values: type[StrEnum] | None = None
    """Allowed values of the setting; the first is the default."""
    keyword: Callable[[Any], Any] = lambda value: value
    """Turns the value of the setting into the keyword of the Python function."""


Directory = str | Path
Moment = datetime | int
"""Time with a zone or in UTC, or milliseconds since 1970."""

# Options of several jobs.

Topics = Annotated[Iterable[str], Option(help="Only these topics.", metavar="TOPIC")]
Pattern = Annotated[
    str,
    Option(
        help="Only topics whose whole name matches this regular expression; all topics if it is empty.",
        flag="--pattern",
        metavar="RE",
        setting="pattern",
    ),
]
Lake = Annotated[
    Directory,
    Option(help="Directory of the lake.", flag="--lake", metavar="DIR", setting="lake"),
]
Url = Annotated[
    str,
    Option(
        help="The server's HTTP address.",
        flag="--http",
        metavar="HOST:PORT",
        otherwise="env HEADRACE_HTTP, else 127.0.0.1:8121",
    ),
]
Token = Annotated[
    str,
    Option(
        help="The server's access token; other users of this machine can see it here.",
        flag="--token",
        metavar="TOKEN",
        otherwise="env HEADRACE_TOKEN",
    ),
]
EveryS = Annotated[
    float,
    Option(
        help="Time between batches of an export, and between commits of `aggregate --stream`.",
        flag="--every",
        metavar="DURATION",
        setting="every_s",
        unit=SECONDS,
        ge=0,
        le=86_400,
    ),
]
BatchBytes = Annotated[
    int,
    Option(
        help="How much of the log one batch reads, up to the end of a record.",
        flag="--batch-bytes",
        metavar="SIZE",
        setting="batch_bytes",
        unit=BYTES,
        ge=1,
        le=NUMBER_MAX,
    ),
]
TaskBytes = Annotated[
    int,
    Option(
        help="About how much one task reads; an exported file has about this size.",
        setting="part_bytes",
        unit=BYTES,
        ge=1,
        le=NUMBER_MAX,
    ),
]
EVERY_S = 5.0
BATCH_BYTES = 1 << 30
TASK_BYTES = 64 << 20


def _data_dir(help_: str) -> Option:
    return Option(help=help_, flag="--data-dir", metavar="DIR")


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """Options of all jobs."""

    master: Annotated[
        str,
        Option(
            help="Where Spark runs: on this machine, or the address of a cluster.",
            flag="--master",
            metavar="URL",
            setting="master",
        ),
    ] = "local[*]"


@dataclass(frozen=True)
class ExportOptions(JobOptions):
    lake: Lake
    topics: Topics = ()
    _: KW_ONLY
    pattern: Pattern = ""
    format: Annotated[
        str,
        Option(
            help="Format of a new lake: delta, parquet or iceberg. auto: the lake's format, or delta.",
            flag="--format",
            metavar="NAME",
            setting="format",
            values=LakeFormat,
            keyword=str,
        ),
    ] = LakeFormat.AUTO.value
    by_topic: Annotated[
        bool | None,
        Option(
            help="Partitions of a new lake: by date, or with --by-topic by topic and date.",
            flag="--by-topic",
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
            help="Kind of payloads, to add columns that are decoded from them: json, logux or channel.",
            flag="--decode",
            metavar="NAME",
            setting="decode",
        ),
    ] = ""
    schema: Annotated[
        str,
        Option(
            help="Decoded columns, such as 'id bigint, tags array<string>'; all known ones if it is empty.",
            flag="--schema",
            metavar="COLUMNS",
            setting="schema",
        ),
    ] = ""
    once: Annotated[
        bool,
        Option(help="Stop when the lake has all records that the log has now.", flag="--once"),
    ] = True
    every_s: EveryS = EVERY_S
    batch_bytes: BatchBytes = BATCH_BYTES
    part_bytes: TaskBytes = TASK_BYTES
    skip_lost: Annotated[
        bool,
        Option(help="Continue without records that are deleted or damaged.", flag="--skip-lost"),
    ] = False
    take_over: Annotated[
        bool,
        Option(
            help="Make this the lake that the server's retention waits for, in place of another one.",
            flag="--take-over",
        ),
    ] = False
    url: Url = ""
    token: Token = ""
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
        Option(
            help="Size of merged files. Files of half this size or more stay as they are.",
            flag="--file-bytes",
            metavar="SIZE",
            setting="file_bytes",
            unit=BYTES,
            ge=1,
            le=NUMBER_MAX,
        ),
    ] = 128 << 20
    sweep_after_s: Annotated[
        float,
        Option(
            # Files that an export has not committed yet are not in the table either.
            help="Age at which files are deleted that the table no longer names; an hour at least.",
            flag="--sweep-after",
            metavar="DURATION",
            setting="sweep_after_s",
            unit=SECONDS,
            ge=3600,
            le=NUMBER_MAX,
        ),
    ] = 604_800.0
    dry_run: Annotated[
        bool, Option(help="Print what there is to do, and change nothing.", flag="--dry-run")
    ] = False


@dataclass(frozen=True)
class DedupeOptions(JobOptions):
    lake: Lake
    into: Annotated[
        Directory,
        Option(
            help="Directory of the table without duplicates; created if it is missing.",
            flag="--into",
            metavar="DIR",
            setting="dedupe_into",
        ),
    ]
    topics: Topics = ()
    _: KW_ONLY
    key: Annotated[
        str,
        Option(
            help="Column of the lake that identifies a row; `payload` is one.",
            flag="--key",
            metavar="COLUMN",
            setting="dedupe_key",
        ),
    ] = ""
    json_path: Annotated[
        str,
        Option(
            help="Place in JSON payloads of the value that identifies a row, such as $.order.id.",
            flag="--json-path",
            metavar="PATH",
            setting="dedupe_json_path",
        ),
    ] = ""
    payload: Annotated[
        bool, Option(help="Identify rows by their whole payload.", flag="--payload")
    ] = False
    window_s: Annotated[
        float | None,
        Option(
            help="How long a key counts after a row that is kept; for ever with `--window all`, or 0.",
            flag="--window",
            metavar="DURATION",
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
class ReplayOptions(JobOptions):
    lake: Lake
    topic: Annotated[str, Option(help="Topic in the lake.", metavar="TOPIC")]
    to: Annotated[str, Option(help="Topic to publish to.", flag="--to", metavar="TOPIC")]
    _: KW_ONLY
    from_offset: Annotated[
        int | None, Option(help="Begin at this offset.", flag="--from-offset", metavar="N", ge=0)
    ] = None
    to_offset: Annotated[
        int | None, Option(help="End before this offset.", flag="--to-offset", metavar="N", ge=1)
    ] = None
    since: Annotated[
        Moment | None,
        Option(
            help="Begin at this time: an ISO 8601 time, or milliseconds since 1970.",
            flag="--since",
            metavar="TIME",
        ),
    ] = None
    until: Annotated[
        Moment | None, Option(help="End before this time.", flag="--until", metavar="TIME")
    ] = None
    rate: Annotated[
        float | None,
        Option(
            help="Records per second; as fast as possible by default.",
            flag="--rate",
            metavar="N",
            gt=0,
        ),
    ] = None
    name: Annotated[
        str,
        Option(
            help="Name that makes this another replay than earlier ones with the same options.",
            flag="--name",
            metavar="NAME",
        ),
    ] = ""
    url: Url = ""
    token: Token = ""


@dataclass(frozen=True)
class ReportOptions(JobOptions):
    out: Annotated[
        Directory,
        Option(help="File of the page.", flag="--out", metavar="FILE", setting="report_out"),
    ] = "report.html"
    topics: Topics = ()
    _: KW_ONLY
    json: Annotated[
        Directory,
        Option(help="File for the same numbers as JSON.", flag="--json", metavar="FILE"),
    ] = ""
    pattern: Pattern = ""
    lake: Lake = ""
    url: Url = ""
    token: Token = ""
    data_dir: Annotated[
        str,
        _data_dir(
            "Read the files of this data directory. Only with --http, a server is asked about its readers."
        ),
    ] = ""


@dataclass(frozen=True, kw_only=True)
class StatesOptions(JobOptions):
    """Options of an aggregation, whether it runs once or as a stream."""

    reducer: Annotated[
        str,
        Option(
            help="How messages become a state: last, count, merge, map, or module:function.",
            flag="--reducer",
            metavar="NAME",
            setting="reducer",
        ),
    ]
    pattern: Pattern = ""
    publish: Annotated[
        bool,
        Option(
            help="Send states to the server as snapshots, for channels with the reducer `uploaded`.",
            flag="--publish",
        ),
    ] = False
    task_bytes: TaskBytes = TASK_BYTES
    url: Url = ""
    token: Token = ""
    data_dir: Annotated[
        str,
        _data_dir("Read records that are not in the lake from the files of this data directory."),
    ] = ""


StatesInto = Annotated[
    Directory,
    Option(
        help="Directory of the table of states; created if it is missing.",
        flag="--into",
        metavar="DIR",
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
class AuditOptions(JobOptions):
    lake: Lake = ""
    topics: Topics = ()
    _: KW_ONLY
    data_dir: Annotated[
        Directory,
        Option(
            help="Read the log in this data directory.",
            flag="--data-dir",
            metavar="DIR",
            otherwise="data_dir, if it exists",
        ),
    ] = ""
    url: Annotated[
        str,
        Option(
            help="Read the log from this server.",
            flag="--http",
            metavar="HOST:PORT",
            otherwise="if there is no data directory",
        ),
    ] = ""
    token: Token = ""


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


_SHARED = {"url": 1, "token": 2, "data_dir": 3, "master": 4}
"""Order of the options that most jobs have; all others come before."""


def _description(hint: Any) -> Option | None:
    return next((one for one in get_args(hint) if isinstance(one, Option)), None)


def check(options: JobOptions) -> None:
    """Raise OptionError for a number that is out of bounds."""
    for field in fields_of(type(options)):
        value, option = getattr(options, field.name), field.option
        if value is None or (option.ge is None and option.gt is None):
            continue
        is_low = not value >= option.ge if option.ge is not None else not value > option.gt
        if is_low or (option.le is not None and value > option.le):
            low = f"above {option.gt:g}" if option.ge is None else f"at least {option.ge:g}"
            high = "" if option.le in (None, NUMBER_MAX) else f" and at most {option.le:g}"
            unit = f" {option.unit}" if option.unit else ""
            raise OptionError(f"{field.name} must be {low}{high}{unit}, not {value:g}")


def _settings() -> list[tuple[str, Any, Any]]:
    """Return name, type and default of each setting in `[pipeline]`."""
    found: dict[str, tuple[str, Any, Any]] = {}
    for field in (field for some in JOBS.values() for one in some for field in fields_of(one)):
        option = field.option
        if not option.setting or option.setting in found:
            continue
        kinds = [one for one in (get_args(field.type) or (field.type,)) if one is not type(None)]
        kind = option.values or kinds[0]
        default = next(iter(option.values)) if option.values else field.default
        description = setting(
            option.help, option.unit, flag=option.flag, ge=option.ge, gt=option.gt, le=option.le
        )
        default = "" if default is None else default
        found[option.setting] = (option.setting, Annotated[kind, description], default)
    return list(found.values())


if TYPE_CHECKING:
    Pipeline = Section
else:
    Pipeline = msgspec.defstruct(
        "Pipeline", _settings(), bases=(Section,), frozen=True, kw_only=True
    )
