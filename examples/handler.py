"""Answer each message of a topic on another topic, with a function that is called for it.

python examples/handler.py [URL] [TOPIC]
"""

import asyncio
import sys
from contextlib import suppress

import headrace
from headrace.client import Message

URL = sys.argv[1] if len(sys.argv) > 1 else "wombat://127.0.0.1:8120"
TOPIC = sys.argv[2] if len(sys.argv) > 2 else "greetings"


async def main() -> None:
    async def answer(message: Message) -> None:
        await client.publish(f"{TOPIC}-answers", message.payload.upper())

    async with headrace.connect(URL) as client:
        await client.subscribe(TOPIC, answer).attached()  # from now on
        print(f"answering {TOPIC}", flush=True)
        await asyncio.Event().wait()


with suppress(KeyboardInterrupt):
    asyncio.run(main())
