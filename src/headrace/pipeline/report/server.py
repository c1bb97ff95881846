"""Requests of a report to a running server: readers and their lag, channels and their members, counters."""

from collections.abc import Iterator
from contextlib import closing
from itertools import islice
from typing import Any

from headrace.model import LAKE_START_READER
from headrace.pipeline.report.data import ChannelMember, ChannelsSeen, ReaderLag, ServerSeen
from headrace.reader.http_client import HttpClient
from headrace.reader.planning import TopicSelection
from headrace.reader.view import LogLocation

CHANNELS_MAX = 10_000
"""Maximum number of channels that are examined: the server reads the notes of each."""

SHOWN_MAX = 20
"""Maximum number of readers, and of members of channels, that are named: the slowest ones."""

_PAGE = 1000


def ask_server(place: LogLocation, topics: TopicSelection) -> ServerSeen:
    with closing(HttpClient(place)) as http:
        counters = _counters(http.send("GET", "/metrics", {}).decode("utf-8", "replace"))
        readers = readers_of(cursor for cursor in _cursors(http) if topics.matches(cursor["topic"]))
        channels = _channels(http)
        some = list(islice(channels, CHANNELS_MAX))
        more = next(channels, None) is not None
    return ServerSeen(
        counters.get("headrace_duplicates_refused_total", 0),
        counters.get("headrace_channels_trimmed_total", 0),
        counters.get("headrace_channels_destroyed_total", 0),
        readers[:SHOWN_MAX],
        len(readers),
        channels_of(some, more=more),
    )


def readers_of(cursors: Iterator[dict[str, Any]]) -> list[ReaderLag]:
    """Sum up the cursors of each reader; the reader that is furthest behind comes first."""
    found: dict[str, ReaderLag] = {}
    slowest: dict[str, int] = {}
    for one in cursors:
        name, lag = one["reader"], one["lag_records"]
        if name == LAKE_START_READER:
            continue  # this cursor is the lake's start, and never moves
        known = found.get(name) or ReaderLag(name, 0, 0, 0, 0, 0, one["topic"])
        is_slowest = lag > slowest.get(name, -1)
        slowest[name] = max(lag, slowest.get(name, -1))
        found[name] = ReaderLag(
            name,
            known.topics + 1,
            known.lag_records + lag,
            known.lag_bytes + one["lag_bytes"],
            known.gone_records + one["gone_records"],
            max(known.moved_ms, one["ms"]),
            one["topic"] if is_slowest else known.slowest_topic,
        )
    return sorted(found.values(), key=lambda reader: (-reader.lag_records, reader.name))


def channels_of(found: list[dict[str, Any]], *, more: bool) -> ChannelsSeen:
    alive = [one for one in found if one["exists"]]
    members = [
        ChannelMember(
            member["processor"],
            one["name"],
            member["present"],
            member["lag_messages"],
            member["missed_messages"],
        )
        for one in found
        for member in one["members"]
    ]
    members.sort(key=lambda member: (-member.lag_messages, member.processor, member.channel))
    return ChannelsSeen(
        len(found),
        more,
        len(alive),
        sum(one["messages"] for one in alive),
        sum(one["bytes"] for one in alive),
        sum(1 for one in alive if one["start"] > 0),
        len(found) - len(alive),
        sum(1 for one in found if one["destroyed_ms"]),
        members[:SHOWN_MAX],
        len(members),
    )


def _counters(text: str) -> dict[str, int]:
    found = {}
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        if value.isdigit():
            found[name] = int(value)
    return found


def _cursors(http: HttpClient) -> Iterator[dict[str, Any]]:
    after, after_reader = "", ""
    while True:
        asked = {"after": after, "after_reader": after_reader, "limit": _PAGE}
        page = http.json("GET", "/v1/cursors", asked)
        yield from page["cursors"]
        if not page["more"]:
            return
        last = page["cursors"][-1]
        after, after_reader = last["topic"], last["reader"]


def _channels(http: HttpClient) -> Iterator[dict[str, Any]]:
    after = ""
    while True:
        page = http.json("GET", "/v1/channels", {"after": after} if after else {})
        yield from page["channels"]
        if not page["more"]:
            return
        after = page["channels"][-1]["name"]
