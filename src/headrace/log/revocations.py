"""Removal, from a restored catalogue, of everything that the log has deleted since the backup was made.

Destroyed topics, trimmed records, and dropped cursors and notes stay deleted.
"""

from typing import NamedTuple

from headrace.errors import DataDirectoryError
from headrace.log.catalogue.catalogue import Catalogue
from headrace.log.catalogue.rows import TombstoneRow, TopicRow


class Revoked(NamedTuple):
    """Number of things that were removed."""

    topics: int
    """Number of destroyed topics."""
    trimmed: int
    """Number of trimmed topics."""
    cursors: int
    notes: int


def check_readable(old: Catalogue, backup: Catalogue) -> None:
    """Raise DataDirectoryError if the old catalogue is incomplete or cannot be compared with the backup's."""
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
    if old.meta().applied < backup.meta().applied or not _knows_numbers_of(old, backup):
        raise DataDirectoryError(
            f"{old.path.parent} is not the log that the backup was made of, or an older copy of it: "
            "name the directory that is replaced, or restore without --old"
        )


def _knows_numbers_of(old: Catalogue, backup: Catalogue) -> bool:
    """False if `old` has given a topic's number to another topic, or has not used the number yet."""
    if old.meta().next_topic_id < backup.meta().next_topic_id:
        return False
    both = ((row, old.topic_by_id(row.id)) for row in backup.topics())
    return all(now is None or now.name == row.name for row, now in both)


def revoke(restored: Catalogue, old: Catalogue) -> Revoked:
    """Remove from `restored`, in one transaction, everything that `old` no longer has."""
    with restored.transaction():
        destroyed = trimmed = 0
        for row in list(restored.topics()):
            now = old.topic_by_id(row.id)  # a number is never used twice
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
