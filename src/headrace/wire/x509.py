"""The times in an X.509 certificate (RFC 5280 section 4.1), which Python's `ssl` tells of peers only.

Nothing is verified here, and nothing else of a certificate is read.
"""

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import NamedTuple

_SEQUENCE = 0x30
_VERSION = 0xA0
_UTC_TIME = 0x17
_GENERALIZED_TIME = 0x18

_FIELDS_BEFORE_VALIDITY = 3
"""Serial number, signature algorithm and issuer."""


class BadCertificateError(ValueError):
    """The bytes are not a certificate."""


def validity(der: bytes) -> tuple[float, float]:
    """Return the times from which and until which a certificate is valid, in seconds since 1970."""
    try:
        certificate = _only(_elements(der))
        fields = [
            one for one in _elements(next(_elements(certificate)).content) if one.tag != _VERSION
        ]
        times = [_seconds(one) for one in _elements(fields[_FIELDS_BEFORE_VALIDITY].content)]
        begins_s, expires_s = times
    except (IndexError, StopIteration, ValueError) as error:
        raise BadCertificateError(f"not a certificate: {error}") from None
    return begins_s, expires_s


class _Element(NamedTuple):
    tag: int
    content: bytes


def _elements(data: bytes) -> Iterator[_Element]:
    """Yield the elements of DER: a tag, a length, and the content."""
    at = 0
    while at < len(data):
        tag, size = data[at], data[at + 1]
        at += 2
        if size & 0x80:
            count = size & 0x7F
            size = int.from_bytes(data[at : at + count])
            at += count
        if at + size > len(data):
            raise BadCertificateError("it is cut off")
        yield _Element(tag, data[at : at + size])
        at += size


def _only(elements: Iterator[_Element]) -> bytes:
    found = list(elements)
    if [one.tag for one in found] != [_SEQUENCE]:
        raise BadCertificateError("it is no sequence")
    return found[0].content


def _seconds(element: _Element) -> float:
    text = element.content.decode("ascii")
    if element.tag == _UTC_TIME:  # two digits: 1950 to 2049
        text = ("19" if text[:2] >= "50" else "20") + text
    elif element.tag != _GENERALIZED_TIME:
        raise BadCertificateError("it has no times")
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp()
