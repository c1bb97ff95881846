"""Values of settings that have a form of their own: quantities with units, addresses, origins, readers."""

import ipaddress
import re
from typing import NamedTuple, Self
from urllib.parse import urlsplit

import msgspec

from headrace.model import check_reader_name

SECONDS = "seconds"
BYTES = "bytes"

_UNITS: dict[str, dict[str, float]] = {
    SECONDS: {"ms": 0.001, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400, "w": 604_800},
    BYTES: {
        "b": 1,
        **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", 1)},
        **{f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", 1)},
    },
}
_QUANTITY = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,9})?) ?([A-Za-z]{1,3})")

UNITS_HELP = {
    SECONDS: "a duration with a unit (ms, s, m, h, d, w) such as 30s or 7d",
    BYTES: "a size with a unit (B, KiB, MiB, GiB, TiB, or KB, MB, GB, TB) such as 64MiB",
}


class Quantity(NamedTuple):
    """A number that was written with a unit, such as `7d` or `64MiB`."""

    value: float
    """In the base unit: a size is a whole number of bytes."""
    unit: str
    """The base unit: SECONDS or BYTES."""

    @classmethod
    def parse(cls, text: object) -> "Quantity | None":
        """The quantity that a text stands for; None unless it is a number with a known unit."""
        found = _QUANTITY.fullmatch(text.strip()) if isinstance(text, str) else None
        if found is None:
            return None
        for unit, factors in _UNITS.items():
            factor = factors.get(found[2].lower())
            if factor is not None and unit == SECONDS:
                return cls(round(float(found[1]) * factor, 9), unit)
            if factor is not None:
                whole = "." not in found[1]
                size = int(found[1]) * int(factor) if whole else float(found[1]) * factor
                return cls(int(size), unit) if size == int(size) else None
        return None


def parse_seconds(text: str) -> float:
    """Seconds from `90`, `90s` or `1.5m`; ValueError says what is accepted."""
    quantity = Quantity.parse(text)
    if quantity is not None and quantity.unit == SECONDS:
        return quantity.value
    if re.fullmatch(r"[0-9]{1,18}(?:\.[0-9]{1,9})?", text.strip()):
        return float(text)
    raise ValueError(f"a number of seconds, or {UNITS_HELP[SECONDS]}")


class Address(NamedTuple):
    """Where a listener opens; port 0 takes a free one."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Self:
        host, colon, port = text.rpartition(":")
        if host.startswith("[") and host.endswith("]"):
            host = host[1:-1]
        elif ":" in host:
            raise ValueError("an IPv6 address needs brackets")
        if not (colon and host and port.isascii() and port.isdigit() and int(port) < 65536):
            raise ValueError("not HOST:PORT")
        return cls(host, int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def _listed(value: object) -> object:
    """A text as the list it stands for: with commas, or as TOML and JSON write it."""
    if not isinstance(value, str):
        return value
    if value.startswith("["):
        try:
            return msgspec.json.decode(value)
        except msgspec.DecodeError:
            raise ValueError("not the list it begins as") from None
    return value.split(",")


class Origins(tuple[str, ...]):
    """The origins (scheme and host) of pages whose scripts may connect from a browser.

    Pages of the host that is connected to may always, unless NO_SAME_HOST is among them or there is nothing.
    """

    __slots__ = ()

    ANY = "*"
    SAME_HOST = "same-host"
    NO_SAME_HOST = "no-same-host"

    @classmethod
    def parse(cls, value: object) -> Self:
        """From a list, or a text with commas."""
        origins = _listed(value)
        if not isinstance(origins, list | tuple):
            raise ValueError("neither a list nor a text")
        return cls(cls._parse_one(origin) for origin in origins)

    @classmethod
    def _parse_one(cls, origin: object) -> str:
        text = origin.strip().lower() if isinstance(origin, str) else ""
        parts = urlsplit(text)
        is_origin = parts.scheme and parts.hostname and text == f"{parts.scheme}://{parts.netloc}"
        if not is_origin and text not in (*cls._words(), "null"):
            raise ValueError(f"{origin} is not an origin")
        return text

    def allow(self, origin: str, host: str) -> bool:
        """Whether a page of that origin may connect to a server it calls `host`."""
        origin = origin.lower()
        if self.ANY in self or (origin in self and origin not in self._words()):
            return True
        name = _host_name(origin)
        has_same_host = bool(self) and self.NO_SAME_HOST not in self
        return has_same_host and bool(name) and name == _host_name(f"//{host}")

    def with_page(self, origin: str) -> Self | None:
        """These and the origin of one more page; None for what is no origin."""
        if origin.strip().lower() in self._words():
            return None
        try:
            return type(self)((*self, *self.parse([origin])))
        except ValueError:
            return None

    @classmethod
    def _words(cls) -> tuple[str, ...]:
        return cls.ANY, cls.SAME_HOST, cls.NO_SAME_HOST

    def __str__(self) -> str:
        return ",".join(self)


def _host_name(url: str) -> str:
    """The host in a URL; all names of this machine's loopback interface are `localhost`."""
    try:
        name = urlsplit(url).hostname or ""
    except ValueError:
        return ""
    return "localhost" if is_loopback(name) else name


def is_loopback(host: str) -> bool:
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Readers(tuple[str, ...]):
    """Names of readers that have cursors."""

    __slots__ = ()

    @classmethod
    def parse(cls, value: object) -> Self:
        """From a list, or a text with commas."""
        names = _listed(value)
        if value == "":
            return cls()
        if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
            raise ValueError("neither a list of texts nor a text")
        for name in names:
            check_reader_name(name)
        return cls(dict.fromkeys(names))

    def __str__(self) -> str:
        return ",".join(self)
