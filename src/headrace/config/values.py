"""Values of settings: the description of a setting, and values with units, addresses, origins and readers."""

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import field
from typing import Any, NamedTuple, Self
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from headrace.access.grants import parse_all
from headrace.model import check_reader_name
from headrace.printing import MASK

FILE = r"^[^\x00]*\Z"
"""Pattern of a setting that names a file, or nothing."""

NUMBER_MAX = 2**62  # offsets and sizes stay well below the limits of files and SQLite


def setting(
    default: object,
    doc: str,
    unit: str = "",
    *,
    flag: str = "",
    pattern: str | None = None,
    allowed: str = "",
    secret: bool = False,
    reloads: bool = False,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
) -> Any:
    """Describe a setting, or a section: `reloads` then counts for all its settings."""
    facts = {"doc": doc, "unit": unit, "flag": flag, "is_secret": secret, "reloads": reloads}
    bounds: dict[str, Any] = {"pattern": pattern, "ge": ge, "gt": gt, "le": le}
    return field(default=default, metadata={**facts, "allowed": allowed, "bounds": Meta(**bounds)})


SECONDS = "seconds"
BYTES = "bytes"


def seconds(
    default: float | None,
    doc: str,
    *,
    gt: float | None = None,
    le: float = NUMBER_MAX,
    reloads: bool = False,
) -> Any:
    """Describe a duration. Without a lower bound, 0 is allowed."""
    ge = 0 if gt is None else None
    return setting(default, doc, SECONDS, reloads=reloads, ge=ge, gt=gt, le=le)


def size(
    default: int | None, doc: str, *, ge: int = 0, le: int = NUMBER_MAX, reloads: bool = False
) -> Any:
    """Describe a number of bytes."""
    return setting(default, doc, BYTES, reloads=reloads, ge=ge, le=le)


def count(default: int, doc: str, of: str, *, ge: int = 1, le: int = 1_000_000) -> Any:
    """Describe a number of things, such as `connections`."""
    return setting(default, doc, of, ge=ge, le=le)


def no_limit(doc: str, of: str, *, default: int = 0) -> Any:
    """Describe a number of things that has no limit if it is 0."""
    return setting(default, f"{doc} 0 means that there is no limit.", of, ge=0, le=NUMBER_MAX)


def rate(doc: str, of: str) -> Any:
    """Describe a limit of one kind of peer. None leaves it to less specific limits."""
    return setting(None, doc, of, reloads=True, ge=0, le=NUMBER_MAX)


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
    """A number with a unit, such as `7d` or `64MiB`."""

    value: float
    """Value in the base unit. A size is a whole number of bytes."""
    unit: str
    """The base unit: SECONDS or BYTES."""

    @classmethod
    def parse(cls, text: object) -> "Quantity | None":
        """Return the quantity in a text; None unless the text is a number with a known unit."""
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

    def __str__(self) -> str:
        """Return the quantity in its largest unit that needs no fraction, such as `7d` or `64MiB`."""
        names = ("d", "h", "m", "s") if self.unit == SECONDS else ("GiB", "MiB", "KiB", "B")
        factors = _UNITS[self.unit]
        name = next((one for one in names if self.value % factors[one.lower()] == 0), names[-1])
        return f"{self.value / factors[name.lower()]:g}{name}"


def parse_seconds(text: str) -> float:
    """Return the seconds in a text such as `90`, `90s` or `1.5m`. ValueError names the accepted forms."""
    quantity = Quantity.parse(text)
    if quantity is not None and quantity.unit == SECONDS:
        return quantity.value
    if re.fullmatch(r"[0-9]{1,18}(?:\.[0-9]{1,9})?", text.strip()):
        return float(text)
    raise ValueError(f"a number of seconds, or {UNITS_HELP[SECONDS]}")


class Address(NamedTuple):
    """Address of a listener; port 0 means any free port."""

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


def _texts(value: object) -> list[str]:
    """Return the texts of a list, or of a text with commas or as in TOML and JSON. Raises ValueError."""
    if isinstance(value, str):
        value = msgspec.json.decode(value) if value.startswith("[") else value.split(",")
    return msgspec.convert(value, list[str])


class Origins(tuple[str, ...]):
    """The origins (scheme and host) of pages whose scripts may connect from a browser.

    Pages of the host that they connect to are always allowed, unless the list is empty or has NO_SAME_HOST.
    """

    __slots__ = ()

    ANY = "*"
    SAME_HOST = "same-host"
    NO_SAME_HOST = "no-same-host"

    @classmethod
    def parse(cls, value: object) -> Self:
        """Parse a list, or a text with commas. Raises ValueError."""
        return cls(map(cls._parse_one, _texts(value)))

    @classmethod
    def _parse_one(cls, origin: str) -> str:
        text = origin.strip().lower()
        parts = urlsplit(text)
        is_origin = parts.scheme and parts.hostname and text == f"{parts.scheme}://{parts.netloc}"
        if not is_origin and text not in (*cls._words(), "null"):
            raise ValueError(f"{origin} is not an origin")
        return text

    def allow(self, origin: str, host: str) -> bool:
        """Return True if a page of `origin` may connect to the server, which the page calls `host`."""
        origin = origin.lower()
        if self.ANY in self or (origin in self and origin not in self._words()):
            return True
        name = _host_name(origin)
        has_same_host = bool(self) and self.NO_SAME_HOST not in self
        return has_same_host and bool(name) and name == _host_name(f"//{host}")

    def with_page(self, origin: str) -> Self | None:
        """Return these origins and the origin of one more page; None if `origin` is not an origin."""
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
    """Return the host in a URL; `localhost` for every name of this machine's loopback interface."""
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


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


