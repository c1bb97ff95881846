"""Checks the staged files of batches that are decided and not appended to their end.

Files that wait for a batch are not part of the log yet: whoever uploaded them still has their records.
"""

from collections.abc import Callable, Iterable, Iterator

import msgspec

from headrace.log.blocks import Damaged, read_staged
from headrace.log.catalogue_rows import BatchRow
from headrace.log.entries import StagedFiles
from headrace.log.layout import Layout
from headrace.log.report import Damage

_READ_BYTES = 16 << 20


def check_staged(
    layout: Layout, rows: Iterable[BatchRow], now: Callable[[BatchRow], BatchRow | None]
) -> Iterator[Damage]:
    """What is damaged of these batches; `now` says how far one of them is by now."""
    for row in rows:
        files = msgspec.msgpack.decode(row.staged, type=StagedFiles)
        for number, file in enumerate(files[row.file :], row.file):
            name = file.id.hex()
            position = row.position if number == row.file else 0
            while position < file.size:
                path = layout.staged_file(name)
                blocks = read_staged(path, position, file.size, _READ_BYTES)
                for what, _ in blocks:
                    # A server may have appended and deleted it meanwhile.
                    if isinstance(what, Damaged) and not _is_past(now(row), number):
                        yield Damage(f"staged/{name}", what.reason)
                position = blocks[-1].next


def _is_past(row: BatchRow | None, file: int) -> bool:
    return row is None or row.file > file
