"""`headrace doctor`: looks at this machine before a server runs on it, and says what to change.

Elsewhere: damage in a data directory (`verify`), and how a running server is (`status`).
"""

import ctypes
import os
import resource
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

import typer

from headrace.cli.common import options
from headrace.cli.common.output import print_json
from headrace.cli.token import damage_of
from headrace.config.settings import Config, Listen
from headrace.config.values import LISTENERS, Address
from headrace.errors import ConfigError, ListenError
from headrace.log.disk import Disk
from headrace.log.layout import TOKENS_NAME
from headrace.printing import counted, one_line, size
from headrace.server.access import Access
from headrace.server.jwt import KEY_FILE, load_jwt
from headrace.server.metrics.metrics import Metrics
from headrace.server.tls.context import load as load_tls

FLUSHES = 40
"""Number of small synchronous writes whose durations are compared."""
FLUSH_LEAST_S = 20e-6
"""Median duration of a flush below which it cannot have reached a device."""
FLUSH_SLOW_S = 0.02
"""Median duration of a flush above which small commits are slow."""
FREE_LEAST = 1 << 30
"""Free bytes beside the journal below which a disk is soon full."""
OTHER_FILES = 256
"""Files of a server that belong neither to connections nor to segments."""

MEMORY_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs", "devtmpfs"})
REMOTE_FILE_SYSTEMS = frozenset({"nfs", "nfs4", "cifs", "smb3", "9p", "fuse.sshfs", "ceph"})

_UNSYNCHRONISED = 0x40
"""STA_UNSYNC of adjtimex(2)."""
_STATUS_OFFSET = 40
"""Place of the status in `struct timex` on 64-bit machines."""
_YEAR_LEAST = 1_735_689_600
"""Start of 2025: an earlier clock is certainly wrong."""


class Level(StrEnum):
    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


class Finding(NamedTuple):
    level: Level
    subject: str
    text: str


def doctor(settings: options.SettingsFlags, as_json: options.Json = False) -> None:
    """Look at this machine before a server runs on it, and say what to change.

    Checks the settings, the data directory and its disk, whether a flush really reaches the disk, free space,
    the limit of open files, the clock, the addresses to listen on and who may use them, the certificate, and
    Java for Spark. Writes a few small files to the data directory and deletes them. Exit code 1 if something
    would stop the server or lose data; warnings alone do not count.

    \b
    headrace doctor
    headrace doctor --config /etc/headrace.toml --json
    """
    config = settings.load().config
    findings = list(examine(config))
    problems = sum(one.level is Level.PROBLEM for one in findings)
    warnings = sum(one.level is Level.WARNING for one in findings)
    if as_json:
        print_json(
            {
                "problems": problems,
                "warnings": warnings,
                "findings": [one._asdict() for one in findings],
            }
        )
    else:
        for one in findings:
            typer.echo(f"{one.level:<8} {one.subject}: {one_line(one.text)}")
        typer.echo(f"{counted(problems, 'problem')}, {counted(warnings, 'warning')}")
    raise typer.Exit(1 if problems else 0)


def examine(config: Config) -> Iterator[Finding]:
    """Yield what every check finds. A check that fails is a warning, and the others still run."""
    yield Finding(Level.OK, "settings", "they are valid")
    directory = _existing(config.data_dir)
    checks: list[tuple[str, Callable[[], Finding | None]]] = [
        ("data directory", lambda: _data_directory(config.data_dir, directory)),
        ("file system", lambda: judge_file_system(_file_system(directory))),
        ("disk flush", lambda: judge_flush(_flush_s(directory))),
        ("free space", lambda: _free_space(config, directory)),
        ("open files", lambda: _open_files(config)),
        ("clock", lambda: judge_clock(time.time(), synchronised=_is_synchronised())),
        *((f"listen.{name}", _address_check(config.listen, name)) for name in LISTENERS),
        *([(KEY_FILE, lambda: _jwt_keys(config))] if config.access.jwt.key_file else []),
        ("access", lambda: _access(config)),
        *([("TLS", lambda: _certificate(config))] if config.listen.tls.cert else []),
        ("Java", _java),
    ]
    for subject, check in checks:
        try:
            if (found := check()) is not None:
                yield found
        except OSError as error:
            yield Finding(
                Level.WARNING, subject, f"this could not be checked: {error.strerror or error}"
            )


def _existing(path: Path) -> Path:
    """Return the path, or the nearest directory above it that exists."""
    path = path.absolute()
    return next(one for one in (path, *path.parents) if one.exists())


