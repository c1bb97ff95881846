"""Damage in the metadata that lists a lake's files: one sentence, whatever error a library raises."""

import random
import sqlite3

import pytest

from headrace.lake.files.writing import SortedFile
from headrace.lake.format import DamagedTableError, LakeError, Shape, in_a_sentence, plain
from headrace.lake.formats import parquet as registry
from headrace.lake.states import StatesWriter
from headrace.lake.storage.storage import storage_of
from headrace.lake.table import make_table, open_table
from tests.lake.others import KINDS
from tests.lake.rows import rows, token
from tests.lake.test_table import APP, batch, three_batches

TIMES = 40


def use(path):
    lake = open_table(storage_of(path))
    assert lake.shape is not None
    for asked in (lake.files, lake.sync):
        asked()
    lake.last(APP)
    lake.files_of("a", 5)
    lake.sweep(0, dry_run=True)
    return lake.id


@pytest.mark.parametrize("kind", KINDS)
def test_any_damage_of_a_table_is_one_sentence(tmp_path, kind):
    three_batches(make_table(storage_of(tmp_path), kind, Shape()))
    use(tmp_path)
    chance = random.Random(kind)
    files = [
        path
        for path in sorted(tmp_path.rglob("*"))
        if path.is_file() and path.suffix not in (".parquet", ".data")
    ]
    sentences = set()
    for number in range(TIMES):
        path = chance.choice(files)
        whole = path.read_bytes()
        at, bit = chance.randrange(len(whole)), 1 << chance.randrange(8)
        rest = bytes([whole[at] ^ bit]) + whole[at + 1 :]
        path.write_bytes(whole[:at] + (rest if number % 3 else b""))
        try:
            use(tmp_path)
        except LakeError as error:
            sentences.add(str(error))
        path.write_bytes(whole)
    assert sentences
    assert not any("\n" in one or "\x1b" in one or "unknown>" in one for one in sentences)
    use(tmp_path)


def test_damaged_values_of_a_sound_database_are_too(tmp_path):
    lake = make_table(storage_of(tmp_path), "parquet", Shape())
    three_batches(lake)
    path = tmp_path / "_headrace" / "files.db"
    whole = path.read_bytes()
    for change in (
        "delete from lake",
        "update lake set format = 'x'",
        "update lake set decoded = 'no type at all'",
        "update numbers set last = '{'",
        "update numbers set last = x'ff'",
        "update numbers set last = 'x'",
        "update files set bytes = 'x'",
        "update files set path = x'00' where rowid = 1",
    ):
        database = sqlite3.connect(path)
        with database:
            database.execute(change)
        database.close()
        with pytest.raises(DamagedTableError) as damage:
            use(tmp_path)
        assert damage.value.file == "_headrace/files.db"
        path.write_bytes(whole)
    use(tmp_path)


def test_a_full_disk_is_no_damage(tmp_path, monkeypatch):
    lake = make_table(storage_of(tmp_path), "parquet", Shape())
    connect = sqlite3.connect

    def small(*given, **more):
        database = connect(*given, **more)
        database.execute("pragma max_page_count = 1")
        return database

    long = "x" * 10_000
    with monkeypatch.context() as patch:
        patch.setattr(registry.sqlite3, "connect", small)
        with pytest.raises(LakeError) as full:
            lake.commit(long, 0, batch(lake, 0), token())
    assert str(full.value) == (
        f"{tmp_path / '_headrace' / 'files.db'} cannot be written to: database or disk is full"
    )
    assert lake.commit(long, 0, batch(lake, 0), token())
    with (
        pytest.raises(LakeError, match="_delta_log cannot be written to: No space left"),
        in_a_sentence(storage_of(tmp_path), "_delta_log"),
    ):
        raise ValueError("No space left on device (os error 28)")


def write_rows(directory):
    some = rows("a", [bytes(100_000)]).columns
    file = SortedFile(storage_of(directory), "file", some.schema)
    file.add(some, 100_000)
    file.finish({}, lambda file: None)


def write_states(directory):
    with StatesWriter(storage_of(directory), "file") as writer:
        writer.finish()


@pytest.mark.parametrize("write", [write_rows, write_states])
def test_a_full_disk_is_said_with_the_file(tmp_path, write):
    (tmp_path / "file").symlink_to("/dev/full")
    with pytest.raises(LakeError) as full:
        write(tmp_path)
    assert str(full.value) == f"{tmp_path / 'file'} cannot be written to: No space left on device"


def test_what_libraries_say_is_one_plain_line():
    coloured = "Kernel error:\n  \x1b[31m↳\x1b[0m no JSON\n   0: <unknown>\n   1: start_thread\n"
    assert plain(coloured) == "Kernel error: no JSON"
    assert plain(KeyError("schemas")) == "KeyError 'schemas'"
    assert plain(EOFError()) == "EOFError"
    assert len(plain("a long story " * 1000)) < 400
