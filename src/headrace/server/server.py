"""The server process: opens the log, the listeners and the timers, and closes them again in order."""

import asyncio
import contextlib
import gc
import logging
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import uvloop

from headrace.broker.broker import Broker
from headrace.broker.channel.batch_messages import BatchMessages
from headrace.broker.channel.channel import ChannelRule
from headrace.broker.channel.hub import Channels
from headrace.broker.channel.snapshots import NotedSnapshots
from headrace.broker.logux.event_ids import EventIds
from headrace.broker.logux.log import BatchEvents
from headrace.config.protocols import LastState
from headrace.config.settings import Config, old_names
from headrace.config.values import LISTENERS
from headrace.errors import ConfigError, HeadraceError
from headrace.log.apply.process import ApplierProcess
from headrace.log.catalogue.catalogue import Catalogue
from headrace.log.commit import journal
from headrace.log.disk import Disk
from headrace.log.embedded import EmbeddedStore
from headrace.log.layout import Layout
from headrace.log.recovery.recovery import mark_clean, recover
from headrace.log.retention import RetentionSweep
from headrace.log.saved_time import DamagedTimeError, SavedTime, TimeFile, read_time
from headrace.log.store import STAGED_FILE_BYTES_MAX, Clocks
from headrace.model import CHANNEL_PREFIX, LOGUX_PREFIX
from headrace.payload import UPLOAD_CHECKS
from headrace.payload.reducers import reducer
from headrace.picows_adapter import check_can_serve
from headrace.printing import described
from headrace.server import diagnostics
from headrace.server import listeners as notify
from headrace.server.access import Access, load_hook
from headrace.server.audit import OPERATOR, Audit
from headrace.server.channel.connection import ChannelConnection, ChannelConnections
from headrace.server.channel.snapshots import make_postgres
from headrace.server.clock import SteadyClock, is_synchronised
from headrace.server.diagnostics import Health
from headrace.server.handshake import Door, Handshake, Route
from headrace.server.http.api import ServerFacts, make_app
from headrace.server.http.connections import HttpConnections
from headrace.server.http.listener import HttpListener, HttpShared
from headrace.server.http.requests import RequestMemory
from headrace.server.http.streams.streams import Streams
from headrace.server.http.topics import LongPolls
from headrace.server.listeners import address_of, open_listeners
from headrace.server.logux.connection import Logux
from headrace.server.loop import LoopRunner
from headrace.server.metrics.metrics import Metrics
from headrace.server.metrics.readings import Instruments
from headrace.server.metrics.scrape import Scrapes
from headrace.server.peers.admission import Admission
from headrace.server.peers.connections import Connections
from headrace.server.reload import Hangup, LoadConfig, merge
from headrace.server.tls.context import ServerTls
from headrace.server.tls.context import load as load_tls
from headrace.server.tls.transport import MakeProtocol, TlsGate
from headrace.server.topic_connection import FiggConnection, WombatConnection
from headrace.server.trace.tracing import Tracing
from headrace.server.websocket import HeardConnections, WebSocketConnection
from headrace.wire import channel
from headrace.wire.logux import messages as logux
from headrace.wire.wombat import messages as wombat

logger = logging.getLogger(__name__)

_TICK_S = 0.25
_DRAIN_TIMEOUT_S = 30.0
_DRAIN_FULL_TIMEOUT_S = 2.0
"""Time that a stop waits for room on a full disk. Commits that wait for room were never acknowledged."""

_SWITCH_INTERVAL_S = 0.0002
"""Longest time that the loop keeps the interpreter while the commit thread waits to start a write."""

_COLLECT_THRESHOLDS = (20_000, 20, 20)
"""Thresholds for rare collections: batches create many short-lived containers, but no cycles to find."""


