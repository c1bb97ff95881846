"""The job `audit`: reads log and lake in full and compares them, to find lost records. Changes nothing.

    list the lake ─▶ check the log ─▶ check files and compare them with the log ─▶ compare the ranges of both

The lake is listed before the log is read. So the log has all records of the lake, except those that retention
deleted. When something seems to be missing, the lake is listed again, as an export may have run meanwhile.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

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
    MergedManifest,
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
from headrace.pipeline.audit.log import LogAccount, audit_directory, audit_server, task_groups
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
from headrace.pipeline.job import EXPORT_APP, JobArguments, job, part_of
from headrace.pipeline.tasks import TaskRunner
from headrace.reader.view import LogLocation, parse_place

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
    place = parse_place(given.url, given.token) if given.url else LogLocation(str(given.data_dir))
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
        self._broken: list[Finding] = []
        """Reason why the lake's list of files cannot be read; empty when it can."""
        self._checks: dict[str, FileCheck] = {}

    def run(self) -> AuditReport:
        listing = self._list()
        log = self._check_log(listing)
        for name in self._topics:
            if name not in {*listing.topics, *log.topics} and not self._broken:
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
            again = again._replace(odd=[one for one in again.odd if one in listing.odd])
            self._checks = {path: one for path, one in self._checks.items() if not one.is_missing}
            self._check_files(again, log)
            report = self._report(again, log, is_later=again.files != listing.files)
        return report

    @property
    def _address(self) -> str | None:
        return self._lake.address if self._lake is not None else None

    def _list(self) -> "Listing":
        if self._lake is not None and not self._broken:
            try:
                self._table = self._table or open_table(self._lake)
                return _list_lake(self._lake, self._table)
            except DamagedTableError as error:
                reason = f"it cannot be read: {error.reason}"
                self._broken = [Finding("damaged", reason, error.file)]
        return Listing(findings=self._broken)

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
        paths = [path for path in sorted(listing.files) if path not in self._checks]
        works = _file_works(self._lake, listing, paths, topics=self._topics, log=log)
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
        lake = _Lake(listing, checks)
        notes = [*log.notes, *listing.notes]
        topics = []
        for name in sorted({*lake.held, *lake.noted, *lake.lost, *log.topics}):
            if not self._topics or name in self._topics:
                topic, more = _audit_topic(name, lake, log, is_later=is_later)
                topics.append(topic)
                notes += more
        notes += _not_compared(topics)
        findings = [*log.findings, *lake.findings[None]]
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


class Listing(NamedTuple):
    """State of a lake at one moment."""

    findings: Sequence[Finding]
    """Damaged or missing manifests."""
    files: Mapping[str, int] = {}
    noted: Sequence[tuple[str, LakeRange]] = ()
    """Ranges in the manifests of batches, each with its file."""
    lost: Sequence[LostRange] = ()
    """Ranges that batches noted as lost, because they could not write them."""
    shown: Mapping[str, str] = {}
    """Visible names of files, by path, where they differ from the path."""
    bounds: Mapping[str, Bounds] = {}
    """Bounds of the table's files, by path."""
    odd: Sequence[Finding] = ()
    """Damage of the table itself."""
    notes: Sequence[str] = ()
    """Oddities of the table that are not losses."""

    @property
    def topics(self) -> frozenset[str]:
        noted = (one.topic for _, one in self.noted)
        return frozenset([*noted, *(one.topic for one in self.lost)])


def _list_lake(lake: Storage, table: Table) -> Listing:
    while True:
        last = table.last(EXPORT_APP)
        files, bounds = table.files(), table.bounds()
        if table.last(EXPORT_APP) == last:
            break  # otherwise a batch was committed in between, and files and manifests would not match
    noted, lost, findings = _read_manifests(Manifests(lake), last)
    shown = {path: name for path in files if (name := table.shown(path)) != path}
    oddities = list(table.oddities())
    odd = [Finding(one.kind, one.reason, one.file) for one in oddities if one.kind != "note"]
    notes = [f"{one.file}: {one.reason}" for one in oddities if one.kind == "note"]
    return Listing(findings, files, noted, lost, shown, bounds, odd, notes)


