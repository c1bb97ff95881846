"""The lake's side of an audit: manifests of its batches and a list of its files. Tasks read the files."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from headrace.lake.files.writing import Bounds
from headrace.lake.format import CRC_KEY, LakeError, LostRange, Manifest, MergedManifest
from headrace.lake.format import RecordRange as LakeRange
from headrace.lake.manifests import HIDDEN, Manifests
from headrace.lake.table import Table
from headrace.pipeline.audit.files import UNREADABLE, FileWork, Kept, read_ranges
from headrace.pipeline.audit.plan import Finding
from headrace.pipeline.export.job import APP
from headrace.reader.view import LogLocation


class LakeNotes(NamedTuple):
    file: str
    range: LakeRange


class Listing(NamedTuple):
    """State of a lake at one moment."""

    files: dict[str, int]
    noted: list[LakeNotes]
    lost: list[LostRange]
    """Ranges that batches noted as lost, because they could not write them."""
    findings: list[Finding]
    """Damaged or missing manifests."""
    all_noted: bool
    """True if all manifests could be read."""
    shown: dict[str, str]
    """Visible names of files, by path, where they differ from the path."""
    bounds: Mapping[str, Bounds] = {}
    """Bounds of the table's files, by path."""
    odd: Sequence[Finding] = ()
    """Damage of the table itself."""
    notes: Sequence[str] = ()
    """Oddities of the table that are not losses."""

    @property
    def topics(self) -> frozenset[str]:
        return frozenset(one.range.topic for one in self.noted)


def list_lake(lake: Path, table: Table) -> Listing:
    while True:
        last = table.last(APP)
        files, bounds = table.files(), table.bounds()
        if table.last(APP) == last:
            break  # otherwise a batch was committed in between, and files and manifests would not match
    findings: list[Finding] = []
    manifests = Manifests(lake)
    folded = _folded(lake, manifests, findings)
    # A merged manifest does not say which files hold its ranges.
    noted = [LakeNotes("", one) for one in folded.ranges]
    lost = list(folded.lost)
    commits = {number: notes[CRC_KEY] for number, notes in table.all_notes() if CRC_KEY in notes}
    for number in range(folded.batches, 0 if last is None else last + 1):
        manifest = _read(lake, manifests, number, commits.get(number), findings)
        if manifest is not None:
            noted += [LakeNotes(manifest.files[one.file].path, one) for one in manifest.ranges]
            lost += manifest.lost
    if findings and _folded(lake, manifests, []).batches != folded.batches:
        return list_lake(lake, table)  # a compaction has merged these manifests meanwhile
    shown = {path: name for path in files if (name := table.shown(path)) != path}
    oddities = list(table.oddities())
    odd = [Finding(one.kind, one.reason, one.file) for one in oddities if one.kind != "note"]
    notes = [f"{one.file}: {one.reason}" for one in oddities if one.kind == "note"]
    return Listing(files, noted, lost, findings, not findings, shown, bounds, odd, notes)


def _folded(lake: Path, manifests: Manifests, findings: list[Finding]) -> MergedManifest:
    try:
        return manifests.folded()
    except LakeError as error:
        path = max((lake / HIDDEN / "folded").glob("*.json"))
        findings.append(Finding("damaged", _why(error), str(path.relative_to(lake))))
        return MergedManifest(batches=int(path.stem))


def _why(error: LakeError) -> str:
    """Return the reason without the file and the advice: the finding names the file."""
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
    place: LogLocation,
    kept: Mapping[str, Sequence[Kept]],
) -> list[FileWork]:
    """Describe the checks of these files, each with the ranges where the log has the file's records."""
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
        return []  # the task that reads the file reports the reason