class HostNames(tuple[str, ...]):
    """Names by which browsers may call this server, as in a `Host` header without the port."""

    __slots__ = ()

    @classmethod
    def parse(cls, value: object) -> Self:
        """Parse a list, or a text with commas. Raises ValueError."""
        names = [] if value == "" else _texts(value)
        return cls(dict.fromkeys(map(cls._parse_one, names)))

    @classmethod
    def _parse_one(cls, name: str) -> str:
        text = name.strip().lower()
        if not text or urlsplit(f"//{text}").hostname != text.strip("[]"):
            raise ValueError(f"{name} is not a host name")
        return text.strip("[]")

    def has(self, host: str, *, any_address: bool = False) -> bool:
        """True for a `Host` header that is empty, or names one of these, this machine or loopback."""
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        return not host or name in self or is_loopback(name) or (any_address and _is_address(name))

    def __str__(self) -> str:
        return ",".join(self)


class Grants(tuple[str, ...]):
    """Grants, each as `OPERATION:PATTERN`."""

    __slots__ = ()

    @classmethod
    def parse(cls, value: object) -> Self:
        """Parse a list, or a text with spaces between the grants. Raises ValueError."""
        if isinstance(value, str) and not value.startswith("["):
            value = value.split()
        texts = msgspec.json.decode(value) if isinstance(value, str) else value
        return cls(dict.fromkeys(map(str, parse_all(msgspec.convert(texts, list[str])))))

    def __str__(self) -> str:
        return " ".join(self)


class ReaderNames(tuple[str, ...]):
    """Names of readers that have cursors."""

    __slots__ = ()

    @classmethod
    def parse(cls, value: object) -> Self:
        """Parse a list, or a text with commas. Raises ValueError."""
        names = [] if value == "" else _texts(value)
        for name in names:
            check_reader_name(name)
        return cls(dict.fromkeys(names))

    def __str__(self) -> str:
        return ",".join(self)


LISTENERS = ("figg", "ws", "http")
"""Names of the listeners in the settings and in `LISTEN_FDNAMES`."""


class ListenerNames(tuple[str, ...]):
    """Some of the listeners."""

    __slots__ = ()

    @classmethod
    def parse(cls, value: object) -> Self:
        """Parse a list, or a text with commas. Raises ValueError."""
        names = [] if value == "" else [name.strip() for name in _texts(value)]
        if not set(names) <= set(LISTENERS):
            raise ValueError("not a listener")
        return cls(dict.fromkeys(names))

    def __str__(self) -> str:
        return ",".join(self)


JWT_ALGORITHMS = (
    *("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"),
    *("ES256", "ES384", "ES512", "EdDSA", "HS256", "HS384", "HS512"),
)


class JwtAlgorithms(tuple[str, ...]):
    """Algorithms that sign JSON Web Tokens, by their names there."""

    __slots__ = ()

    @classmethod
    def parse(cls, value: object) -> Self:
        """Parse a list, or a text with commas. Raises ValueError."""
        names = [] if value == "" else [name.strip() for name in _texts(value)]
        if not set(names) <= set(JWT_ALGORITHMS):
            raise ValueError("not an algorithm")
        return cls(dict.fromkeys(names))

    def __str__(self) -> str:
        return ",".join(self)


class KeyValues(tuple[str, ...]):
    """Options of a library, each as `KEY=VALUE`."""

    __slots__ = ()

    @classmethod
    def parse(cls, value: object) -> Self:
        """Parse a table, a list, or a text with commas or as in JSON. Raises ValueError."""
        if isinstance(value, str) and value.startswith("{"):
            value = msgspec.json.decode(value)
        if isinstance(value, Mapping):
            given = msgspec.convert(value, dict[str, str])
            return cls(f"{key}={one}" for key, one in given.items())
        pairs = [] if value == "" else _texts(value)
        if not all(pair.partition("=")[0] and "=" in pair for pair in pairs):
            raise ValueError("not KEY=VALUE")
        return cls(pairs)

    @property
    def mapping(self) -> dict[str, str]:
        return {key: value for key, _, value in (pair.partition("=") for pair in self)}

    def masked(self) -> Self:
        """Return the same keys without their values."""
        return type(self)(f"{key}={MASK}" for key in self.mapping)

    def __str__(self) -> str:
        return ",".join(self)
