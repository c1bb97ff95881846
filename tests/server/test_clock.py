"""The server's clock: it follows corrections of the wall clock, and jumps only when they are confirmed."""

import pytest

from headrace.config.settings import ClockSettings, Retention
from headrace.log.retention import RetentionSweep as Retainer
from headrace.server.clock import HOUR_MS, SteadyClock, is_synchronised
from tests.broker.channel.test_channel import Client
from tests.broker.channel.world import LEASE_MS, World
from tests.fakes.store import StepStore
from tests.log.conftest import tiny

MINUTE_MS = 60_000
DAY_MS = 24 * HOUR_MS
YEAR_MS = 365 * DAY_MS
START_MS = 1_700_000_000_000


def test_a_process_that_is_interrupted_between_two_clocks_reads_them_again():
    """The time of a busy server went ahead of the wall clock for a moment."""
    machine = Machine()
    interruptions = [0, 700, 0, 0]

    def wall_ms() -> int:
        machine.boot_ms += (by_ms := interruptions.pop(0))
        machine.wall_ms += by_ms
        return machine.wall_ms

    clock = SteadyClock(
        ClockSettings(),
        wall_ms=wall_ms,
        boot_ms=lambda: machine.boot_ms,
        is_synchronised=lambda: False,
        boot_id="first",
        saved=None,
        newest_ms=0,
    )
    clock.tick()
    assert clock.now_ms() == machine.wall_ms
    assert interruptions == []


class Machine:
    """A machine whose wall clock a test sets. `server` is the clock of the server on that machine."""

    def __init__(self) -> None:
        self.wall_ms = START_MS
        self.boot_ms = 5 * DAY_MS
        self.boot_id = "first"
        self.is_synchronised = False
        self.saved = None
        self.newest_ms = 0
        self.start_server()

    def start_server(self) -> SteadyClock:
        self.server = SteadyClock(
            ClockSettings(),
            wall_ms=lambda: self.wall_ms,
            boot_ms=lambda: self.boot_ms,
            is_synchronised=lambda: self.is_synchronised,
            boot_id=self.boot_id,
            saved=self.saved,
            newest_ms=self.newest_ms,
        )
        return self.server

    def stop_server(self) -> None:
        self.saved = self.server.state

    def wait(self, ms: int) -> None:
        self.boot_ms += ms
        self.wall_ms += ms
        self.server.tick()

    def set_clock(self, by_ms: int) -> None:
        self.wall_ms += by_ms
        self.server.tick()

    def reboot(self, off_ms: int) -> None:
        """Stop the server, change the wall clock by `off_ms` while the machine is off, and start again."""
        self.stop_server()
        self.is_synchronised = False
        self.boot_id += "x"
        self.boot_ms = MINUTE_MS
        self.wall_ms += off_ms
        self.start_server()


@pytest.fixture
def machine() -> Machine:
    return Machine()


def test_time_passes_as_on_the_wall(machine):
    for _ in range(100):
        machine.wait(HOUR_MS)
        assert machine.server.now_ms() == machine.wall_ms
    assert machine.server.trouble == ""


@pytest.mark.parametrize("by_ms", [-59_000, -3, 250, 59_000])
def test_small_corrections_are_followed(machine, by_ms):
    machine.set_clock(by_ms)
    assert machine.server.now_ms() == machine.wall_ms
    assert machine.server.ahead_ms == 0


@pytest.mark.parametrize(
    "by_ms", [-3 * YEAR_MS, -3 * DAY_MS, -HOUR_MS, HOUR_MS, 3 * DAY_MS, YEAR_MS]
)
def test_a_jump_is_held_until_it_has_stood_for_a_day(machine, by_ms, caplog):
    expected_ms = machine.wall_ms
    machine.set_clock(by_ms)
    for _ in range(23):
        machine.wait(HOUR_MS)
        expected_ms += HOUR_MS
        assert machine.server.now_ms() == expected_ms
        assert machine.server.ahead_ms == by_ms
        assert ("ahead" if by_ms > 0 else "behind") in machine.server.trouble
    machine.wait(HOUR_MS)
    assert machine.server.now_ms() == machine.wall_ms
    assert machine.server.trouble == ""
    assert [one.message.split(":")[0][:20] for one in caplog.records] == [
        "the wall clock jumpe",
        "the jump of the wall",
    ]


