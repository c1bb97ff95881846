"""Check of an earlier version's data directory for ordinary topics with names that are reserved now.

Changes nothing. Old names are translated where they are read: catalogue rows in `log/catalogue/catalogue.py`,
journal entries in `log/apply/changes.py`, index headers in `log/read/index.py`, staged blocks in
`log/batch/blocks.py`.
"""

import logging
from collections.abc import Mapping

from headrace.errors import DataDirectoryError
from headrace.log.apply.changes import names_in
from headrace.log.commit import journal
from headrace.log.layout import Layout
from headrace.log.recovery.frames import Frame, read_frames
from headrace.model import ENVELOPE_PREFIXES, present_name
from headrace.printing import quoted

logger = logging.getLogger(__name__)

_RESERVED = tuple(prefix.encode() for prefix in ENVELOPE_PREFIXES)


def is_reserved(name: bytes) -> bool:
    """True if a topic of this name is a channel or a log of Logux."""
    return name.startswith(_RESERVED)


def check_unreserved(
    layout: Layout, named: Mapping[int, bytes], applied: int, generation: int
) -> int:
    """Raise DataDirectoryError if an earlier version has left a topic with a name that is reserved now.

    Returns the number of topics whose name changes. `named` has topics by number, with their names in the
    files. Commits of the journal after `applied` create and destroy others.
    """
    names = dict(named)
    destroyed: set[int] = set()
    for path in layout.journal_files():
        for frame in read_frames(path, generation=generation):
            if not isinstance(frame, Frame) or frame.sequence <= applied:
                continue
            for entry in frame.entries:
                if entry.kind == journal.DESTROY:
                    destroyed.add(entry.topic_id)
                elif entry.kind in journal.PRESENT_KINDS:
                    # Read as an entry of the present kind, it keeps the name that is in the file.
                    kept = entry._replace(kind=journal.PRESENT_KINDS[entry.kind])
                    names |= {one.topic_id: one.name for one in names_in(kept)}
    living = {name for number, name in names.items() if number not in destroyed}
    found = sorted(name.decode() for name in living if is_reserved(name))
    if found:
        more = f" and {len(found) - 1} others" if len(found) > 1 else ""
        raise DataDirectoryError(
            f"the data directory {layout.root} has a topic {quoted(found[0])}{more}, and names that begin "
            "with '$channel/' or '$logux/' are reserved now: start the earlier version again, export such "
            "topics or publish their records under another name, delete them, and then start this version; "
            "nothing was changed"
        )
    return sum(present_name(name) != name for name in living)


def log_renamed(topics: int) -> None:
    if topics:
        logger.info(
            "%d topics are renamed: names that began with channel/ and logux/ begin with $channel/ and "
            "$logux/ from now on",
            topics,
        )
