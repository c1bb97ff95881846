"""Iceberg tables of catalogues that users name: the same promises as with the lake's own catalogue."""

import json
import pickle
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from headrace.lake.format import LakeError, Shape
from headrace.lake.formats.catalogue import MARK
from headrace.lake.storage.storage import storage_of
from headrace.lake.table import find_table, make_table, open_table
from tests.fakes.catalogues import DIRECTORY, POSTGRES, REST, S3, Place, place_of
from tests.fakes.s3_proxy import LOSE_ANSWER, Answer, S3Proxy
from tests.lake.rows import token
from tests.lake.test_table import (
    APP,
    batch,
    merged,
    payloads,
    test_a_batch_counts_once_however_often_it_is_committed,
    test_a_batch_may_hold_nothing,
    test_a_commit_is_recognised_by_its_token_when_its_outcome_was_unknown,
    test_files_are_replaced_in_one_step_and_only_if_all_are_there,
    three_batches,
)
from tests.system.channel.postgres import Cluster
from tests.tools import takes_long

WAIT_S = 60

# These claims about every table are tested here too, with the fixture `lake` of this file.
assert test_a_batch_counts_once_however_often_it_is_committed
assert test_a_batch_may_hold_nothing
assert test_a_commit_is_recognised_by_its_token_when_its_outcome_was_unknown
assert test_files_are_replaced_in_one_step_and_only_if_all_are_there


@pytest.fixture(scope="module")
def postgres() -> Iterator[Cluster]:
    made = Cluster()
    yield made
    made.close()


# The others differ from these two in where SQL tables or files are.
@pytest.fixture(
    params=[
        *(DIRECTORY, REST),
        *(pytest.param(one, marks=takes_long) for one in (S3, POSTGRES)),
    ]
)
def place(request) -> Iterator[Place]:
    with place_of(request.param, request) as made:
        yield made


in_every_place = pytest.mark.parametrize("place", [DIRECTORY, S3, POSTGRES, REST], indirect=True)
"""Marks tests that a usual run has with every kind of catalogue and storage."""


@pytest.fixture
def rest(request) -> Iterator[Place]:
    with place_of(REST, request) as made:
        yield made


@pytest.fixture
def lake(place):
    return make_table(place.storage, "iceberg", Shape())


def refused(function, *given):
    with pytest.raises(LakeError) as error:
        function(*given)
    said = str(error.value)
    assert "\n" not in said
    return said


def test_a_lake_names_its_table_and_no_secrets(place, lake):
    assert json.loads(place.storage.read(MARK)) == {
        "format": 3,
        "table": "headrace.records",
        "uuid": lake.id,
        "location": place.lake if "://" in place.lake else f"file://{place.lake}",
    }
    found = find_table(place.storage, "auto", Shape())
    assert (found.kind, found.id, found.oddities()) == ("iceberg", lake.id, [])


def test_a_lake_without_its_catalogue_says_what_to_give(place, lake):
    storage = storage_of(place.lake, place.storage_options)
    for asked in (open_table, lambda storage: find_table(storage, "iceberg", Shape())):
        assert refused(asked, storage) == (
            f"{place.lake} is the table headrace.records of an Iceberg catalogue: give the catalogue's "
            "properties with --catalog-option, such as uri=https://host"
        )


def test_tasks_do_not_learn_the_catalogue(place):
    sent = pickle.dumps(place.storage)
    assert pickle.loads(sent) == place.storage
    assert dict(pickle.loads(sent).catalog) == {}


@in_every_place
def test_one_of_several_exporters_wins_each_number(place, lake):
    start = threading.Barrier(3, timeout=WAIT_S)

    def export(name: int) -> list[int]:
        mine = open_table(place.storage)
        won = []
        for number in range(3):
            start.wait()
            if mine.commit(APP, number, batch(mine, number), name):
                won.append(number)
        return won

    with ThreadPoolExecutor(3) as threads:
        won = [number for some in threads.map(export, range(3)) for number in some]
    assert sorted(won) == [0, 1, 2]
    assert payloads(lake) == [b"0", b"1", b"2"]