@pytest.mark.parametrize("by_ms", [-3 * DAY_MS, 3 * DAY_MS])
def test_an_operator_confirms_a_jump_at_once(machine, by_ms):
    machine.set_clock(by_ms)
    assert machine.server.confirm() == by_ms
    assert machine.server.now_ms() == machine.wall_ms
    assert machine.server.confirm() == 0


def test_a_wall_clock_that_is_put_right_leaves_nothing(machine):
    before_ms = machine.wall_ms
    machine.set_clock(30 * DAY_MS)
    machine.wait(23 * HOUR_MS)
    machine.set_clock(-30 * DAY_MS)
    assert machine.server.trouble == ""
    assert machine.server.now_ms() == machine.wall_ms == before_ms + 23 * HOUR_MS


def test_each_jump_has_to_stand_for_itself(machine):
    before_ms = machine.wall_ms
    machine.set_clock(DAY_MS)
    machine.wait(23 * HOUR_MS)
    machine.set_clock(DAY_MS)
    machine.wait(23 * HOUR_MS)
    assert machine.server.now_ms() == before_ms + 46 * HOUR_MS
    machine.wait(2 * HOUR_MS)
    assert machine.server.now_ms() == machine.wall_ms


def test_nobody_sees_the_wall_clock_between_two_looks_at_it(machine):
    before_ms = machine.server.now_ms()
    machine.wall_ms += YEAR_MS
    assert machine.server.now_ms() == before_ms


def test_a_restart_of_the_server_is_no_jump_and_confirms_none(machine, caplog):
    expected_ms = machine.wall_ms
    machine.set_clock(3 * DAY_MS)
    machine.wait(20 * HOUR_MS)
    machine.stop_server()
    machine.boot_ms += HOUR_MS
    machine.wall_ms += HOUR_MS
    machine.start_server()
    assert machine.server.now_ms() == expected_ms + 21 * HOUR_MS
    assert machine.server.ahead_ms == 3 * DAY_MS
    assert len(caplog.records) == 2, "each server says so once"
    machine.wait(3 * HOUR_MS)
    assert machine.server.now_ms() == machine.wall_ms, "it has stood for a day, over both servers"


def test_a_clock_that_was_set_while_no_server_ran_has_jumped(machine):
    expected_ms = machine.wall_ms
    machine.stop_server()
    machine.wall_ms += 3 * DAY_MS
    machine.start_server()
    assert machine.server.now_ms() == expected_ms
    assert machine.server.ahead_ms == 3 * DAY_MS


# Small steps that add up


def test_small_steps_that_add_up_to_more_in_an_hour_are_a_jump(machine):
    expected_ms = machine.wall_ms
    for step in range(1000):
        machine.wait(1000)
        machine.set_clock(59_000)
        expected_ms += 1000
        assert machine.server.now_ms() <= expected_ms + MINUTE_MS, step
        assert bool(machine.server.trouble) == (step > 0)
    machine.wait(HOUR_MS)
    assert machine.server.ahead_ms >= 998 * 59_000, "no later hour forgets the jump"


def test_a_jump_that_grows_in_small_steps_has_not_stood_for_a_day(machine):
    machine.set_clock(DAY_MS)
    for _ in range(48):
        machine.wait(HOUR_MS)
        machine.set_clock(50_000)
    assert machine.server.trouble


def test_a_clock_that_gains_a_little_every_hour_is_followed(machine):
    for _ in range(100):
        machine.wait(HOUR_MS)
        machine.set_clock(-20_000)
        assert machine.server.now_ms() == machine.wall_ms
    assert machine.server.trouble == ""


def test_a_clock_that_swings_is_followed(machine):
    for _ in range(100):
        machine.set_clock(50_000)
        machine.set_clock(-50_000)
    assert machine.server.now_ms() == machine.wall_ms
    assert machine.server.trouble == ""


def test_a_restart_begins_no_new_hour(machine):
    last_ms = machine.wall_ms
    for _ in range(20):
        machine.stop_server()
        machine.wall_ms += 59_000
        machine.start_server()
    assert machine.server.now_ms() == last_ms + 59_000
    assert machine.server.trouble


# After a reboot


