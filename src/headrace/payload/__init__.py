"""Formats of application content in records: Logux events, channel messages and channel states."""

from collections.abc import Callable, Mapping

from headrace.model import CHANNEL_PREFIX, LOGUX_PREFIX
from headrace.payload.channel import check_row
from headrace.payload.logux import check_envelope

UPLOAD_CHECKS: Mapping[str, Callable[[bytes], object]] = {
    LOGUX_PREFIX: check_envelope,
    CHANNEL_PREFIX: check_row,
}
"""Check by topic prefix: raises ValueError for a payload that topics with the prefix cannot hold."""
