"""Jobs on Iceberg lakes of other catalogues: a REST server with S3, or SQLite with a directory."""

from functools import partial

import pytest

from headrace.cli.main import main
from headrace.client.topics.lake import open_lake
from headrace.errors import ConfigError
from headrace.lake.format import LakeError
from headrace.pipeline import aggregate, audit, compact, dedupe, export, replay, report
from headrace.pipeline.tasks import LocalRunner
from tests.fakes.catalogues import DIRECTORY, REST, place_of
from tests.lake.others import seen_by_others
from tests.pipeline.export.test_job import POINTS, Published
from tests.pipeline.meddling import Killed, Meddling, kill
from tests.pipeline.replayed import payloads_of

RUNNER = LocalRunner()


@pytest.fixture(params=[DIRECTORY, REST])
def place(request):
    with place_of(request.param, request) as made:
        yield made


@pytest.fixture
def published(server):
    made = Published(server)
    made.more(20)
    return made


def exported(place, published, **given):
    return published.export(place.lake, format="iceberg", **place.options, **given)


def rows(place):
    names = ["topic", "offset", "payload"]
    return sorted(
        map(tuple, map(dict.values, seen_by_others(place.storage).select(names).to_pylist()))
    )


def wanted(published):
    return [(one.topic, one.offset, one.payload) for one in published.rows]


def test_an_export_killed_at_any_point_loses_and_doubles_nothing(place, published):
    for point in POINTS:
        with pytest.raises(Killed):
            exported(place, published, batch_bytes=2000, points=Meddling(**{point: kill}))
        published.more(1)
    assert exported(place, published).records > 0
    assert rows(place) == wanted(published)
    assert published.cursors() == published.ends
    options = {**place.options, "runner": RUNNER}
    assert not audit(place.lake, published.payloads, url=published.server.http_url, **options).lost


def test_all_jobs_read_it(place, published, tmp_path):
    exported(place, published, batch_bytes=4000)
    options = {**place.options, "runner": RUNNER}
    url = published.server.http_url
    assert compact(place.lake, **options).made == 1
    assert rows(place) == wanted(published)
    topic = f"{published.prefix}/a"
    target = f"{published.prefix}-again"
    assert replay(place.lake, topic, target, url=url, **options).records == 20
    assert payloads_of(published.server, target) == published.payloads[topic]
    counted = report(tmp_path / "page.html", [topic], lake=place.lake, url=url, **options)
    assert counted.messages == 20
    assert aggregate(place.lake, tmp_path / "states", reducer="count", **options).topics == 3
    kept = dedupe(place.lake, tmp_path / "once", [topic], payload=True, window_s=None, **options)
    assert kept.kept == len(set(published.payloads[topic]))
    read = open_lake(place.lake, place.storage_options, place.catalog_options)
    assert [one for some in read(topic, 0) for _, one in some] == published.payloads[topic]
    found = audit(place.lake, **options)
    assert (found.lost, sum(one.records for one in found.topics)) == (False, published.records)


def test_every_job_asks_for_the_catalogue(place, published, tmp_path):
    exported(place, published)
    options = {"storage_options": place.storage_options, "runner": RUNNER}
    for job in (
        partial(export, url=published.server.http_url),
        compact,
        audit,
        partial(replay, topic="a", to="b", url=published.server.http_url),
        partial(aggregate, into=tmp_path / "states", reducer="count"),
        partial(dedupe, into=tmp_path / "rows", payload=True),
    ):
        with pytest.raises(LakeError, match="the catalogue's properties with --catalog-option"):
            job(place.lake, **options)
    with pytest.raises(ConfigError, match="the catalogue's properties with --catalog-option"):
        open_lake(place.lake, place.storage_options)


def test_commands_take_the_catalogue_from_flags_or_the_file(place, published, tmp_path, capsys):
    exported(place, published)

    def run(*more):
        with pytest.raises(SystemExit) as ended:
            main(["pipeline", "compact", "--dry-run", "--lake", place.lake, *more])
        return ended.value.code, capsys.readouterr()

    flags = [f"--storage-option={key}={value}" for key, value in place.storage_options.items()]
    code, said = run(*flags)
    assert code == 1
    assert "with --catalog-option" in said.err
    flags += [f"--catalog-option={key}={value}" for key, value in place.catalog_options.items()]
    assert run(*flags)[0] == 0
    config = tmp_path / "headrace.toml"
    tables = {"storage_options": place.storage_options, "catalog_options": place.catalog_options}
    lines = [
        line
        for name, options in tables.items()
        for line in (
            f"[pipeline.{name}]",
            *(f'"{key}" = "{value}"' for key, value in options.items()),
        )
    ]
    config.write_text("\n".join(lines))
    assert run("--config", str(config))[0] == 0
