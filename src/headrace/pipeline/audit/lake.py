"""The lake's side of an audit: what batches have noted and which files there are. Files are read by tasks."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from headrace.lake.format import CRC_KEY, Folded, LakeError, Lost, Manifest
from headrace.lake.format import Range as LakeRange
from headrace.lake.manifests import HIDDEN, Manifests
from headrace.lake.table import Table
from headrace.lake.writing import Bounds
from headrace.pipeline.audit_files import UNREADABLE, FileWork, Kept, read_ranges
from headrace.pipeline.audit_plan import Finding
from headrace.pipeline.export import APP
from headrace.spark.options import Place


class Noted(NamedTuple):
    file: str
    range: LakeRange


class Listing(NamedTuple):
    """A lake at one moment."""

    files: dict[str, int]
    noted: list[Noted]
    lost: list[Lost]
    """What batches have noted that they could not write."""
    findings: list[Finding]
    """What is wrong with the notes."""
    all_noted: bool
    """Whether all of them could be read."""
    shown: dict[str, str]
    """Names by which others know files, where these are not their own."""
    bounds: Mapping[str, Bounds] = {}
    """What the table says of its files."""
    odd: Sequence[Finding] = ()
    """What is wrong with the table itself."""
    notes: Sequence[str] = ()
    """What is odd and no loss."""

    @property
    def topics(self) -> frozenset[str]:
        return frozenset(one.range.topic for one in self.noted)


def list_lake(lake: Path, table: Table) -> Listing:
    while True:
        last = table.last(APP)
        files, bounds = table.files(), table.bounds()
        if table.last(APP) == last:
            break  # else a batch came in between: files and notes would not be of one moment
    findings: list[Finding] = []
    manifests = Manifests(lake)
    folded = _folded(lake, manifests, findings)
    # Which files these are in, nobody has noted any more.
    noted = [Noted("", one) for one in folded.ranges]
    lost = list(folded.lost)
    commits = {number: notes[CRC_KEY] for number, notes in table.all_notes() if CRC_KEY in notes}
    for number in range(folded.batches, 0 if last is None else last + 1):
        manifest = _read(lake, manifests, number, commits.get(number), findings)
        if manifest is not None:
            noted += [Noted(manifest.files[one.file].path, one) for one in manifest.ranges]
            lost += manifest.lost
    if findings and _folded(lake, manifests, []).batches != folded.batches:
        return list_lake(lake, table)  # a compaction has folded them meanwhile
    shown = {path: name for path in files if (name := table.shown(path)) != path}
    oddities = list(table.oddities())
    odd = [Finding(one.kind, one.reason, one.file) for one in oddities if one.kind != "note"]
    notes = [f"{one.file}: {one.reason}" for one in oddities if one.kind == "note"]
    return Listing(files, noted, lost, findings, not findings, shown, bounds, odd, notes)


def _folded(lake: Path, manifests: Manifests, findings: list[Finding]) -> Folded:
    try:
        return manifests.folded()
    except LakeError as error:
        path = max((lake / HIDDEN / "folded").glob("*.json"))
        findings.append(Finding("damaged", _why(error), str(path.relative_to(lake))))
        return Folded(batches=int(path.stem))


def _why(error: LakeError) -> str:
    """What is wrong, without where and what to do: the finding says which file it is."""
    return f"it cannot be read: {str(error).partition('(')[2].rpartition('): ')[0] or error}"


def _read(
    lake: Path, manifests: Manifests, number: int, crc: str | None, findings: list[Finding]
) -> Manifest | None:
    path = manifests.path(number)
    file = str(path.relative_to(lake))
    try:
        found = manifests.read(number)
        files = {one.file for one in found.ranges}
        if files and not 0 <= min(files) <= max(files) < len(found.files):
            raise LakeError("a range is in a file that it does not name")
    except LakeError as error:
        if not path.exists():
            reason = f"the file is gone, which says what batch {number} holds"
            findings.append(Finding("missing", reason, file))
        else:
            findings.append(Finding("damaged", _why(error), file))
        return None
    if crc is not None and crc != str(found.crc):
        reason = f"it is not what was committed with batch {number}"
        findings.append(Finding("damaged", reason, file))
        return None
    return found


def file_works(
    lake: Path,
    listing: Listing,
    paths: Iterable[str],
    topics: Sequence[str],
    place: Place,
    kept: Mapping[str, Sequence[Kept]],
) -> list[FileWork]:
    """What is to be done for these files, each with the places where the log has its records."""
    noted: dict[str, list[LakeRange]] = {}
    for one in listing.noted:
        noted.setdefault(one.file, []).append(one.range)
    works = []
    for path in paths:
        ranges = noted.get(path) or _footer(lake / path)
        if topics and ranges and not any(one.topic in topics for one in ranges):
            continue
        wanted = {
            place: None
            for one in ranges
            for place in kept.get(one.topic, ())
            if place.offset < one.end and one.offset < place.end
        }
        shown = listing.shown.get(path, "")
        size, bounds = listing.files[path], listing.bounds.get(path, {})
        works.append(FileWork(str(lake), path, shown, size, bounds, place, tuple(wanted)))
    return works


def _footer(path: Path) -> list[LakeRange]:
    try:
        return read_ranges(path)
    except UNREADABLE:
        return []  # the task that reads it says why
