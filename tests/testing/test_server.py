"""The address of a server process stays its own over all its lives, whatever else wants a port meanwhile."""

import socket
import struct
from pathlib import Path

import pytest

from headrace.testing import ServerProcess

_IP_LOCAL_PORT_RANGE = 51
"""Socket option of Linux 6.3 that Python does not name yet."""


def connect_from(port: int, to: socket.socket) -> None:
    """Make an outgoing connection for which the kernel can choose only this port."""
    with socket.socket() as client:
        only = struct.pack("=I", port << 16 | port)
        try:
            client.setsockopt(socket.IPPROTO_IP, _IP_LOCAL_PORT_RANGE, only)
        except OSError:
            pytest.skip("this kernel lets no socket choose the range of its local port")
        client.connect(to.getsockname())


def test_no_outgoing_connection_is_given_the_port_of_a_dead_server(tmp_path: Path) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as other,
        ServerProcess(tmp_path / "data") as server,
    ):
        before = (server.figg, server.ws, server.http)
        server.kill()
        for _, port in before:
            with pytest.raises(OSError, match="Cannot assign requested address"):
                connect_from(port, other)
        server.start()
        assert (server.figg, server.ws, server.http) == before


def test_connections_to_a_dead_server_are_refused(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "data") as server:
        server.kill()
        for address in (server.figg, server.ws, server.http):
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(address, 30)
