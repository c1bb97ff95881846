"""Files of a data directory: other users of the machine read none of them. Elsewhere: their content."""

import stat
from pathlib import Path

from headrace import connect_blocking
from headrace.testing import ServerProcess, wait_until
from tests.system.conftest import SMALL, Start


def test_other_users_of_the_machine_read_nothing(start: Start, tmp_path: Path) -> None:
    """The directory itself is open to them, as one that a package or a container has made may be."""
    (tmp_path / "data").mkdir(mode=0o755)
    server: ServerProcess = start(config=SMALL)
    with connect_blocking(server.figg_url) as client:
        client.publish("topic", b"foo")
    wait_until(lambda: any((tmp_path / "data").rglob("segments/*/*")), what="a segment")
    assert server.terminate() == 0
    made = sorted((tmp_path / "data").rglob("*"))
    assert made
    open_to_all = [path for path in made if path.stat().st_mode & stat.S_IRWXO]
    assert not open_to_all
