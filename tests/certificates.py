"""Certificates for tests, made with openssl: self-signed ones, and an authority with those that it issues."""

import ssl
import subprocess
from pathlib import Path
from typing import NamedTuple, Self

_NEW_KEY = ("-nodes", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1")
HERE = ("DNS:localhost", "IP:127.0.0.1")


class Certificate(NamedTuple):
    """A certificate and its key, in two files."""

    certificate: Path
    key: Path

    @classmethod
    def make(cls, directory: Path, *names: str) -> Self:
        """Make a self-signed certificate for localhost, or for these names."""
        made = cls(directory / "certificate.pem", directory / "key.pem")
        _openssl(
            *("req", "-x509", *_NEW_KEY, "-days", "30", "-subj", "/CN=localhost"),
            *("-addext", f"subjectAltName={','.join(names or HERE[:1])}"),
            *("-keyout", str(made.key), "-out", str(made.certificate)),
        )
        return made

    def trusted(self) -> ssl.SSLContext:
        """Context of a client that trusts the certificate, or the authority that this is."""
        return ssl.create_default_context(cafile=self.certificate)


class Authority(NamedTuple):
    """An authority that issues certificates."""

    directory: Path
    own: Certificate

    @classmethod
    def make(cls, directory: Path) -> Self:
        own = Certificate(directory / "ca.pem", directory / "ca.key")
        _openssl(
            *("req", "-x509", *_NEW_KEY, "-days", "30", "-subj", "/CN=the authority"),
            *("-keyout", str(own.key), "-out", str(own.certificate)),
        )
        return cls(directory, own)

    def issue(
        self,
        file: str,
        *,
        subject: str = "/CN=localhost",
        names: tuple[str, ...] = HERE,
        days: int = 30,
    ) -> Certificate:
        """Issue a certificate for this subject and these names; with negative days, it has expired."""
        made = Certificate(self.directory / f"{file}.pem", self.directory / f"{file}.key")
        request, extensions = self.directory / f"{file}.csr", self.directory / f"{file}.ext"
        extensions.write_text(
            "basicConstraints=critical,CA:FALSE\n"
            + (f"subjectAltName={','.join(names)}\n" if names else "")
        )
        _openssl(
            *("req", "-new", *_NEW_KEY, "-subj", subject),
            *("-keyout", str(made.key), "-out", str(request)),
        )
        _openssl(
            *("x509", "-req", "-in", str(request), "-days", str(days)),
            *("-CA", str(self.own.certificate), "-CAkey", str(self.own.key), "-CAcreateserial"),
            *("-extfile", str(extensions), "-out", str(made.certificate)),
        )
        return made

    def trusted(self, own: Certificate | None = None) -> ssl.SSLContext:
        """Context of a client that trusts this authority, and may have a certificate of its own."""
        context = self.own.trusted()
        if own is not None:
            context.load_cert_chain(own.certificate, own.key)
        return context


def _openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)
