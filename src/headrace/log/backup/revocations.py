"""What a log has given up since a backup was made: taken out of the catalogue that is restored from it.

Topics that were destroyed, records that were trimmed, and cursors and notes that were dropped stay so.
"""

from typing import NamedTuple

from headrace.errors import DataDirectoryError
from headrace.log.catalogue import Catalogue
from headrace.log.catalogue_rows import TombstoneRow, TopicRow


class Revoked(NamedTuple):
    """How much was taken out."""

    topics: int
    """Topics that were destroyed."""
    trimmed: int
    """Topics that have forgotten records."""
    cursors: int
    notes: int


def check_readable(old: Catalogue, backup: Catalogue) -> None:
    """Refuse a log of which the catalogue does not tell everything, or in other words."""
    if old.meta().format != backup.meta().format:
        raise DataDirectoryError(
            f"{old.path.parent} and the backup have catalogues of different formats and cannot be compared: "
            "restore without it"
        )
    if not old.meta().clean:
        raise DataDirectoryError(
            f"{old.path.parent} was not left by a clean stop: start and stop a server there first, so that "
            "its catalogue says what was given up"
        )


def revoke(restored: Catalogue, old: Catalogue) -> Revoked:
    """Take out of `restored`, in one transaction, what `old` no longer has."""
    with restored.transaction():
        destroyed = trimmed = 0
        for row in list(restored.topics()):
            now = old.topic_by_id(row.id)  # no number is ever given twice
            if now is None:
                _destroy(restored, old, row)
                destroyed += 1
            elif now.start_offset > row.start_offset:
                _trim(restored, row, now)
                trimmed += 1
        kept = {(one.name, one.reader) for one in old.cursors()}
        cursors = [(one.name, one.reader) for one in restored.cursors()]
        cursors = [one for one in cursors if one not in kept]
        restored.drop_cursors(cursors)
        notes = [one.key for one in restored.notes() if old.note(one.key) is None]
        restored.drop_notes(notes)
    return Revoked(destroyed, trimmed, len(cursors), len(notes))


def _destroy(restored: Catalogue, old: Catalogue, row: TopicRow) -> None:
    grave = old.grave(row.name)
    restored.drop_topic(row.id)
    restored.put(
        [
            TombstoneRow(
                row.name,
                max(row.epoch, grave.epoch),
                max(row.end_offset, grave.offset),
                max(row.end_ordinal, grave.ordinal),
                row.last_ms,
            )
        ]
    )


def _trim(restored: Catalogue, row: TopicRow, now: TopicRow) -> None:
    start = min((now.start_offset, now.start_ordinal), (row.end_offset, row.end_ordinal))
    restored.put([row._replace(start_offset=start[0], start_ordinal=start[1])])
    for segment in restored.segments(row.id):
        if segment.end <= start[0]:
            restored.drop_segment(row.id, segment.base)
