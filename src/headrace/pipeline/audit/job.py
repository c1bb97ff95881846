"""The job `audit`: reads log and lake in full and compares them, to find lost records. Changes nothing.

    list the lake ─▶ check the log ─▶ check files and compare them with the log ─▶ compare the ranges of both

The lake is listed before the log is read. So the log has all records of the lake, except those that retention
deleted. When something seems to be missing, the lake is listed again, as an export may have run meanwhile.
"""

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from headrace.config.pipeline import AuditOptions
from headrace.errors import OptionError, UnknownTopicError
from headrace.lake.files.writing import Bounds
from headrace.lake.format import (
    Committed,
    DamagedTableError,
    LakeError,
    LostRange,
    Manifest,
    StorageError,
)
from headrace.lake.format import RecordRange as LakeRange
from headrace.lake.manifests import Manifests, MissingManifestError
from headrace.lake.storage.storage import HIDDEN, Storage, storage_of
from headrace.lake.table import Table, open_table
from headrace.log.verify.checks import VerifiedRange
from headrace.model import check_topic_name
from headrace.pipeline import tasks
from headrace.pipeline.audit.files import FileCheck, FileWork, check_files, known_ranges, range_of
from headrace.pipeline.audit.log import (
    LogAccount,
    LogTopic,
    audit_directory,
    audit_server,
    task_groups,
)
from headrace.pipeline.audit.plan import (
    AuditReport,
    Finding,
    Held,
    TopicAudit,
    common,
    compare,
    cover,
    joined_ranges,
    overlaps,
    without,
)
from headrace.pipeline.job import EXPORT_APP, JobArguments, job, part_of, place_of
from headrace.pipeline.tasks import TaskRunner
from headrace.reader.view import LogLocation

_AGAIN_S = 1.0
"""Delay before the lake is listed again; by then, a running job has linked its file to the visible name."""


@dataclass(frozen=True)
class AuditArguments(AuditOptions, JobArguments):
    pass


@job(AuditArguments)
def audit(given: AuditArguments) -> AuditReport:
    """Check a log in `data_dir` or behind `url`, a lake, or both against each other; all topics or some."""
    wanted = tuple(dict.fromkeys(given.topics))
    for name in wanted:
        check_topic_name(name)
    if given.data_dir and given.url:
        raise OptionError("the log is in a data directory or behind an address: give one of them")
    if not given.data_dir and not given.url and not given.lake:
        raise OptionError("say what to audit: give a data directory, a server's address, or a lake")
    place = place_of(given) if given.url else LogLocation(str(given.data_dir))
    with closing(given.task_runner("audit")) as runner:
        return _Audit(given, wanted, place, runner).run()


class _Audit:
    def __init__(
        self, given: AuditArguments, topics: Sequence[str], place: LogLocation, runner: TaskRunner
    ) -> None:
        self._lake = (
            storage_of(given.lake, given.storage_options, given.catalog_options)
            if given.lake
            else None
        )
        self._topics, self._place = topics, place
        self._runner, self._progress = runner, given.progress
        self._done = self._expected = 0
        self._table: Table | None = None
        self._checks: dict[str, FileCheck] = {}

    def run(self) -> AuditReport:
        listing = self._list()
        log = self._check_log(listing)
        for name in self._topics:
            if name not in {*listing.topics, *log.topics} and not listing.findings:
                raise UnknownTopicError(
                    f"there is no topic {name!r} in {log.name or self._address}"
                )
        self._check_files(listing, log)
        report = self._report(listing, log)
        if any(one.kind == "missing" for one in report.all_findings()):
            time.sleep(_AGAIN_S)
            again = self._list()
            # A table that changes all the time may look odd at every moment. Only an oddity that was found
            # both times counts.
            again.odd = [one for one in again.odd if one in listing.odd]
            self._checks = {path: one for path, one in self._checks.items() if not one.is_missing}
            self._check_files(again, log)
            report = self._report(again, log, is_later=again.files != listing.files)
        return report

    @property
    def _address(self) -> str | None:
        return self._lake.address if self._lake is not None else None

    def _list(self) -> "Listing":
        if self._lake is None:
            return Listing()
        try:
            self._table = self._table or open_table(self._lake)
            return _list_lake(self._lake, self._table)
        except DamagedTableError as error:
            reason = f"it cannot be read: {error.reason}"
            return Listing(findings=[Finding("damaged", reason, error.file)])

    def _check_log(self, listing: "Listing") -> LogAccount:
        self._expected = sum(listing.files.values())
        asked = (self._topics, listing.topics, self._runner, self._phase)
        if self._place.urls:
            return audit_server(self._place, *asked)
        if self._place.path:
            return audit_directory(Path(self._place.path).absolute(), *asked)
        return LogAccount()

    def _check_files(self, listing: "Listing", log: LogAccount) -> None:
        if self._lake is None:
            return
        noted: dict[str, list[LakeRange]] = defaultdict(list)
        for path, one in listing.noted:
            noted[path].append(one)
        works = []
        for path in sorted(listing.files.keys() - self._checks.keys()):
            ranges = noted[path] or known_ranges(self._lake.file(path))
            if ranges and self._topics and not any(one.topic in self._topics for one in ranges):
                continue
            work = FileWork(
                self._lake,
                path,
                shown=listing.shown.get(path, ""),
                bytes=listing.files[path],
                bounds=listing.bounds.get(path, {}),
                place=log.place,
                kept=log.kept_of(ranges),
            )
            works.append(work)
        total = sum(work.bytes for work in works)
        some = task_groups(works, lambda work: work.bytes, total)
        self._expected = 0
        for found in self._runner.run(some, check_files, self._phase(total)):
            self._checks |= {check.path: check for check in found}

    def _phase(self, size: int) -> tasks.Progress | None:
        begin, self._done = self._done, self._done + size
        total = self._done + self._expected
        return part_of(self._progress, done=begin, size=size, total=total)

    def _report(
        self, listing: "Listing", log: LogAccount, *, is_later: bool = False
    ) -> AuditReport:
        checks = [self._checks[path] for path in listing.files if path in self._checks]
        lake = _by_topic(listing, checks)
        findings = [*log.findings, *lake.pop("", _LakeTopic()).findings]
        notes = [*log.notes, *listing.notes]
        topics = []
        for name in sorted({*lake, *log.topics}):
            if not self._topics or name in self._topics:
                topic, more = _audit_topic(
                    name,
                    lake.get(name, _LakeTopic()),
                    log.topics.get(name),
                    all_noted=not listing.findings,
                    is_later=is_later,
                )
                topics.append(topic)
                notes += more
        notes += _not_compared(topics)
        return AuditReport(
            log=log.name,
            lake=self._address,
            topics=topics,
            findings=findings,
            notes=notes,
            segments=log.segments,
            files=len(checks),
            lost=bool(findings) or any(topic.findings for topic in topics),
        )


