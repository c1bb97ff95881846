"""Follow a topic from its oldest message on, over server restarts, until interrupted.

python examples/subscribe.py [URL] [TOPIC]
"""

import asyncio
import sys
from contextlib import suppress

import headrace
from headrace.client import ConnectionState, Missed

URL = sys.argv[1] if len(sys.argv) > 1 else "figg://127.0.0.1:8119"
TOPIC = sys.argv[2] if len(sys.argv) > 2 else "greetings"


def say_state(state: ConnectionState) -> None:
    print(f"({state})", file=sys.stderr)


def say_missed(missed: Missed) -> None:
    print(f"(missed {missed.topic} from {missed.asked} to {missed.got})", file=sys.stderr)


async def main() -> None:
    client = headrace.connect(URL)
    client.on("state", say_state)
    client.on("missed", say_missed)
    async with client, client.subscribe(TOPIC, offset=0) as messages:
        async for message in messages:
            print(message.offset, message.payload.decode(errors="replace"), flush=True)


with suppress(KeyboardInterrupt):
    asyncio.run(main())
