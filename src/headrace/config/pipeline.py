"""Section of the configuration for `headrace pipeline`: jobs between the log and a lake."""

from enum import StrEnum
from typing import Annotated

from headrace.config.values import NUMBER_MAX, Section, setting


class LakeFormat(StrEnum):
    AUTO = "auto"
    DELTA = "delta"
    PARQUET = "parquet"
    ICEBERG = "iceberg"


class LakePartition(StrEnum):
    AUTO = "auto"
    DATE = "date"
    TOPIC = "topic"


class Pipeline(Section, frozen=True):
    master: Annotated[
        str, setting("Where Spark runs: this machine, or a cluster.", flag="--master")
    ] = "local[*]"
    lake: Annotated[str, setting("Directory of the lake; made when missing.", flag="--lake")] = ""
    format: Annotated[
        LakeFormat,
        setting(
            "What kind of table a new lake is: delta, unless it says otherwise.", flag="--format"
        ),
    ] = LakeFormat.AUTO
    partition: Annotated[
        LakePartition,
        setting(
            "Whether files of a new lake are kept apart by date alone, or by topic and date.",
            flag="--by-topic",
        ),
    ] = LakePartition.AUTO
    decode: Annotated[
        str,
        setting(
            "What payloads are, if the lake is to have columns of them: json, logux or channel.",
            flag="--decode",
        ),
    ] = ""
    schema: Annotated[
        str,
        setting(
            "These columns, such as 'id bigint, tags array<string>'; empty for all that are known.",
            flag="--schema",
        ),
    ] = ""
    pattern: Annotated[
        str,
        setting(
            "A regular expression that the whole names of topics match; empty for all topics.",
            flag="--pattern",
        ),
    ] = ""
    every_s: Annotated[
        float,
        setting(
            "How often a lake or a table of states that is kept up to date gets a batch.",
            "seconds",
            flag="--every",
            ge=0,
            le=86_400,
        ),
    ] = 5.0
    batch_bytes: Annotated[
        int,
        setting(
            "How much of the log one batch takes, to the next record.",
            "bytes",
            flag="--batch-bytes",
            ge=1,
            le=NUMBER_MAX,
        ),
    ] = 1024 * 1024 * 1024
    part_bytes: Annotated[
        int,
        setting(
            "About how much of the log one task takes, and so a file has.",
            "bytes",
            ge=1,
            le=NUMBER_MAX,
        ),
    ] = 64 * 1024 * 1024
    file_bytes: Annotated[
        int,
        setting(
            "How large compaction makes files; those of half of it are left alone.",
            "bytes",
            flag="--file-bytes",
            ge=1,
            le=NUMBER_MAX,
        ),
    ] = 128 * 1024 * 1024
    sweep_after_s: Annotated[
        float,
        setting(
            "How long compaction keeps files that the table does not name any more.",
            "seconds",
            flag="--sweep-after",
            ge=3600,
            le=NUMBER_MAX,
        ),
    ] = 604_800.0
    reducer: Annotated[
        str, setting("How an aggregate folds records into states.", flag="--reducer")
    ] = ""
    aggregate_into: Annotated[
        str, setting("Directory of the states of an aggregate; made when missing.", flag="--into")
    ] = ""
    report_out: Annotated[str, setting("The page of a report.", flag="--out")] = "report.html"
    dedupe_into: Annotated[
        str, setting("Directory of the rows that dedupe leaves; made when missing.", flag="--into")
    ] = ""
    dedupe_key: Annotated[
        str, setting("The column that dedupe knows rows by; `payload` is one.", flag="--key")
    ] = ""
    dedupe_json_path: Annotated[
        str,
        setting("What dedupe knows rows by instead, such as $.order.id.", flag="--json-path"),
    ] = ""
    dedupe_window_s: Annotated[
        float,
        setting(
            "How long a key counts after the row that stays; 0 for ever.",
            "seconds",
            flag="--window",
            ge=0,
            le=10_000_000_000,
        ),
    ] = 86_400.0
