"""A point in time as people type it, for `--since`. Pure: the present is an argument."""

from datetime import datetime

from headrace.config_values import SECONDS, Quantity

MOMENT_HELP = "how long ago (90s, 10m, 2h, 7d, 1w), an ISO 8601 time, or milliseconds since 1970"


def parse_moment(text: str, now: datetime) -> int:
    """Milliseconds since 1970, in `now`'s zone where the text names none; or ValueError."""
    ago = Quantity.parse(text)
    if ago is not None and ago.unit == SECONDS:
        return max(0, int(now.timestamp() * 1000 - ago.value * 1000))
    if (
        text.isascii() and text.isdigit() and len(text) > 8
    ):  # shorter ones are dates such as 20250131
        return int(text)
    when = datetime.fromisoformat(text)
    if when.tzinfo is None:
        when = when.replace(tzinfo=now.tzinfo)
    return max(0, int(when.timestamp() * 1000))