def run(config: Config, load: LoadConfig) -> int:
    """Serve until stopped, and return the process's exit code. SIGHUP loads the settings again."""
    diagnostics.set_up(config)
    _raise_file_limit()
    # Before everything is open there is nothing to drain, and recovery can be interrupted at any point.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    hangup = Hangup()
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_serve(config, load, hangup))
    except HeadraceError as error:
        reason = str(error)
    except OSError as error:
        reason = f"cannot use the data directory {config.data_dir}: {error.strerror}"
    print(f"headrace: {reason}", file=sys.stderr)
    return 1


async def _serve(config: Config, load: LoadConfig, hangup: Hangup) -> int:
    check_can_serve()
    server = Server(config, load, hangup)
    await server.start()
    try:
        return await server.stopped
    finally:
        await server.stop()


class Server:
    def __init__(self, config: Config, load: LoadConfig, hangup: Hangup) -> None:
        self._config = config
        self._load = load
        self._hangup = hangup
        self._loop = asyncio.get_running_loop()
        self.stopped: asyncio.Future[int] = self._loop.create_future()
        """Resolved with the exit code when the server has to stop."""
        self._metrics = Metrics()
        self._failure = ""
        self._listeners: list[Admission] = []
        self._manager = notify.ServiceManager(os.environ)

    async def start(self) -> None:
        config = self._config
        root = Path(config.data_dir).absolute()
        layout = self._layout = Layout(root)
        disk = self._disk = Disk()
        layout.make(disk)
        self._lock = layout.lock(disk)
        started_s = time.monotonic()
        self._access = Access(config, layout.tokens, lambda: self._clock.now_ms(), self._metrics)
        tls = self._tls = self._load_tls(config)
        # Open the listeners first: a port that is in use must not cost a recovery.
        sockets = open_listeners(config.listen, os.environ)
        self._access.check_listeners({name: address_of(sock) for name, sock in sockets.items()})
        for sentence in old_names(config):
            logger.warning("%s", sentence)
        boot_id = journal.boot_id()
        opening_s = time.monotonic()
        recovered = recover(layout, disk, config.rule, boot_id=boot_id)
        recovery = {
            "recovery_seconds": time.monotonic() - opening_s,
            "recovery_replayed_records": recovered.replayed_records,
            "recovery_damages": len(recovered.reports),
        }
        for report in recovered.reports:
            logger.error("%s", report)
        for text in recovered.notes:
            logger.info("%s", text)
        logger.info("log opened in %.3f s", time.monotonic() - opening_s)
        self._runner = LoopRunner(self._loop)
        self._applier = ApplierProcess(
            config,
            self._lock,
            applied=lambda path: self._store.applied(path),
            prepared=lambda path: self._store.file_is_free(path),
            waiting=lambda reason: self._store.applier_waits(reason),
            failed=self._fail,
        )
        self._time_file = TimeFile(layout, disk, self._runner)
        saved = _saved_time(layout)
        clock = self._clock = SteadyClock(
            config.clock,
            wall_ms=lambda: time.time_ns() // 1_000_000,
            boot_ms=lambda: time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000,
            is_synchronised=is_synchronised,
            boot_id=boot_id.hex(),
            saved=saved,
            newest_ms=_newest_ms(layout) if saved is None else 0,
        )
        self._store = EmbeddedStore(
            config,
            layout,
            disk,
            self._runner,
            self._applier.apply,
            next_sequence=recovered.next_sequence,
            generation=recovered.generation,
            boot_id=boot_id,
            clocks=Clocks(clock.now_ms, elapsed_s=time.monotonic, wall_s=time.time),
            upload_checks=UPLOAD_CHECKS,
            wait_for_disk=False,
        )
        self._store.on_commit = self._metrics.committed
        self._store.on_flush = self._metrics.flushed
        self._prepare_journal()
        self._broker = Broker(self._store, self._runner, self._fail)
        health = self._health = Health(self._store, clock, self._access)
        connections = self._connections = Connections(
            self._broker, config.limits, self._metrics, health, self._access
        )
        self._tracing = Tracing(
            partial(setattr, connections, "trace"),
            clock.now_ms,
            partial(self._metrics.count, "trace_lines_lost_total"),
        )
        self._wombats = HeardConnections(connections)
        self._logux = Logux(
            connections,
            self._runner,
            EventIds(root),
            config.logux,
            load_hook("logux.verify", config.logux.verify),
            load_hook("logux.filter", config.logux.filter),
            clock.now_ms,
        )
        self._store.batches.take_over(LOGUX_PREFIX, BatchEvents(self._logux.log, self._runner))
        self._postgres = make_postgres(config.channels.snapshots_url, self._store)
        channels = self._channels = Channels(
            self._store,
            self._runner,
            self._postgres or NotedSnapshots(self._store),
            self._channel_rules(),
            clock.now_ms,
            elapsed_ms=clock.elapsed_ms,
            members_max=config.channels.members_max,
            remember_ms=int(config.channels.remember_s * 1000),
            snapshot_age_ms=int(config.channels.snapshot_age_s * 1000),
            count=self._metrics.count,
        )
        clock.went_back = channels.went_back
        self._broker.channels = channels.committed
        connections.readers.moved = channels.readers_moved
        self._store.batches.take_over(CHANNEL_PREFIX, BatchMessages(channels, self._runner))
        self._channel_connections = ChannelConnections(connections, channels, config.channels)
        routes: dict[str, Route] = {
            wombat.PATH: _only(wombat.PATH, partial(WombatConnection, self._wombats)),
            channel.PATH: _only(
                channel.PATH, partial(ChannelConnection, self._channel_connections)
            ),
            f"{logux.PATH}/LOG": self._logux.route,
        }
        door = self._door = Door(connections, routes, config.listen.origins)
        connections.listeners = {name: str(address_of(sock)) for name, sock in sockets.items()}
        protocols: dict[str, MakeProtocol] = {
            "figg": partial(FiggConnection, connections),
            "ws": partial(Handshake, door),
        }
        gate = self._gate = (
            TlsGate(tls.context, connections.newcomers("handshakes_max"), connections.refused)
            if tls is not None
            else None
        )
        for name, make in protocols.items():
            has_tls = config.listen.tls.covers(name)
            factory = gate.wrap(make) if gate is not None and has_tls else make
            admission = Admission(
                self._loop, sockets[name], factory, lambda: connections.limits.admitted_max
            )
            self._listeners.append(admission)
            if name == "ws":
                door.admission = admission
        self._waiting = LongPolls(self._store)
        requests = self._requests = RequestMemory(config.limits.requests_bytes_max)
        instruments = Instruments(
            connections,
            self._store,
            clock,
            requests,
            recovery,
            http_connections=lambda: self._http.connection_count,
            traces=lambda: self._tracing.count,
            certificate_expiry=self._certificate_expiry,
        )
        scrapes = Scrapes(self._metrics, instruments, lambda: self._applier.pid)
        audit = self._audit = Audit(self._store, clock.now_ms)
        streams = self._streams = Streams(
            self._store,
            self._broker,
            lambda name: self._config.rule(name),
            clock.now_ms,
            clock.elapsed_ms,
        )
        channels.other_due = streams.due
        self._access.on_change = lambda action, token: audit.record(action, OPERATOR, token=token)
        app = make_app(
            connections,
            self._store,
            layout,
            self._waiting,
            channels,
            clock,
            ServerFacts(started_s, connections.listeners, str(root), config=lambda: self._config),
            self._access,
            audit,
            scrapes,
            self._tracing,
            streams,
        )
        shared = HttpShared(
            connections=HttpConnections(
                connections.http,
                lambda: connections.limits.admitted_max,
                connections.refused,
                connections.http_newcomers,
            ),
            body_bytes_max=STAGED_FILE_BYTES_MAX,
            memory=requests,
            refused=connections.request_refused,
        )
        self._http = HttpListener(
            app, shared, sockets["http"], gate if config.listen.tls.covers("http") else None
        )
        await self._http.start()
        self._retention = RetentionSweep(
            config, layout, self._store, self._runner, self._metrics.count
        )
        self._timer = self._loop.create_task(self._tick())
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._stop, number)
        self._loop.add_signal_handler(signal.SIGHUP, self._hung_up)
        if self._hangup.is_end_of_terminal:
            self._hung_up()  # SIGHUP was ignored when the terminal closed
        # Objects from the start stay alive, so the collector need not examine them again and again.
        gc.collect()
        gc.freeze()
        gc.set_threshold(*_COLLECT_THRESHOLDS)
        health.unready = ""
        addresses = " ".join(f"{name}={at}" for name, at in connections.listeners.items())
        print(f"headrace ready {addresses} data={root}", flush=True)
        self._manager.tell(notify.READY)

    def _load_tls(self, config: Config) -> ServerTls | None:
        """Return the certificate of listeners with TLS; None without TLS. Raises `ConfigError`."""
        if not config.listen.tls.cert:
            return None
        loaded = load_tls(config.listen.tls, time.time())
        for sentence in loaded.warnings:
            logger.warning("%s", sentence)
        return loaded

    def _reload_tls(self) -> None:
        """Use the certificate in the files from now on. A bad one changes nothing."""
        if self._gate is not None:
            try:
                found = self._load_tls(self._config)
            except ConfigError as error:
                logger.error("SIGHUP: the certificate in use stays: %s", error)
            else:
                assert found is not None, "TLS is not turned off while the server runs"
                self._tls, self._gate.context = found, found.context

    def _certificate_expiry(self) -> dict[str, float]:
        """Return the time when the certificate of each listener with TLS expires, in seconds since 1970."""
        covers = self._config.listen.tls.covers
        return (
            {}
            if self._tls is None
            else dict.fromkeys(filter(covers, LISTENERS), self._tls.expires_s)
        )

    def _channel_rules(self) -> Callable[[str], ChannelRule]:
        """Return a function of a channel's name. Raises `ConfigError` for a reducer that cannot be loaded."""
        config = self._config
        named = {config.channels.reducer: "channels.reducer"}
        named |= {rule.reducer: "topics.reducer" for rule in config.topics if rule.reducer}
        reducers = {name: reducer(name, partial(load_hook, key)) for name, key in named.items()}
        rules: dict[ChannelRule, ChannelRule] = {}

        def rule_of(channel: str) -> ChannelRule:
            found = self._config.rule(CHANNEL_PREFIX + channel)
            rule = ChannelRule(
                reducers[found.reducer],
                int(found.lease_s * 1000),
                int(found.grace_s * 1000),
                int(config.channels.presence_s * 1000),
                tuple(found.retention_wait_for),
                found.last_state is LastState.KEPT,
            )
            return rules.setdefault(
                rule, rule
            )  # many channels have the same settings, and share them

        return rule_of

    async def stop(self) -> None:
        """Stop accepting, finish and acknowledge accepted publishes, apply all commits, close everything."""
        self._manager.tell(notify.STOPPING)
        failure = self._failure
        self._health.unready = (
            f"failed: {failure}" if failure else "draining: the server is stopping"
        )
        self._timer.cancel()
        for listener in self._listeners:
            listener.close()
        failed = self.stopped.done() and self.stopped.result() != 0
        self._waiting.close()
        self._tracing.close()
        self._connections.drain()
        self._streams.close()
        self._store.batches.stop()
        if self._postgres is not None:
            await self._postgres.close()  # its answers may change the store, which settles below
        if not failed:
            failed = not await self._drain()
        await self._connections.close()
        await self._http.stop()
        self._applier.close()
        self._runner.close()
        with contextlib.suppress(OSError):
            self._time_file.write(self._clock.state)
        self._logux.close()
        self._store.close()
        if not failed:
            mark_clean(self._layout, self._disk)
        with contextlib.suppress(OSError):
            os.close(self._lock)

    async def _drain(self) -> bool:
        """Write and apply everything. Return False if that is not possible in time."""
        settled = asyncio.Event()
        self._store.settle(settled.set)
        started_s = time.monotonic()
        while not settled.is_set():
            full = self._store.is_full
            timeout_s = _DRAIN_FULL_TIMEOUT_S if full else _DRAIN_TIMEOUT_S
            if time.monotonic() - started_s > timeout_s:
                logger.warning(
                    "stopping while the disk is full: the journal keeps acknowledged records, others are lost"
                    if full
                    else "stopping before all commits are applied: the journal keeps them for the next start"
                )
                return False
            self._store.write_again()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(settled.wait(), _TICK_S)
        return True

    def _stop(self, number: int) -> None:
        logger.info("%s: stopping", signal.Signals(number).name)
        if not self.stopped.done():
            self.stopped.set_result(0)

    def _hung_up(self) -> None:
        if not self._hangup.is_end_of_terminal:
            self._reload()
        elif self._hangup.stops:
            self._stop(signal.SIGHUP)

    def _reload(self) -> None:
        """Read the settings again and apply those that may change at runtime. A bad file changes nothing."""
        if self.stopped.done():
            return
        self._manager.tell(notify.reloading())
        try:
            found = merge(self._config, self._load())
        except ConfigError as error:
            logger.error("SIGHUP: no setting was changed: %s", error)
        else:
            self._audit.record("settings.reload", OPERATOR, changed=found.changed)
            self._apply(found.config)
            self._reload_tls()
            logger.info("SIGHUP: changed: %s", ", ".join(found.changed) or "nothing")
            if found.waiting:
                logger.warning(
                    "SIGHUP: these settings keep their values until a restart: %s",
                    ", ".join(found.waiting),
                )
        self._manager.tell(notify.READY)

    def _apply(self, config: Config) -> None:
        self._config = config
        diagnostics.set_level(config)
        self._access.reload(config)
        self._door.origins = config.listen.origins
        self._connections.configure(config.limits)
        self._requests.bytes_max = config.limits.requests_bytes_max
        self._store.reload(config)
        self._retention.reload(config)
        self._channels.reload()

    def _fail(self, reason: str) -> None:
        logger.critical("stopping: %s", reason)
        self._failure = reason
        if not self.stopped.done():
            self.stopped.set_result(1)

    def _prepare_journal(self) -> None:
        """Pass ready journal files to the store. The applier creates the others, and waits for room."""
        size = self._config.journal.file_bytes
        for number in range(self._config.journal.files):
            path = self._layout.journal_file(number)
            if path.exists() and path.stat().st_size == size:
                self._store.file_is_free(path)
            else:
                self._applier.prepare(path)

    async def _tick(self) -> None:
        """Run all periodic work. None of it is done per topic."""
        synced_s = time.monotonic()
        try:
            while True:
                await asyncio.sleep(_TICK_S)
                now_s = time.monotonic()
                self._clock.tick()
                self._metrics.fold()
                self._time_file.save(self._clock.state)
                self._store.tick(now_s)
                self._access.tick(self._loop.time(), self._runner)
                self._connections.tick()
                self._connections.readers.tick(self._loop.time())
                self._wombats.tick(self._loop.time())
                self._logux.tick(self._loop.time())
                self._channels.tick()
                self._channel_connections.tick(self._loop.time())
                self._retention.tick(self._clock.now_ms(), now_s)
                if now_s - synced_s >= self._config.journal.fsync_s:
                    synced_s = now_s
                    self._store.sync_written()
        except Exception as error:
            self._fail(f"internal error in the periodic work: {described(error)}")


def _saved_time(layout: Layout) -> SavedTime | None:
    """Return the time that the last server saved; None without a sound file."""
    try:
        return read_time(layout)
    except DamagedTimeError as error:
        logger.error("%s; the server's time continues from the newest record", error)
        return None


def _newest_ms(layout: Layout) -> int:
    with contextlib.closing(Catalogue.open_for_reading(layout.root)) as catalogue:
        return catalogue.newest_ms()


def _only(path: str, make: Callable[[], WebSocketConnection]) -> Route:
    """Return the route of a single path."""
    return lambda asked: make if asked == path else None


def _raise_file_limit() -> None:
    """Raise the limit of open files, and so of connections, from a login shell's to the system's."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
