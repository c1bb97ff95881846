"""Process each message of a topic once, however often this is started: a file keeps the offset.

Ends when nothing new has come for a second. Run it, publish something, and run it again.

python examples/resume.py [URL] [TOPIC] [FILE]
"""

import asyncio
import os
import sys
from pathlib import Path

import headrace

URL = sys.argv[1] if len(sys.argv) > 1 else "figg://127.0.0.1:8119"
TOPIC = sys.argv[2] if len(sys.argv) > 2 else "greetings"
FILE = Path(sys.argv[3] if len(sys.argv) > 3 else "greetings.offset")
IDLE_S = 1.0


def load() -> int:
    return int(FILE.read_text()) if FILE.exists() else 0


def save(offset: int) -> None:
    # Written beside and renamed: a crash leaves the old offset or the new one, never half of one.
    new = FILE.with_suffix(".new")
    new.write_text(str(offset))
    os.replace(new, FILE)


async def main() -> None:
    count = 0
    async with headrace.connect(URL) as client:
        subscription = client.subscribe(TOPIC, offset=load())
        try:
            while True:
                async with asyncio.timeout(IDLE_S):
                    batch = await subscription.batch()
                count += len(batch)  # here the work would be done
                save(batch[-1].next_offset)  # and only then counts as done
        except TimeoutError:
            print(f"processed {count} messages, now at {load()}")


asyncio.run(main())