def test_after_a_short_reboot_time_goes_on(machine):
    machine.reboot(MINUTE_MS)
    assert machine.server.now_ms() == machine.wall_ms
    assert machine.server.trouble == ""


@pytest.mark.parametrize("off_ms", [2 * MINUTE_MS, 8 * DAY_MS, 30 * DAY_MS])
def test_time_off_counts_once_the_clock_is_synchronised(machine, off_ms):
    last_ms = machine.wall_ms
    machine.reboot(off_ms)
    assert machine.server.now_ms() == last_ms
    assert machine.server.ahead_ms == off_ms
    assert "last saved time" in machine.server.trouble
    machine.wait(5000)
    assert machine.server.now_ms() == last_ms + 5000
    machine.is_synchronised = True
    machine.wait(1000)
    assert machine.server.now_ms() == machine.wall_ms
    assert machine.server.trouble == ""
    machine.set_clock(8 * HOUR_MS)
    assert machine.server.ahead_ms == 8 * HOUR_MS, "later it is a jump"


def test_a_clock_that_is_synchronised_before_the_server_starts_is_followed_at_once(machine):
    machine.stop_server()
    machine.boot_id, machine.boot_ms, machine.is_synchronised = "second", MINUTE_MS, True
    machine.wall_ms += 8 * DAY_MS
    machine.start_server()
    assert machine.server.now_ms() == machine.wall_ms


@pytest.mark.parametrize("confirms", [True, False])
def test_without_ntp_time_off_counts_after_a_day_or_by_an_operators_word(machine, confirms):
    last_ms = machine.wall_ms
    machine.reboot(8 * DAY_MS)
    machine.wait(23 * HOUR_MS)
    assert machine.server.now_ms() == last_ms + 23 * HOUR_MS
    if confirms:
        assert machine.server.confirm() == 8 * DAY_MS
    else:
        machine.wait(HOUR_MS)
    assert machine.server.now_ms() == machine.wall_ms


def test_a_restart_after_a_reboot_does_not_count_the_time_off(machine):
    last_ms = machine.wall_ms
    machine.reboot(8 * DAY_MS)
    machine.stop_server()
    machine.start_server()
    assert machine.server.now_ms() == last_ms
    machine.is_synchronised = True
    machine.wait(1000)
    assert machine.server.now_ms() == machine.wall_ms


@pytest.mark.parametrize("synchronised", [False, True])
def test_a_clock_that_is_years_ahead_after_a_reboot_is_not_believed(machine, synchronised):
    last_ms = machine.wall_ms
    machine.reboot(5 * YEAR_MS)
    machine.is_synchronised = synchronised
    machine.wait(HOUR_MS)
    assert machine.server.now_ms() == last_ms + HOUR_MS
    assert machine.server.ahead_ms == 5 * YEAR_MS
    machine.wait(DAY_MS)
    assert machine.server.now_ms() == machine.wall_ms


def test_after_a_reboot_time_goes_on_until_the_network_sets_the_clock(machine):
    last_ms = machine.wall_ms
    machine.reboot(-40 * YEAR_MS)  # a machine without a clock battery
    assert machine.server.now_ms() == last_ms
    machine.wait(MINUTE_MS)
    machine.set_clock(40 * YEAR_MS + 8 * HOUR_MS)
    machine.is_synchronised = True
    machine.wait(1000)
    assert machine.server.now_ms() == machine.wall_ms == last_ms + 8 * HOUR_MS + MINUTE_MS + 1000
    machine.set_clock(8 * HOUR_MS)
    assert machine.server.ahead_ms == 8 * HOUR_MS, "later it is a jump"


def test_a_day_after_a_reboot_no_synchronised_clock_may_jump(machine):
    machine.reboot(0)
    machine.wait(DAY_MS)
    machine.is_synchronised = True
    machine.set_clock(8 * DAY_MS)
    assert machine.server.ahead_ms == 8 * DAY_MS


@pytest.mark.parametrize("age_ms", [8 * DAY_MS, 5 * YEAR_MS])
def test_without_a_saved_time_time_continues_from_the_newest_record(machine, age_ms):
    machine.newest_ms = machine.wall_ms - age_ms
    machine.start_server()
    assert machine.server.now_ms() == machine.newest_ms
    machine.is_synchronised = True
    machine.wait(1000)
    assert (machine.server.now_ms() == machine.wall_ms) == (age_ms < YEAR_MS)