@in_every_place
def test_files_that_no_state_names_are_swept(place, lake):
    paths = three_batches(lake)
    assert lake.commit("merge", 0, merged(lake, 0, 1), token(), replaced=paths[:2])
    batch(lake, 9)
    place.storage.create("notes.txt", b"")
    assert lake.sweep(7200, dry_run=False) == 0
    assert lake.sweep(-5, dry_run=True) == lake.sweep(-5, dry_run=False) >= 3
    assert payloads(lake) == [b"0", b"1", b"2"]
    left = {one.path for one in place.storage.list()}
    assert {"notes.txt", MARK, *lake.files()} <= left
    assert not left & {*paths[:2]}
    assert lake.commit(APP, 3, batch(lake, 3), token())


def test_a_creation_that_was_interrupted_is_completed(place, lake):
    place.storage.delete([MARK])
    assert find_table(place.storage, "iceberg", Shape()) is None
    made = make_table(place.storage, "iceberg", Shape())
    assert made.id == lake.id
    assert made.commit(APP, 0, batch(made, 0), token())


def test_two_lakes_need_two_names_in_a_catalogue(place, lake):
    other = place._replace(lake=f"{place.lake}-2")
    assert refused(make_table, other.storage, "iceberg", Shape()) == (
        f"the catalogue of {other.lake} has another table headrace.records: give another name with "
        "--catalog-option table=NAMESPACE.NAME"
    )
    assert not other.storage.has(MARK)
    named = other.with_catalog(table="other.rows")
    if "location" in named.catalog_options:
        where = named.catalog_options["location"].replace("headrace/records", "other/rows")
        named = named.with_catalog(location=where)
    made = make_table(named.storage, "iceberg", Shape(by_topic=True))
    assert made.commit(APP, 0, batch(made, 7), token())
    assert payloads(made) == [b"7"]
    # From now on, the lake knows its table.
    assert open_table(other.storage).files() == made.files()
    assert lake.files() == {}


def test_a_table_that_was_dropped_is_one_sentence(place, lake):
    lake._catalog.catalog.drop_table("headrace.records")
    gone = (
        f"{place.lake} is no longer a lake of Headrace: its catalogue does not have its table "
        "headrace.records"
    )
    assert refused(lake.files) == gone
    assert refused(open_table, place.storage) == gone


def test_a_copy_of_a_lake_is_refused(place, lake):
    copy = place._replace(lake=f"{place.lake}-copy")
    copy.storage.create(MARK, place.storage.read(MARK))
    assert refused(open_table, copy.storage).startswith(
        f"{copy.lake} is a copy of an Iceberg table, or was moved: its metadata names files in {place.lake};"
    )


def test_object_storage_needs_a_catalogue(bucket, tmp_path):
    storage = storage_of(bucket.url, bucket.options)
    assert refused(find_table, storage, "iceberg", Shape()) == (
        f"{bucket.url} needs a catalogue for an Iceberg table: give one with --catalog-option, such as "
        "uri=https://host, or leave out --format iceberg"
    )
    assert find_table(storage, "delta", Shape()) is None
    for kind in ("auto", "delta", "parquet"):
        with_catalog = storage_of(tmp_path / "lake", None, {"uri": "sqlite://"})
        assert refused(find_table, with_catalog, kind, Shape()) == (
            f"{tmp_path / 'lake'} would be a lake without a catalogue: give --format iceberg, or leave out "
            "--catalog-option"
        )


def test_a_lake_with_its_own_catalogue_or_of_delta_needs_no_other(tmp_path):
    for kind in ("delta", "iceberg"):
        made = make_table(storage_of(tmp_path / kind), kind, Shape())
        found = open_table(storage_of(tmp_path / kind, None, {"uri": "sqlite:////nowhere"}))
        assert (found.kind, found.id) == (kind, made.id)
        assert found.commit(APP, 0, batch(found, 0), token())


# The REST catalogue by way of a proxy


@pytest.fixture
def proxied(rest) -> Iterator[tuple[Place, S3Proxy]]:
    with S3Proxy(rest.catalog_options["uri"]) as proxy:
        yield rest.with_catalog(uri=proxy.endpoint), proxy