def _read_manifests(
    manifests: Manifests, last: Committed | None
) -> tuple[list[tuple[str, LakeRange]], list[LostRange], list[Finding]]:
    """Return the ranges in manifests with their files, the lost ranges, and damaged manifests."""
    findings: list[Finding] = []
    try:
        names = manifests.names(last)
    except LakeError as error:
        assert last is not None
        return [], [], [_finding(error, manifests.path(last))]
    merged = MergedManifest()
    try:
        merged = manifests.read_merged(names.merged)
    except LakeError as error:
        findings.append(_finding(error, f"{HIDDEN}/{names.merged}"))
    # A merged manifest does not say which files hold its ranges.
    noted = [("", one) for one in merged.ranges]
    lost = list(merged.lost)
    for name in names.single:
        try:
            found = manifests.read(name)
            noted += [(_file_of(found, one), one) for one in found.ranges]
            lost += found.lost
        except LakeError as error:
            findings.append(_finding(error, manifests.path(name)))
    return noted, lost, findings


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


def _file_works(
    lake: Storage, listing: Listing, paths: Iterable[str], topics: Sequence[str], log: LogAccount
) -> list[FileWork]:
    """Describe the checks of these files, each with the ranges where the log has the file's records."""
    noted: dict[str, list[LakeRange]] = defaultdict(list)
    for path, one in listing.noted:
        noted[path].append(one)
    works = []
    for path in paths:
        ranges = noted[path] or known_ranges(lake.file(path))
        if topics and ranges and not any(one.topic in topics for one in ranges):
            continue
        wanted = {
            kept: None
            for one in ranges
            for kept in log.kept.get(one.topic, ())
            if kept.offset < one.end and one.offset < kept.end
        }
        shown = listing.shown.get(path, "")
        size, bounds = listing.files[path], listing.bounds.get(path, {})
        works.append(FileWork(lake, path, shown, size, bounds, log.place, tuple(wanted)))
    return works


# Results by topic


class _Lake:
    """Results of the lake's checks, by topic."""

    def __init__(self, listing: Listing, checks: Sequence[FileCheck]) -> None:
        self.all_noted = not listing.findings
        self.findings: dict[str | None, list[Finding]] = defaultdict(list)
        """Under None, findings that concern no single topic."""
        self.differing: dict[str | None, list[Finding]] = defaultdict(list)
        self.held: dict[str, list[Held]] = defaultdict(list)
        self.noted: dict[str, list[Held]] = defaultdict(list)
        self.lost: dict[str, list[LostRange]] = defaultdict(list)
        self.compared = Counter[str]()
        self.unreadable = {one.path: one.unreadable for one in checks if one.unreadable is not None}
        unnamed = dict(self.unreadable)
        found = [*listing.findings, *listing.odd]
        for path, one in listing.noted:
            held = Held(one.epoch, range_of(one), path, one.crc)
            self.noted[one.topic].append(held)
            if path in self.unreadable:
                finding = self.unreadable[path]
                found.append(replace(finding, topic=one.topic, epoch=one.epoch, range=held.range))
                unnamed.pop(path, None)
        found += unnamed.values()
        for lost in listing.lost:
            self.lost[lost.topic].append(lost)
        for check in checks:
            for one in check.ranges:
                held = Held(one.epoch, range_of(one), check.path, one.crc)
                self.held[one.topic].append(held)
            found += check.findings
            for finding in check.differing:
                self.differing[finding.topic].append(finding)
            self.compared.update(check.compared)
        for finding in found:
            self.findings[finding.topic].append(finding)


def _audit_topic(
    name: str, lake: _Lake, log: LogAccount, *, is_later: bool
) -> tuple[TopicAudit, list[str]]:
    noted, held = lake.noted[name], lake.held[name]
    readable = [one for one in noted if one.file not in lake.unreadable]
    differences = compare(name, readable, held, all_noted=lake.all_noted)
    findings = [*lake.findings[name], *differences]
    damaged = [one.range for one in findings if one.range is not None]
    sound = joined_ranges(one.range for one in held if not overlaps(one.range, damaged))
    topic = log.topics.get(name)
    spans: list[Held] = []
    if topic is not None:
        spans = [Held(topic.epoch, one) for one in joined_ranges(topic.whole)]
        bad = [one.range for one in topic.findings if one.range is not None]
        findings += [
            one for one in lake.differing[name] if one.range and not overlaps(one.range, bad)
        ]
        findings += [_told_of_lake(one, sound) for one in topic.findings]
    coverage = cover(name, [*noted, *held], spans, is_later=is_later)
    findings += _with_lost(name, coverage.findings, lake.lost[name])
    log_sound = joined_ranges(topic.sound) if topic is not None else []
    epochs = [one.epoch for one in (*noted, *held, *spans)]
    both = joined_ranges([*sound, *log_sound])
    found = TopicAudit(
        name=name,
        epoch=max(epochs, default=0),
        log=log_sound,
        lake=sound,
        records=sum(one.end_ordinal - one.ordinal for one in both),
        compared_bytes=lake.compared[name],
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
