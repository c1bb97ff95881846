"""Values of settings that have a form of their own: addresses, origins of pages, names of readers."""

from typing import NamedTuple, Self
from urllib.parse import urlsplit

import msgspec

from headrace.model import check_reader_name


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
    """The origins (scheme and host) of pages whose scripts may connect from a browser."""

    __slots__ = ()

    ANY = "*"
    SAME_HOST = "same-host"

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
        if not is_origin and text not in (cls.ANY, cls.SAME_HOST, "null"):
            raise ValueError(f"{origin!r} is not an origin")
        return text

    def allow(self, origin: str, host: str) -> bool:
        """Whether a page of that origin may connect to a server it calls `host`."""
        origin = origin.lower()
        if self.ANY in self or (origin in self and origin != self.SAME_HOST):
            return True
        name = _host_name(origin)
        return self.SAME_HOST in self and bool(name) and name == _host_name(f"//{host}")

    def __str__(self) -> str:
        return ",".join(self)


def _host_name(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


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
