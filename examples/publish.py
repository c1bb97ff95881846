"""Publish to a topic: one message at a time, then ten thousand as fast as the server takes them.

python examples/publish.py [URL] [TOPIC]
"""

import asyncio
import sys
import time

import headrace

URL = sys.argv[1] if len(sys.argv) > 1 else "figg://127.0.0.1:8119"
TOPIC = sys.argv[2] if len(sys.argv) > 2 else "greetings"
MANY = 10_000


async def main() -> None:
    async with headrace.connect(URL) as client:
        for word in (b"hello", b"again"):
            await client.publish(TOPIC, word)  # returns when the server has it safe
            print(f"published {word.decode()}")

        started = time.perf_counter()
        for number in range(MANY):
            await client.window()  # waits only when too much is unacknowledged
            client.publish_nowait(TOPIC, b"message %d" % number)
        await client.flush()
        print(f"published {MANY} more, {MANY / (time.perf_counter() - started):,.0f} a second")


asyncio.run(main())
