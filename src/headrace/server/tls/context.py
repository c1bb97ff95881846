"""The server's certificate, its key and the authorities of clients: their files, and what is wrong with them.

A mistake in a file is an error at the start. Later it is one line in the log, and the certificate in use
stays. Elsewhere: handshakes (`transport.py`).
"""

import ssl
import stat
from pathlib import Path
from typing import NamedTuple

from headrace.config.settings import Tls, TlsVersion
from headrace.errors import ConfigError
from headrace.printing import quoted
from headrace.tls import PassphraseError, no_passphrase
from headrace.wire.x509 import BadCertificateError, validity

_VERSIONS = {
    TlsVersion.TLS_1_2: ssl.TLSVersion.TLSv1_2,
    TlsVersion.TLS_1_3: ssl.TLSVersion.TLSv1_3,
}
_DAY_S = 86_400
SOON_S = 14 * _DAY_S
"""Time before a certificate expires from which a start and a reload warn of that."""


class ServerTls(NamedTuple):
    context: ssl.SSLContext
    expires_s: float
    """When the server's certificate expires, in seconds since 1970."""
    warnings: list[str]


def load(tls: Tls, now_s: float) -> ServerTls:
    """Read the files of the settings. Raises `ConfigError` with the setting that is wrong, and the reason."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = _VERSIONS[tls.min_version]
    # A client that resumes a session proves nothing again, and tickets that a client never reads reset its
    # connection when it leaves.
    context.options |= ssl.OP_NO_TICKET | ssl.OP_NO_RENEGOTIATION | ssl.OP_CIPHER_SERVER_PREFERENCE
    context.num_tickets = 0
    text = _read("cert", tls.cert)
    key = tls.key or tls.cert
    if tls.key:
        _read("key", key)
    _load_pair(context, tls.cert, key)
    if tls.client_ca:
        _read("client_ca", tls.client_ca)
        _load_authorities(context, tls.client_ca)
    expires_s, warnings = _times_of(tls.cert, text, now_s)
    if Path(key).stat().st_mode & stat.S_IROTH:
        warnings.append(
            f"everyone on this machine can read the key {quoted(key)}: take that right away (chmod o-r)"
        )
    return ServerTls(context, expires_s, warnings)


def _read(name: str, path: str) -> str:
    """Return the text of a file; raise ConfigError if it cannot be read or holds no PEM."""
    try:
        text = Path(path).read_text(encoding="latin-1")
    except OSError as error:
        raise _wrong(name, path, f"cannot be read: {error.strerror}") from None
    if "-----BEGIN " not in text:
        raise _wrong(
            name, path, "is not PEM: it must have lines such as -----BEGIN CERTIFICATE-----"
        )
    return text


def _load_pair(context: ssl.SSLContext, cert: str, key: str) -> None:
    try:
        # Without a function, OpenSSL would ask for the passphrase on the terminal.
        context.load_cert_chain(cert, key, password=no_passphrase)
    except PassphraseError:
        raise _wrong(
            "key", key, "has a passphrase, and nobody can type it: store it without"
        ) from None
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise _wrong("key", key, f"is not the key of the certificate {quoted(cert)}") from None
        if error.reason in _WEAK:
            raise _wrong("cert", cert, f"is too weak for OpenSSL: {_plain(error)}") from None
        which = "key" if "-----BEGIN CERTIFICATE-----" in _read("cert", cert) else "cert"
        path = key if which == "key" else cert
        what = "private key" if which == "key" else "certificate"
        raise _wrong(which, path, f"holds no valid {what} in PEM ({_plain(error)})") from None
    except OSError as error:
        raise _wrong("key", key, f"cannot be read: {error.strerror}") from None


_WEAK = ("EE_KEY_TOO_SMALL", "CA_KEY_TOO_SMALL", "CA_MD_TOO_WEAK")


def _load_authorities(context: ssl.SSLContext, path: str) -> None:
    try:
        context.load_verify_locations(cafile=path)
    except ssl.SSLError as error:
        raise _wrong("client_ca", path, f"holds no valid certificate ({_plain(error)})") from None
    context.verify_mode = ssl.CERT_OPTIONAL


def _times_of(path: str, text: str, now_s: float) -> tuple[float, list[str]]:
    """Return the time when the first certificate of a file expires, and the warnings that this causes."""
    begin = text.index("-----BEGIN CERTIFICATE-----")
    end = text.index("-----END CERTIFICATE-----", begin) + len("-----END CERTIFICATE-----")
    try:
        begins_s, expires_s = validity(ssl.PEM_cert_to_DER_cert(text[begin:end]))
    except (BadCertificateError, ValueError):
        return float("inf"), [f"the certificate {quoted(path)} does not say when it expires"]
    named, warnings = f"the certificate {quoted(path)}", []
    if now_s >= expires_s:
        warnings.append(f"{named} has expired: clients refuse it, so renew it and send SIGHUP")
    elif now_s >= expires_s - SOON_S:
        days = int((expires_s - now_s) // _DAY_S)
        warnings.append(f"{named} expires in {days} days: renew it and send SIGHUP")
    elif now_s < begins_s:
        warnings.append(f"{named} is not valid yet: clients refuse it, or a clock is wrong")
    return expires_s, warnings


def _wrong(name: str, path: str, why: str) -> ConfigError:
    return ConfigError(f"listen.tls.{name}: {quoted(path)} {why}")


def _plain(error: ssl.SSLError) -> str:
    return (error.reason or "unknown error").replace("_", " ").lower()
