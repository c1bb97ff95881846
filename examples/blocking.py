"""Publish and read without asyncio, as a script does.

python examples/blocking.py [URL] [TOPIC]
"""

import sys

import headrace

URL = sys.argv[1] if len(sys.argv) > 1 else "figg://127.0.0.1:8119"
TOPIC = sys.argv[2] if len(sys.argv) > 2 else "numbers"

with headrace.connect_blocking(URL) as client:
    subscription = client.subscribe(TOPIC, timeout_s=1.0)  # from now on, until a second is quiet
    subscription.attached()

    client.publish(TOPIC, b"0")  # waits for the acknowledgement
    for number in range(1, 1000):
        client.window()
        client.publish_nowait(TOPIC, b"%d" % number)
    client.flush()

    total = sum(int(message.payload) for message in subscription)
    print(f"the sum of what came back is {total}")