def _not_compared(topics: Sequence[TopicAudit]) -> Iterator[str]:
    sound = [topic for topic in topics if not topic.findings]
    both = sum(part.end - part.offset for one in sound for part in common(one.lake, one.log))
    left = both - sum(topic.compared_bytes for topic in sound)
    if left > 0:
        yield (
            f"{left:,} bytes that log and lake both have were not compared: they are still in the journal, "
            "or were deleted meanwhile"
        )


# The lake's side: manifests of its batches and a list of its files. Tasks read the files.


class Listing(Struct):
    """State of a lake at one moment."""

    files: dict[str, int] = {}
    bounds: dict[str, Bounds] = {}
    """Bounds of the table's files, by path."""
    shown: dict[str, str] = {}
    """Visible names of files, by path, where they differ from the path."""
    noted: list[tuple[str, LakeRange]] = []
    """Ranges in the manifests of batches, each with its file."""
    lost: list[LostRange] = []
    """Ranges that batches noted as lost, because they could not write them."""
    findings: list[Finding] = []
    """Damaged or missing manifests."""
    odd: list[Finding] = []
    """Damage of the table itself."""
    notes: list[str] = []
    """Oddities of the table that are not losses."""

    @property
    def topics(self) -> frozenset[str]:
        noted = (one.topic for _, one in self.noted)
        return frozenset([*noted, *(one.topic for one in self.lost)])


def _list_lake(lake: Storage, table: Table) -> Listing:
    while True:
        last = table.last(EXPORT_APP)
        found = Listing(table.files(), table.bounds())
        if table.last(EXPORT_APP) == last:
            break  # otherwise a batch was committed in between, and files and manifests would not match
    _read_manifests(Manifests(lake), last, found)
    found.shown = {path: name for path in found.files if (name := table.shown(path)) != path}
    for one in table.oddities():
        if one.kind == "note":
            found.notes.append(f"{one.file}: {one.reason}")
        else:
            found.odd.append(Finding(one.kind, one.reason, one.file))
    return found


def _read_manifests(manifests: Manifests, last: Committed | None, found: Listing) -> None:
    """Add the ranges in manifests, the lost ranges, and damaged manifests."""
    try:
        names = manifests.names(last)
    except LakeError as error:
        assert last is not None
        found.findings.append(_finding(error, manifests.path(last)))
        return
    try:
        merged = manifests.read_merged(names.merged)
        # A merged manifest does not say which files hold its ranges.
        found.noted += [("", one) for one in merged.ranges]
        found.lost += merged.lost
    except LakeError as error:
        found.findings.append(_finding(error, f"{HIDDEN}/{names.merged}"))
    for name in names.single:
        try:
            manifest = manifests.read(name)
            found.noted += [(_file_of(manifest, one), one) for one in manifest.ranges]
            found.lost += manifest.lost
        except LakeError as error:
            found.findings.append(_finding(error, manifests.path(name)))


