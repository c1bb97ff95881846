"""From nothing to a picture: a live stream over four protocols, a killed server, a lake, a report, an audit.

python examples/demo.py [--rounds N] [DIRECTORY]

Everything lies in DIRECTORY, ./headrace-demo unless another is named, which the next run makes anew.
"""

import argparse
import asyncio
import json
import random
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import headrace
from headrace.testing import ServerProcess

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
    asked = parser.parse_args()
    root = made_anew(asked.directory)
    lake, states, page = root / "lake", root / "states", root / "report.html"
    (root / "headrace.toml").write_text(CONFIG)
    with ServerProcess(root / "data", f"--config={root / 'headrace.toml'}") as server:
        say(f"A server runs: {server.ready_line.strip()}")
        http = "{}:{}".format(*server.http)
        say(
            "Sensors over Figg, a chat over Wombat, tasks over Logux, documents in channels;\n"
            "and in the middle of it the server is killed (kill -9)."
        )
        asyncio.run(stream(server, root, asked.rounds))
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