def test_a_record_from_the_future_moves_no_clock(machine):
    machine.newest_ms = machine.wall_ms + YEAR_MS
    machine.start_server()
    assert machine.server.now_ms() == machine.wall_ms
    assert machine.server.trouble == ""


def test_the_kernel_says_whether_the_clock_is_synchronised():
    assert is_synchronised() in (False, True)


def test_a_step_back_that_is_followed_is_told(machine):
    told = []
    machine.server.went_back = lambda: told.append(machine.server.now_ms())
    machine.set_clock(-10_000)
    machine.set_clock(3 * DAY_MS)
    machine.server.confirm()
    assert told == []
    machine.set_clock(-3 * DAY_MS)
    machine.server.confirm()
    assert told == [machine.wall_ms]


# Retention with this clock


@pytest.mark.parametrize("by_ms", [-30 * DAY_MS, 30 * DAY_MS])
def test_nothing_is_deleted_on_the_word_of_a_clock_that_jumped(machine, tmp_path, by_ms):
    config = tiny(tmp_path / "data", retention=Retention(age_s=7 * 86_400.0, check_s=60))
    store = StepStore(config, clock=machine.server.now_ms)
    retention = Retainer(config, store.layout, store.store, store.runner)

    def check_for(ms: int) -> None:
        for _ in range(ms // HOUR_MS):
            machine.wait(HOUR_MS)
            retention.tick(machine.server.now_ms(), machine.server.elapsed_ms() / 1000)
            store.runner.run()

    try:
        store.append("old", b"old")
        store.rotate()
        check_for(HOUR_MS)
        machine.set_clock(by_ms)
        store.append("new", b"new")
        store.rotate()
        check_for(23 * HOUR_MS)
        assert store.payloads("old") == [b"old"]
        assert store.payloads("new") == [b"new"], "its time is not that of the wall clock"
        machine.server.confirm()
        check_for(2 * HOUR_MS)
        assert store.payloads("old") == ([] if by_ms > 0 else [b"old"])
    finally:
        store.crash()


@pytest.mark.parametrize("off_ms", [20 * DAY_MS, 5 * YEAR_MS])
def test_nothing_is_deleted_on_the_word_of_a_battery_clock(machine, tmp_path, off_ms):
    config = tiny(tmp_path / "data", retention=Retention(age_s=7 * 86_400.0, check_s=60))
    store = StepStore(config, clock=lambda: machine.server.now_ms())
    retention = Retainer(config, store.layout, store.store, store.runner)

    def check_for(ms: int) -> None:
        for _ in range(ms // HOUR_MS):
            machine.wait(HOUR_MS)
            retention.tick(machine.server.now_ms(), machine.server.elapsed_ms() / 1000)
            store.runner.run()

    try:
        store.append("old", b"old")
        store.rotate()
        check_for(HOUR_MS)
        machine.reboot(off_ms)
        retention = Retainer(config, store.layout, store.store, store.runner)
        check_for(23 * HOUR_MS)
        assert store.payloads("old") == [b"old"]
        machine.server.confirm()
        check_for(2 * HOUR_MS)
        assert store.payloads("old") == []
    finally:
        store.crash()


@pytest.mark.parametrize("off_ms", [20 * DAY_MS, 5 * YEAR_MS])
def test_no_lease_ends_on_the_word_of_a_battery_clock(machine, off_ms):
    world = World()
    world.clock_ms = machine.server.now_ms()
    world.crash()
    a, b = Client(world, "a"), Client(world, "b")
    a.send("x")
    a.ack_all()
    b.close()
    world.commit_all()
    machine.reboot(off_ms)
    world.clock_ms = machine.server.now_ms()
    world.crash()
    Client(world, "a")
    world.pass_time(LEASE_MS // 2)
    world.settle_broker()
    assert world.disk.start.offset < world.disk.end.offset, "the log is held for the lease"
    machine.wait(LEASE_MS // 2)
    machine.server.confirm()
    world.clock_ms = machine.server.now_ms()
    world.pass_time(10)
    world.settle_broker()
    assert world.disk.start == world.disk.end
