"""Topics that are being created, while their number is limited."""

from pathlib import Path

from headrace.config.settings import Limits
from tests.server.test_figg_connection import Figg


async def test_topics_of_a_batch_count_until_it_has_created_them(tmp_path: Path) -> None:
    """A batch may wait for long, and others must not use its room meanwhile."""
    server = Figg(tmp_path, Limits(topics_max=3))
    connections = server.connections
    first, second = {"a", "b"}, {"b", "c"}
    promised = []
    for names in (first, second):
        assert connections.why_not_created(names) == ""
        promised.append(connections.promise(names))
        assert connections.why_not_created({"d"}) == (
            "" if names is first else "topics_max is reached"
        )
    connections.keep(promised[0])
    assert connections.why_not_created({"d", "e"}) == "topics_max is reached", "b is still to come"
    assert connections.why_not_created({"d"}) == ""
    connections.keep(promised[1])
    assert connections.why_not_created({"d", "e", "f"}) == ""
    assert not connections._promised
    server.store.crash()


async def test_topics_that_were_never_stored_count_again(tmp_path: Path) -> None:
    server = Figg(tmp_path, Limits(topics_max=3))
    connections = server.connections
    assert connections.why_not_created({"a", "b", "c"}) == ""
    assert connections.why_not_created({"b", "c", "d", "e"}) == "topics_max is reached"
    assert connections.why_not_created({"b", "c", "d"}) == ""
    server.store.crash()