def _jwt_keys(config: Config) -> Finding:
    try:
        load_jwt(config.access.jwt)
    except ConfigError as error:
        return Finding(Level.PROBLEM, KEY_FILE, str(error).removeprefix(f"{KEY_FILE}: "))
    return Finding(Level.OK, KEY_FILE, f"{config.access.jwt.key_file} holds keys for tokens")


def _access(config: Config) -> Finding | None:
    """Return who may do what; None if a wrong file of keys, which has its own check, leaves that open."""
    if damage := damage_of(config.data_dir):
        return Finding(Level.PROBLEM, "access", damage)
    file = config.data_dir / TOKENS_NAME
    try:
        access = Access(config, file, lambda: time.time_ns() // 1_000_000, Metrics())
        if access.is_on:
            return Finding(Level.OK, "access", "clients may do what their grants allow")
        if config.listen.insecure_open:
            return Finding(
                Level.WARNING,
                "access",
                "everyone who reaches the server may do everything (listen.insecure_open): make a token "
                "with `headrace token create` instead",
            )
        access.check_listeners({name: getattr(config.listen, name) for name in LISTENERS})
    except (ConfigError, ListenError) as error:
        if str(error).startswith(KEY_FILE):
            return None
        return Finding(Level.PROBLEM, "access", str(error))
    return Finding(Level.OK, "access", "everyone on this machine may do everything")


def _certificate(config: Config) -> Finding:
    try:
        warnings = load_tls(config.listen.tls, time.time()).warnings
    except ConfigError as error:
        return Finding(Level.PROBLEM, "TLS", str(error))
    if warnings:
        return Finding(Level.WARNING, "TLS", "; ".join(warnings))
    return Finding(Level.OK, "TLS", f"{config.listen.tls.cert} is valid")


# The disk


def _data_directory(wanted: Path, found: Path) -> Finding:
    subject = "data directory"
    if not found.is_dir():
        return Finding(
            Level.PROBLEM, subject, f"{found} is not a directory: choose another with --data-dir"
        )
    if not os.access(found, os.W_OK | os.X_OK):
        return Finding(
            Level.PROBLEM,
            subject,
            f"this user may not write to {found}: change its owner, or run the server as another user",
        )
    if found != wanted.absolute():
        return Finding(
            Level.OK, subject, f"{wanted} does not exist yet; the server creates it in {found}"
        )
    if found.stat().st_mode & 0o007:
        return Finding(
            Level.WARNING,
            subject,
            f"every user of this machine may enter {found}: chmod o-rwx {found}",
        )
    return Finding(Level.OK, subject, f"{found} can be written to")


def _file_system(directory: Path) -> str:
    """Return the type of the file system that holds a directory; "" if it is unknown."""
    best, kind = "", ""
    for line in Path("/proc/self/mounts").read_text("utf-8", "surrogateescape").splitlines():
        _device, place, its_kind = line.split(" ")[:3]
        place = place.replace("\\040", " ")
        if len(place) >= len(best) and directory.is_relative_to(place):
            best, kind = place, its_kind
    return kind


def judge_file_system(kind: str) -> Finding:
    subject = "file system"
    if kind in MEMORY_FILE_SYSTEMS:
        return Finding(
            Level.PROBLEM,
            subject,
            f"{kind} is memory: a reboot loses every record. Choose a directory on a disk",
        )
    if kind in REMOTE_FILE_SYSTEMS:
        return Finding(
            Level.WARNING,
            subject,
            f"{kind} is on another machine: its locks and flushes may not hold. Choose a local disk",
        )
    return Finding(Level.OK, subject, kind or "unknown")


def _flush_s(directory: Path) -> float:
    """Return the median duration of small synchronous writes, as the journal makes them."""
    disk, taken = Disk(), []
    with tempfile.TemporaryDirectory(prefix=".doctor-", dir=directory) as place:
        with disk.opened(Path(place, "flush"), create=True, sync=True) as fd:
            disk.write(fd, [bytes(FLUSHES * 4096)], 0)
        with disk.opened(Path(place, "flush")) as fd:
            for number in range(FLUSHES):
                start_s = time.perf_counter()
                disk.write(fd, [os.urandom(512)], number * 4096, synced=True)
                taken.append(time.perf_counter() - start_s)
    return statistics.median(taken)


def judge_flush(median_s: float) -> Finding:
    subject, took = "disk flush", f"a flush of 512 bytes takes {_duration(median_s)}"
    if median_s < FLUSH_LEAST_S:
        return Finding(
            Level.PROBLEM,
            subject,
            f"{took}: no device is so fast, so a power failure would lose acknowledged records. Look for a "
            "disk in memory, `nobarrier`, eatmydata, or a virtual disk with cache=unsafe",
        )
    if median_s > FLUSH_SLOW_S:
        return Finding(
            Level.WARNING,
            subject,
            f"{took}: a publisher that waits for each acknowledgement sends "
            f"{max(1, round(1 / median_s))} messages a second at most. Use a faster disk, or `durability = "
            '"written"` where a power failure may lose a second',
        )
    return Finding(Level.OK, subject, took)


def _duration(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} µs" if seconds < 1e-3 else f"{seconds * 1e3:.1f} ms"


def _free_space(config: Config, directory: Path) -> Finding:
    found = os.statvfs(directory)
    free = found.f_bavail * found.f_frsize
    wanted = config.journal.files * config.journal.file_bytes
    present = sum(path.stat().st_size for path in (config.data_dir / "journal").glob("*"))
    return judge_space(free, max(0, wanted - present))


def judge_space(free: int, journal_needs: int) -> Finding:
    subject = "free space"
    if free < journal_needs:
        return Finding(
            Level.PROBLEM,
            subject,
            f"{size(free)} are free, and the journal needs {size(journal_needs)} more: free some, or set "
            "journal.files or journal.file_bytes lower",
        )
    if free < journal_needs + FREE_LEAST:
        return Finding(
            Level.WARNING,
            subject,
            f"{size(free)} are free: publishers will soon wait for room. Set retention.bytes or "
            "retention.age_s, or use a larger disk",
        )
    return Finding(Level.OK, subject, f"{size(free)} are free")


# The process and the machine


def _open_files(config: Config) -> Finding:
    # Connections of HTTP are counted apart, with the same limit.
    wanted = 2 * config.limits.connections_max + config.segment.open_files_max + OTHER_FILES
    return judge_files(resource.getrlimit(resource.RLIMIT_NOFILE)[1], wanted)


def judge_files(hard_limit: int, wanted: int) -> Finding:
    subject = "open files"
    if hard_limit != resource.RLIM_INFINITY and hard_limit < wanted:
        return Finding(
            Level.WARNING,
            subject,
            f"this user may open {hard_limit:,} files, and limits.connections_max twice (HTTP) with "
            f"segment.open_files_max may need {wanted:,}: set LimitNOFILE={wanted} (systemd), "
            f"--ulimit nofile={wanted} (Docker) or "
            "/etc/security/limits.conf, or lower these settings",
        )
    allowed = "any number of" if hard_limit == resource.RLIM_INFINITY else f"{hard_limit:,}"
    return Finding(
        Level.OK, subject, f"this user may open {allowed} files; {wanted:,} may be needed"
    )


def _is_synchronised() -> bool | None:
    """Return True if the kernel says that its clock is synchronised; None if it cannot be asked."""
    if ctypes.sizeof(ctypes.c_void_p) != 8:
        return None
    state = (ctypes.c_char * 208)()
    if ctypes.CDLL(None).adjtimex(state) < 0:
        return None
    return (
        not int.from_bytes(state.raw[_STATUS_OFFSET : _STATUS_OFFSET + 4], "little")
        & _UNSYNCHRONISED
    )


def judge_clock(now_s: float, *, synchronised: bool | None) -> Finding:
    subject, shown = "clock", time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(now_s))
    if now_s < _YEAR_LEAST:
        return Finding(
            Level.PROBLEM,
            subject,
            f"it shows {shown}: records would get wrong times. Set it, and run an NTP client",
        )
    if synchronised is False:
        return Finding(
            Level.WARNING,
            subject,
            f"it shows {shown}, and no NTP client keeps it right: run chrony or systemd-timesyncd",
        )
    return Finding(Level.OK, subject, f"it shows {shown}")


def _address_check(listen: Listen, name: str) -> Callable[[], Finding]:
    return lambda: _address(f"listen.{name}", getattr(listen, name))


def _address(subject: str, address: Address) -> Finding:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        with socket.socket(family) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((address.host, address.port))
    except OSError as error:
        return Finding(
            Level.WARNING,
            subject,
            f"{address} cannot be opened ({error.strerror or error}): a server may be running already "
            "(`headrace status`); else choose another address",
        )
    return Finding(Level.OK, subject, f"{address} is free")


def _java() -> Finding:
    try:
        from headrace.spark.session import NoJavaError, check_java
    except ImportError:
        return Finding(
            Level.OK,
            "Java",
            "not needed: jobs on Spark need it, and pip install 'headrace[pipeline]'",
        )
    try:
        check_java()
    except NoJavaError as error:
        return Finding(Level.WARNING, "Java", f"{error} (only the jobs on Spark need it)")
    return Finding(Level.OK, "Java", "it is new enough for Spark")
