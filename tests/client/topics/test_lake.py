"""Reading through to a lake: records that the log no longer has come from there, in their place, once."""

import asyncio
import threading
from collections.abc import Iterator

import pytest

from headrace.client.topics.lake import LakeGap, Rows, open_lake
from headrace.client.topics.subscription import Subscription
from headrace.errors import ConfigError
from headrace.session.topics.events import Missed


class Lake:
    """A lake with batches of records; each is delivered when a test lets it."""

    def __init__(self, *batches: Rows, fails: bool = False) -> None:
        self._batches, self._fails = batches, fails
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def read(self, topic: str, offset: int) -> Iterator[Rows]:
        assert topic == "t"
        for batch in self._batches:
            self.may_go_on.wait(30)
            yield [(end, payload) for end, payload in batch if end > offset]
        if self._fails:
            raise OSError("the disk is gone")


def records(*ends: int) -> Rows:
    """Return records of 10 bytes each."""
    return [(end, b"x%05d" % end) for end in ends]


class Client:
    def __init__(self) -> None:
        self.missed: list[Missed] = []

    def caught_up(self, subscription: Subscription) -> None: ...

    async def unsubscribe(self, topic: str) -> None: ...

    def subscribe(
        self, lake: Lake, asked: int, got: int, has_serials: bool = False
    ) -> Subscription:
        subscription = Subscription(self, "t", asked, 1 << 20)
        gap = LakeGap(lake.read, "t", asked, got, has_serials=has_serials, tell=self.missed.append)
        subscription.deliver_from_lake(gap)
        return subscription


async def take(subscription: Subscription, count: int) -> list[int | None]:
    return [(await anext(subscription)).next_offset for _ in range(count)]


async def test_what_the_log_has_no_more_comes_first_and_once() -> None:
    client = Client()
    lake = Lake(records(10, 20), records(30, 40, 50))
    subscription = client.subscribe(lake, 10, 40)
    subscription.deliver(records(50, 60))
    assert await take(subscription, 5) == [20, 30, 40, 50, 60]
    assert subscription.next_offset == 60
    assert client.missed == []


async def test_what_the_lake_has_not_either_is_missed() -> None:
    client = Client()
    subscription = client.subscribe(Lake(records(30), records(60, 70)), 0, 100)
    subscription.deliver(records(110))
    assert await take(subscription, 4) == [30, 60, 70, 110]
    assert [one[1:3] for one in client.missed] == [(0, 20), (30, 50), (70, 100)]


async def test_over_wombat_a_record_of_the_lake_has_a_serial_to_resume_from() -> None:
    client = Client()
    subscription = client.subscribe(Lake(records(10)), 0, 30, has_serials=True)
    message = await anext(subscription)
    assert (message.next_offset, message.serial) == (10, "@10")
    assert (subscription.next_offset, subscription.serial) == (10, "@10")
    subscription.deliver([("3@40", b"x00040")])
    assert await take(subscription, 1) == [40]
    assert client.missed == [Missed("t", 10, 30, "@10", "@30")]


async def test_what_cannot_be_read_is_missed_and_said(caplog: pytest.LogCaptureFixture) -> None:
    client = Client()
    subscription = client.subscribe(Lake(records(10), fails=True), 0, 30)
    subscription.deliver(records(40))
    assert await take(subscription, 2) == [10, 40]
    assert [one[1:3] for one in client.missed] == [(10, 30)]
    assert 'topic "t" cannot be read from the lake: the disk is gone' in caplog.text


async def test_who_stops_waiting_loses_nothing() -> None:
    lake = Lake(records(10), records(20))
    lake.may_go_on.clear()
    subscription = Client().subscribe(lake, 0, 20)
    waiting = asyncio.ensure_future(anext(subscription))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    lake.may_go_on.set()
    assert await take(subscription, 2) == [10, 20]


async def test_several_tasks_share_what_comes() -> None:
    subscription = Client().subscribe(Lake(records(10), records(20), records(30)), 0, 30)
    subscription.deliver(records(40))
    found = await asyncio.gather(*(subscription.batch() for _ in range(4)))
    assert sorted(one.next_offset for batch in found for one in batch) == [10, 20, 30, 40]


async def test_a_subscription_that_ends_waits_for_no_lake() -> None:
    lake = Lake(records(10))
    lake.may_go_on.clear()
    subscription = Client().subscribe(lake, 0, 10)
    waiting = asyncio.ensure_future(subscription.batch())
    await asyncio.sleep(0)
    subscription.end()
    lake.may_go_on.set()
    assert await waiting == []


def test_a_directory_without_a_lake_is_refused(tmp_path) -> None:
    with pytest.raises(ConfigError, match="there is no table in it"):
        open_lake(tmp_path)
    with pytest.raises(ConfigError, match="it does not exist"):
        open_lake(tmp_path / "none")
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(ConfigError, match="holds something else than a lake of Headrace"):
        open_lake(str(tmp_path))
