"""Rows read without SQLite: the same rows that SQLite finds, except those of a damaged page."""

import random

import pytest

from headrace.log.catalogue.catalogue import FILE_NAME, Catalogue
from headrace.log.catalogue.pages import Pages
from headrace.log.catalogue.rows import (
    TABLES,
    BatchRow,
    CursorRow,
    NoteRow,
    ProducerRow,
    SegmentRow,
    TombstoneRow,
    TopicRow,
)

PAGE_BYTES = 4096


@pytest.fixture
def catalogue(tmp_path):
    """Tables of several pages, notes that fill whole pages, and rows that were replaced or dropped."""
    made = Catalogue.create(tmp_path)
    chance = random.Random(7)
    big = 1 << 40
    with made.transaction():
        made.put(
            [TopicRow(n, b"topic %d" % n, big, b"synced", 0, 0, n, 0, big) for n in range(1, 120)]
        )
        made.put([SegmentRow(n, n * 100, big, 1, 0, 1, -1, 0) for n in range(120)])
        made.put([TombstoneRow(b"gone %d" % n, 1, 2, 3, 4) for n in range(120)])
        made.put([CursorRow(b"topic %d" % n, b"reader", n, n, n, n) for n in range(120)])
        made.put([ProducerRow(b"topic", b"p%d" % n, n, b"recent", n) for n in range(120)])
        made.put([BatchRow(b"producer", n, b"files", 1, 0, 0, n) for n in range(100)])
        made.put([NoteRow(b"note %d" % n, chance.randbytes(n * 300), 0, n) for n in range(40)])
        made.put([NoteRow(b"a long note", chance.randbytes(1 << 16), 5, 6)])
    with made.transaction():
        made.put(
            [CursorRow(b"topic %d" % n, b"reader", n, n + 1, n, n + 1) for n in range(0, 120, 3)]
        )
        made.drop(NoteRow, [(b"note %d" % n,) for n in range(0, 40, 4)])
    yield made
    made.close()


def rows(source):
    return {kind: set(source(kind)) for kind in TABLES}


def test_pages_hold_what_sqlite_finds(catalogue, tmp_path):
    expected = rows(lambda kind: catalogue.salvage(kind)[0])
    assert all(expected.values())
    assert rows(Pages(tmp_path / FILE_NAME).rows) == expected


def test_a_bad_page_costs_the_rows_in_it_and_no_others(catalogue, tmp_path):
    expected = rows(lambda kind: catalogue.salvage(kind)[0])
    catalogue.close()
    path = tmp_path / FILE_NAME
    data = path.read_bytes()
    for begin in range(0, len(data), PAGE_BYTES):
        path.write_bytes(data[:begin] + b"\xaa" * PAGE_BYTES + data[begin + PAGE_BYTES :])
        found = rows(Pages(path).rows)
        page = data[begin : begin + PAGE_BYTES]
        for kind, wanted in expected.items():
            assert found[kind] <= wanted
            # A long note spans many pages, each of which holds a part of it.
            for row in wanted - found[kind]:
                key = row[0] if isinstance(row[0], bytes) else row[1]
                long = isinstance(row, NoteRow) and len(row.value) > 400
                assert long or not isinstance(key, bytes) or key in page


@pytest.mark.parametrize("seed", range(30))
def test_garbage_makes_no_row_and_no_error(catalogue, tmp_path, seed):
    expected = rows(lambda kind: catalogue.salvage(kind)[0])
    chance = random.Random(seed)
    path = tmp_path / FILE_NAME
    data = bytearray(path.read_bytes())
    for _ in range(40):
        at = chance.randrange(len(data) - 64)
        data[at : at + 64] = chance.randbytes(64)
    path.write_bytes(data)
    found = rows(Pages(path).rows)
    assert all(found[kind] <= expected[kind] for kind in TABLES)
