"""A point in time as people type it, for `--since`. Pure: the present is an argument."""

import re
from datetime import datetime

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
MOMENT_HELP = "how long ago (90s, 10m, 2h, 7d, 1w), an ISO 8601 time, or milliseconds since 1970"


def parse_moment(text: str, now: datetime) -> int:
    """Milliseconds since 1970, in `now`'s zone where the text names none; or ValueError."""
    if ago := re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smhdw])", text):
        ms = now.timestamp() * 1000 - float(ago[1]) * _SECONDS[ago[2]] * 1000
        return max(0, int(ms))
    if (
        text.isascii() and text.isdigit() and len(text) > 8
    ):  # shorter ones are dates such as 20250131
        return int(text)
    when = datetime.fromisoformat(text)
    if when.tzinfo is None:
        when = when.replace(tzinfo=now.tzinfo)
    return max(0, int(when.timestamp() * 1000))
