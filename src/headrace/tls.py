"""TLS of clients: the files that a client names, their context, and what a failed handshake means.

Everything that connects to a server uses it: the SDK, the commands, readers and jobs. Elsewhere: the
listeners of the server (`server/tls/`).
"""

import os
import ssl
from pathlib import Path
from typing import NamedTuple, TypedDict

from headrace.errors import ConfigError
from headrace.printing import quoted

CA_VARIABLE, CERT_VARIABLE, KEY_VARIABLE = "HEADRACE_CA", "HEADRACE_CERT", "HEADRACE_KEY"


class TlsFiles(NamedTuple):
    """Files in PEM that a client uses for TLS. Empty names stand for the defaults."""

    ca: str = ""
    """Authorities that the server's certificate may come from; by default those of the system."""
    cert: str = ""
    """The client's own certificate, for servers that know clients by theirs."""
    key: str = ""
    """The key of that certificate; by default in the same file."""

    def context(self) -> ssl.SSLContext:
        """Return a context that checks the server's certificate and its host. Raises `ConfigError`."""
        if self.key and not self.cert:
            raise ConfigError("key is the key of a client's certificate: give cert too")
        _read("ca", self.ca)
        try:
            context = ssl.create_default_context(cafile=self.ca or None)
        except ssl.SSLError:
            raise ConfigError(f"ca: {quoted(self.ca)} holds no valid certificate in PEM") from None
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if self.cert:
            self._load_own(context)
        return context

    def _load_own(self, context: ssl.SSLContext) -> None:
        _read("cert", self.cert)
        _read("key", self.key)
        key = self.key or self.cert
        try:
            context.load_cert_chain(self.cert, key, password=no_passphrase)
        except PassphraseError:
            raise ConfigError(f"key: {quoted(key)} has a passphrase: store it without") from None
        except ssl.SSLError as error:
            if error.reason == "KEY_VALUES_MISMATCH":
                raise ConfigError(
                    f"key: {quoted(key)} is not the key of the certificate {quoted(self.cert)}"
                ) from None
            raise ConfigError(
                f"cert: {quoted(self.cert)} and its key are no valid certificate and key in PEM"
            ) from None

    def or_environment(self) -> "TlsFiles":
        """Return these files, or those that the environment names for the commands."""
        variables = (CA_VARIABLE, CERT_VARIABLE, KEY_VARIABLE)
        return TlsFiles(
            *(one or os.environ.get(name, "") for one, name in zip(self, variables, strict=True))
        )


class TlsOptions(TypedDict):
    """The same files as keyword arguments of a client."""

    ca: str | None
    cert: str | None
    key: str | None


DEFAULT_FILES = TlsFiles()


def _read(name: str, path: str) -> None:
    """Raise ConfigError if a file cannot be read: OpenSSL does not say which one it is."""
    if path:
        try:
            Path(path).read_bytes()
        except OSError as error:
            raise ConfigError(f"{name}: {quoted(path)} cannot be read: {error.strerror}") from None


class PassphraseError(Exception):
    """Raised instead of asking for a passphrase on the terminal."""


def no_passphrase() -> str:
    raise PassphraseError


# Numbers of OpenSSL's x509_vfy.h.
_EXPIRED = (10,)
_UNKNOWN_AUTHORITY = (2, 18, 19, 20, 21)
_OTHER_HOST = (62, 64)
_NOT_YET_VALID = (9,)

_PLAIN_PORT = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "UNKNOWN_PROTOCOL", "RECORD_LAYER_FAILURE")
_REFUSED_CLIENT = {
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": "asks for a client certificate (--cert, in Python cert=)",
    "TLSV1_ALERT_UNKNOWN_CA": "does not know the authority of the client's certificate",
    "SSLV3_ALERT_BAD_CERTIFICATE": "does not accept the client's certificate",
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "says that the client's certificate has expired",
    "TLSV1_ALERT_PROTOCOL_VERSION": "speaks no version of TLS that this client speaks",
    "SSLV3_ALERT_HANDSHAKE_FAILURE": "has no cipher in common with this client",
}


def failure(error: ssl.SSLError, place: str) -> str:
    """Return the reason why TLS with the server at `place` (HOST:PORT) failed."""
    if isinstance(error, ssl.SSLCertVerificationError):
        code = error.verify_code
        if code in _EXPIRED:
            return f"the certificate of {place} has expired"
        if code in _NOT_YET_VALID:
            return f"the certificate of {place} is not valid yet: is the clock right?"
        if code in _OTHER_HOST:
            return (
                f"the certificate of {place} is for another host: connect to a name that is in it"
            )
        if code in _UNKNOWN_AUTHORITY:
            return (
                f"the certificate of {place} is from an unknown authority: "
                "name the authority's file (--ca, in Python ca=)"
            )
        return f"the certificate of {place} is not accepted: {error.verify_message}"
    reason = error.reason or ""
    if reason in _PLAIN_PORT:
        return f"{place} does not speak TLS: is it the right port, and has the server TLS?"
    if reason in _REFUSED_CLIENT:
        return f"{place} {_REFUSED_CLIENT[reason]}"
    if isinstance(error, ssl.SSLEOFError):
        return unanswered(place)
    return f"TLS with {place} failed: {reason.replace('_', ' ').lower() or error}"


def unanswered(place: str) -> str:
    """Return the reason for a connection that the server ended in the handshake."""
    return (
        f"{place} closed the connection during the TLS handshake: has the server TLS on this port?"
    )