COMMIT = "POST .*/tables/records"


@pytest.mark.parametrize("fault", [LOSE_ANSWER, Answer(500), Answer(503)])
def test_a_commit_whose_outcome_is_unknown_counts_once(proxied, fault):
    place, proxy = proxied
    lake = make_table(place.storage, "iceberg", Shape())
    proxy.seen.clear()
    proxy.fail(fault, COMMIT)
    assert lake.commit(APP, 0, batch(lake, 0), token())
    # After a lost answer, the commit is found and not made again.
    commits = [one for one in proxy.seen if one.line.startswith("POST")]
    assert len(commits) == (1 if fault is LOSE_ANSWER else 2)
    paths = list(lake.files())
    proxy.fail(fault, COMMIT)
    assert lake.commit("merge", 0, merged(lake, 0), token(), replaced=paths)
    assert payloads(lake) == [b"0"]


def test_a_creation_whose_outcome_is_unknown_is_completed(proxied):
    place, proxy = proxied
    proxy.fail(Answer(500), COMMIT)
    proxy.fail(LOSE_ANSWER, COMMIT)
    assert refused(make_table, place.storage, "iceberg", Shape()) == (
        f"the catalogue of {place.lake} has not created the table headrace.records: run this again"
    )
    assert "cannot be reached" in refused(make_table, place.storage, "iceberg", Shape())
    assert find_table(place.storage, "iceberg", Shape()) is None
    lake = make_table(place.storage, "iceberg", Shape())
    assert lake.commit(APP, 0, batch(lake, 0), token())
    assert payloads(lake) == [b"0"]


@pytest.mark.parametrize("status", [500, 503])
def test_a_catalogue_that_always_fails_is_one_sentence(proxied, status):
    place, proxy = proxied
    lake = make_table(place.storage, "iceberg", Shape())
    proxy.fail(Answer(status), COMMIT, times=100)
    said = refused(lake.commit, APP, 0, batch(lake, 0), token())
    assert said.startswith(f"the catalogue of {place.lake} cannot be used: ")
    assert lake.last(APP) is None
    assert lake.files() == {}


# Catalogues that cannot be used


def test_a_catalogue_that_is_away_is_one_sentence(rest):
    lake = make_table(rest.storage, "iceberg", Shape())
    away = rest.with_catalog(uri="http://127.0.0.1:1")
    said = (
        f"the catalogue of {rest.lake} cannot be reached at 127.0.0.1:1 (nothing listens there): start it, "
        "or correct the option uri"
    )
    assert refused(open_table, away.storage) == said
    lake._catalog.catalog.uri = "http://127.0.0.1:1"
    said = refused(lake.commit, APP, 0, batch(lake, 0), token())
    assert "cannot be reached at" in said


def test_wrong_credentials_are_one_sentence(rest):
    wrong = rest.with_catalog(credential="test-key:qwertz")
    said = refused(make_table, wrong.storage, "iceberg", Shape())
    assert said == (
        f"the catalogue of {rest.lake} refuses the credentials (invalid_client: Invalid client credentials): "
        "correct them with --catalog-option"
    )


def test_a_wrong_password_of_a_database_is_one_sentence(bucket, postgres):
    uri = postgres.url("postgres", password="qwertz").replace("postgresql:", "postgresql+psycopg:")
    storage = storage_of(bucket.url, bucket.options, {"uri": uri})
    said = refused(make_table, storage, "iceberg", Shape())
    assert said.startswith(f"the catalogue of {bucket.url} refuses the credentials (")
    assert "password authentication failed" in said
    assert "qwertz" not in said


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"secret": "qwertz"}, "is not known: give its type and uri with --catalog-option"),
        (
            {"type": "nothing", "secret": "qwertz"},
            "cannot be used: 'nothing' is not a valid CatalogType",
        ),
    ],
)
def test_options_that_name_no_catalogue_are_one_sentence(tmp_path, options, reason):
    lake = tmp_path / "lake"
    said = refused(make_table, storage_of(lake, None, options), "iceberg", Shape())
    assert said == f"the catalogue of {lake} {reason}"
