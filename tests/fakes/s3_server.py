"""A real S3 server for tests: SeaweedFS, one process on loopback with its data in one directory.

A test asks for the fixture `bucket`, which is a new, empty `Bucket` on a server that all tests of a worker
share. `bucket.url` and `bucket.options` open it, as in `storage_of(bucket.url, bucket.options)`. The fixture
`s3_proxy` is a proxy to the same server, for `bucket.through(s3_proxy)`. A test that kills the server makes
its own, because others use the shared one::

    with S3Server(tmp_path / "s3") as server:
        bucket = server.bucket()
        server.kill()
        server.start()  # the same ports, and the same data

It is also a REST catalogue of Iceberg, at `server.catalog_uri`. The metadata of its tables is in a bucket
that `server.table_bucket()` makes, to which nothing else can be written.
"""

import itertools
import json
import os
import subprocess
import sys
import urllib.request
import weakref
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Self

import obstore
import pytest
from obstore.exceptions import BaseError

from headrace.testing import hold_port, wait_until
from tests.fakes.s3_proxy import S3Proxy
from tests.tools import tool

START_TIMEOUT_S = 120.0

KEY, SECRET = "test-key", "test-secret"
READER_KEY, READER_SECRET = "reader-key", "reader-secret"
"""Credentials that may only read and list."""

_IDENTITIES = {
    "identities": [
        {
            "name": "writer",
            "credentials": [{"accessKey": KEY, "secretKey": SECRET}],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        },
        {
            "name": "reader",
            "credentials": [{"accessKey": READER_KEY, "secretKey": READER_SECRET}],
            "actions": ["Read", "List"],
        },
    ]
}

_READY = "ready"
"""Bucket of the object that is written to see whether the server is ready."""

_CATALOG_PORT = "s3.port.iceberg"
_PORTS = (
    *(f"{one}.port{kind}" for one in ("master", "volume", "filer", "s3") for kind in ("", ".grpc")),
    _CATALOG_PORT,
)


class Bucket(NamedTuple):
    name: str
    endpoint: str

    @property
    def url(self) -> str:
        return f"s3://{self.name}/lake"

    @property
    def options(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
        }

    def through(self, proxy: S3Proxy) -> Self:
        """Return the same bucket by way of a proxy."""
        return self._replace(endpoint=proxy.endpoint)


class S3Server:
    """SeaweedFS process. It holds its ports from the first start until it is closed."""

    def __init__(self, directory: Path) -> None:
        beside = Path(sys.executable).with_name("weed")
        self._program = str(beside) if beside.exists() else tool("weed")
        self._directory = directory
        self._held = {name: hold_port() for name in _PORTS}
        self._names = itertools.count(1)
        self._process: subprocess.Popen[bytes] | None = None
        self._is_made = False
        (directory / "data").mkdir(parents=True)
        (directory / "identities.json").write_text(json.dumps(_IDENTITIES))
        self.start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._port('s3.port')}"

    @property
    def catalog_uri(self) -> str:
        return f"http://127.0.0.1:{self._port(_CATALOG_PORT)}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start on the same data, and wait until an object can be written."""
        assert self._process is None, "the server is already running"
        with (self._directory / "log").open("ab") as log:
            self._process = subprocess.Popen(
                self._command(),
                cwd=self._directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # A bucket gets volumes of its own: one is enough. Large objects fill its memory.
                env={**os.environ, "WEED_MASTER_VOLUME_GROWTH_COPY_1": "1", "GOMEMLIMIT": "1GiB"},
            )
        weakref.finalize(self, _reap, self._process)
        wait_until(self._is_ready, START_TIMEOUT_S, "an object in the S3 server")

    def kill(self) -> None:
        """Kill the server. It keeps what it has acknowledged, and its ports stay reserved."""
        if self._process is not None:
            _reap(self._process)
            self._process = None

    def bucket(self) -> Bucket:
        """Create an empty bucket."""
        made = Bucket(f"bucket-{next(self._names)}", self.endpoint)
        self._make(made.name)
        return made

    def table_bucket(self) -> str:
        """Create a bucket for tables of the catalogue, and return its name."""
        name = f"tables-{next(self._names)}"
        places = {
            part: f"127.0.0.1:{self._port(f'{part}.port')}.{self._port(f'{part}.port.grpc')}"
            for part in ("master", "filer")
        }
        done = subprocess.run(
            [
                *(self._program, f"-logdir={self._directory}", "shell"),
                *(f"-{part}={place}" for part, place in places.items()),
            ],
            input=f"s3tables.bucket -create -name {name} -account admin\n",
            capture_output=True,
            text=True,
            timeout=START_TIMEOUT_S,
        )
        assert f"bucket/{name}" in done.stdout, done
        return name

    def remove(self, bucket: Bucket) -> None:
        """Delete a bucket and everything in it."""
        self._ask("DELETE", f"/buckets/{bucket.name}?recursive=true")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        for name, sock in self._held.items():
            if name.endswith(".grpc"):
                part, port = name.partition(".")[0], sock.getsockname()[1]
                Path(f"/tmp/seaweedfs-{part}-grpc-{port}.sock").unlink(missing_ok=True)
            sock.close()

    def _port(self, name: str) -> int:
        return int(self._held[name].getsockname()[1])

    def _command(self) -> list[str]:
        return [
            *(self._program, f"-logdir={self._directory}"),
            *("server", "-dir=data", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"),
            *(f"-{name}={self._port(name)}" for name in _PORTS),
            *(
                "-filer",
                "-filer.localSocket=filer.sock",
                "-master.telemetry=false",
                "-master.electionTimeout=500ms",
            ),
            *("-s3", "-s3.localSocket=s3.sock", "-s3.config=identities.json"),
            *("-s3.port.lance=0", "-s3.autoCreateBucket=false"),
            # A volume is a sparse file: these limits bound the disk, and reserve nothing.
            *("-master.volumeSizeLimitMB=64", "-volume.max=200", "-volume.minFreeSpace=1"),
        ]

    def _is_ready(self) -> bool:
        assert self.pid and self._process is not None
        code = self._process.poll()
        assert code is None, f"weed ended with {code}: {(self._directory / 'log').read_text()}"
        options = Bucket(_READY, self.endpoint).options
        with suppress(OSError, BaseError):
            if not self._is_made:
                self._make(_READY)
                self._is_made = True
            store = obstore.store.S3Store(
                _READY,
                config=options,
                client_options={"allow_http": True},
                retry_config={"max_retries": 0},
            )
            obstore.put(store, "ready", b"ready")
            return True
        return False

    def _make(self, bucket: str) -> None:
        # S3Store cannot make buckets. They are directories in the part of the server below S3.
        self._ask("POST", f"/buckets/{bucket}/")

    def _ask(self, method: str, path: str) -> None:
        url = f"http://127.0.0.1:{self._port('filer.port')}{path}"
        with urllib.request.urlopen(urllib.request.Request(url, method=method), timeout=30):
            pass


def forget_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the credentials of the tester and of the tester's machine from a test and its children."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, os.devnull)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    # Nothing listens at this port of loopback.
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:1")


def _reap(process: "subprocess.Popen[bytes]") -> None:
    # It takes SeaweedFS many seconds to end by itself.
    process.kill()
    process.wait()
