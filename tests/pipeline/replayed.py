"""Content of a server's topic, as bytes of the log and as separate records."""

from contextlib import closing

from headrace.reader.http_client import HttpClient
from headrace.reader.view import parse_place
from headrace.testing import ServerProcess


def payloads_of(server: ServerProcess, topic: str) -> list[bytes]:
    with closing(HttpClient(parse_place(server.http_url, ""))) as http:
        end = http.json("GET", "/v1/topic", {"name": topic})["end"]["offset"]
        data = b""
        while len(data) < end:
            asked = {"topic": topic, "from": len(data), "to": end}
            data += http.send("GET", "/v1/range", asked)
    found = []
    while data:
        size = int.from_bytes(data[:4])
        found.append(data[4 : 4 + size])
        data = data[4 + size :]
    return found
