"""The section of the configuration that is about jobs between the log and a lake: `headrace pipeline`."""

from enum import StrEnum
from typing import Annotated

from headrace.config_setting import NUMBER_MAX, Section, setting


class LakeFormat(StrEnum):
    DELTA = "delta"


class LakePartition(StrEnum):
    DATE = "date"
    TOPIC = "topic"


class Pipeline(Section, frozen=True):
    master: Annotated[
        str, setting("Where Spark runs: this machine, or a cluster.", flag="--master")
    ] = "local[*]"
    lake: Annotated[str, setting("Directory of the lake; made when missing.", flag="--lake")] = ""
    format: Annotated[LakeFormat, setting("What kind of table the lake is.", flag="--format")] = (
        LakeFormat.DELTA
    )
    partition: Annotated[
        LakePartition,
        setting(
            "Whether files are kept apart by date alone, or by topic and date.", flag="--by-topic"
        ),
    ] = LakePartition.DATE
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
            "How often a lake that is kept up to date gets a batch.",
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
