"""Jobs with the token in a file: only the driver has the file, and it reads the file again."""

import pickle
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import headrace
from headrace import pipeline
from headrace.pipeline.tasks import LocalRunner, Progress, Step
from headrace.testing import ServerProcess, wait_until
from tests.system.access.server import EVERYTHING, Tokens, ask


class Elsewhere(LocalRunner):
    """Runner of tasks that get pickled works, as on another machine, where no file of the driver is."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.has_sent_token = False

    def run(
        self, works: Sequence[Any], function: Callable[[Any], Any], progress: Progress | None = None
    ) -> list[Any]:
        return super().run(*self._sent(works, function), progress)

    def exchange(
        self,
        works: Sequence[Any],
        first: Callable[[Any], Any],
        steps: Sequence[Step],
        progress: Progress | None = None,
    ) -> list[Any]:
        works, first = self._sent(works, first)
        return super().exchange(works, first, steps, progress)

    def _sent(self, works: Sequence[Any], function: Any) -> tuple[Any, Any]:
        sent = pickle.dumps((list(works), function))
        assert str(self._file).encode() not in sent
        self.has_sent_token |= self._file.read_bytes() in sent
        found: tuple[Any, Any] = pickle.loads(sent)
        return found


class Place(NamedTuple):
    server: ServerProcess
    tokens: Tokens
    file: Path
    runner: Elsewhere

    @property
    def given(self) -> dict[str, Any]:
        return {
            "url": self.server.http_url,
            "token_file": self.file,
            "runner": self.runner,
        }


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    tokens = Tokens(tmp_path / "data")
    for name in ("first-token", "second-token"):
        tokens.add(name, EVERYTHING)
    file = tmp_path / "token"
    file.write_text("first-token")
    with ServerProcess(tmp_path / "data") as server:
        with headrace.connect_blocking(server.figg_url, token="first-token") as client:
            client.publish("t", b"payload")
        yield Place(server, tokens, file, Elsewhere(file))


def test_every_job_takes_the_token_from_a_file(place: Place, tmp_path: Path) -> None:
    lake = tmp_path / "lake"
    assert pipeline.export(lake, ["t"], **place.given).records == 1
    found = pipeline.replay(lake, "t", "again", **place.given)
    assert found.records == 1
    found = pipeline.aggregate(lake, tmp_path / "states", reducer="last", **place.given)
    assert (found.topics, found.messages) == (2, 2)
    assert pipeline.report(tmp_path / "report.html", **place.given).messages == 2
    assert not pipeline.audit(lake, **place.given).lost
    assert place.runner.has_sent_token


def test_a_job_that_goes_on_takes_the_next_token(place: Place, tmp_path: Path) -> None:
    done: list[int] = []
    is_changed = False

    def stop() -> bool:
        nonlocal is_changed
        if done and not is_changed:  # the first batch is in the lake
            is_changed = True
            place.file.write_text("second-token")
            place.tokens.revoke("first-token")
            with headrace.connect_blocking(place.server.figg_url, token="second-token") as client:
                client.publish("t", b"second")
            wait_until(lambda: not is_known("first-token"), what="the end of the first token")
        return len(done) == 2

    def is_known(token: str) -> bool:
        return ask(place.server, token, "GET", "/v1/topics").status_code == 200

    def progress(bytes_done: int, _: int) -> None:
        done.append(bytes_done)

    lake = tmp_path / "lake"
    given = place.given | {"once": False, "every_s": 0, "stop": stop, "progress": progress}
    found = pipeline.export(lake, ["t"], **given)
    assert (found.records, found.batches) == (2, 2)
