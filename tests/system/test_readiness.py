"""`/readyz` of a real server: 200 while it serves, 503 while it drains."""

import json
import os
import signal

from headrace import connect_blocking
from headrace.testing import ServerProcess, wait_until
from tests.system.support import children, get


def readiness(server: ServerProcess) -> tuple[int, str]:
    status, body = get(server, "/readyz")
    return status, json.loads(body)["status"]


def test_a_server_that_drains_is_not_ready_and_still_answers(tmp_path):
    with ServerProcess(tmp_path / "data") as server:
        (applier,) = children(server.pid)
        with connect_blocking(server.figg_url) as client:
            client.publish("topic", b"to be applied before the end")
        assert readiness(server) == (200, "ready")
        os.kill(applier, signal.SIGSTOP)  # now the server cannot end
        try:
            server.signal(signal.SIGTERM)
            draining = (503, "draining: the server is stopping")
            wait_until(lambda: readiness(server) == draining, 25, "the server to drain")
        finally:
            os.kill(applier, signal.SIGCONT)
        assert server.wait() == 0