def _file_of(manifest: Manifest, one: LakeRange) -> str:
    if not 0 <= one.file < len(manifest.files):
        raise LakeError("a range is in a file that it does not name")
    return manifest.files[one.file].path


def _finding(error: LakeError, path: str) -> Finding:
    """Return the damage of a manifest, without the file and the advice in the error."""
    if isinstance(error, StorageError):
        raise error
    if isinstance(error, MissingManifestError):
        return Finding("missing", "the file is gone, a manifest of the table", path)
    reason = str(error).partition("(")[2].rpartition("): ")[0] or error
    return Finding("damaged", f"it cannot be read: {reason}", path)


# Results by topic


class _LakeTopic(Struct):
    """Results of the lake's checks for one topic."""

    noted: list[Held] = []
    held: list[Held] = []
    unreadable: list[Held] = []
    """Noted ranges in files that cannot be read."""
    lost: list[LostRange] = []
    findings: list[Finding] = []
    differing: list[Finding] = []
    compared: int = 0


def _by_topic(listing: Listing, checks: Sequence[FileCheck]) -> dict[str, _LakeTopic]:
    """Return the results for each topic, and, by the name "", those that concern no single topic."""
    topics: defaultdict[str, _LakeTopic] = defaultdict(_LakeTopic)
    unreadable = {one.path: one.unreadable for one in checks if one.unreadable is not None}
    findings = [*listing.findings, *listing.odd]
    for path, one in listing.noted:
        held, topic = Held(one.epoch, range_of(one), path, one.crc), topics[one.topic]
        if path not in unreadable:
            topic.noted.append(held)
            continue
        topic.unreadable.append(held)
        reason = unreadable[path]
        findings.append(replace(reason, topic=one.topic, epoch=one.epoch, range=held.range))
    named = {path for path, _ in listing.noted}
    findings += [reason for path, reason in unreadable.items() if path not in named]
    for lost in listing.lost:
        topics[lost.topic].lost.append(lost)
    for check in checks:
        for one in check.ranges:
            held = Held(one.epoch, range_of(one), check.path, one.crc)
            topics[one.topic].held.append(held)
        for name, compared in check.compared.items():
            topics[name].compared += compared
        for finding in check.differing:
            topics[finding.topic or ""].differing.append(finding)
        findings += check.findings
    for finding in findings:
        topics[finding.topic or ""].findings.append(finding)
    return topics


def _audit_topic(
    name: str, lake: _LakeTopic, log: LogTopic | None, *, all_noted: bool, is_later: bool
) -> tuple[TopicAudit, list[str]]:
    """Return the results of a topic, and notes about it."""
    findings = [*lake.findings, *compare(name, lake.noted, lake.held, all_noted=all_noted)]
    damaged = [one.range for one in findings if one.range is not None]
    sound = joined_ranges(one.range for one in lake.held if not overlaps(one.range, damaged))
    in_lake = [*lake.noted, *lake.unreadable, *lake.held]
    in_log: list[Held] = []
    log_sound: list[VerifiedRange] = []
    if log is not None:
        in_log = [Held(log.epoch, one) for one in joined_ranges(log.whole)]
        log_sound = joined_ranges(log.sound)
        bad = [one.range for one in log.findings if one.range is not None]
        findings += [one for one in lake.differing if one.range and not overlaps(one.range, bad)]
        findings += [_told_of_lake(one, sound) for one in log.findings]
    coverage = cover(name, in_lake, in_log, is_later=is_later)
    findings += _with_lost(name, coverage.findings, lake.lost)
    found = TopicAudit(
        name=name,
        epoch=max((one.epoch for one in (*in_lake, *in_log)), default=0),
        log=log_sound,
        lake=sound,
        records=sum(one.end_ordinal - one.ordinal for one in joined_ranges([*sound, *log_sound])),
        compared_bytes=lake.compared,
        findings=findings,
    )
    return found, coverage.notes


def _told_of_lake(finding: Finding, sound: Sequence[VerifiedRange]) -> Finding:
    """Add to a finding of the log that the lake has the lost records, if it does."""
    if finding.range is None or without([finding.range], sound):
        return finding
    return replace(finding, reason=f"{finding.reason}; the lake has these records")


def _with_lost(name: str, found: Sequence[Finding], lost: Sequence[LostRange]) -> Iterator[Finding]:
    """Yield the findings, and add the ranges that the export noted as lost and no finding covers."""
    yield from found
    gaps = [one.range for one in found if one.range is not None]
    for one in lost:
        if not any(
            gap.ordinal <= one.ordinal and one.end_ordinal <= gap.end_ordinal for gap in gaps
        ):
            reason = (
                f"records with ordinals {one.ordinal} to {one.end_ordinal} were deleted before they could be "
                "exported"
            )
            yield Finding("missing", reason, None, name)
