"""The files of TLS: a mistake is one sentence that names the setting, and a lesser one is a warning."""

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from headrace.config.settings import Config, Listen, Tls, TlsVersion
from headrace.errors import ConfigError
from headrace.server.reload import merge
from headrace.server.tls.context import SOON_S, load
from headrace.wire.x509 import BadCertificateError, validity
from tests.certificates import Authority, Certificate

NOW_S = 1_800_000_000.0


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.make(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def issued(authority: Authority) -> Certificate:
    return authority.issue("server")


@pytest.fixture
def pair(issued: Certificate, tmp_path: Path) -> Certificate:
    """A certificate and a key that a test may change."""
    copied = Certificate(tmp_path / "cert.pem", tmp_path / "key.pem")
    shutil.copy(issued.certificate, copied.certificate)
    shutil.copy(issued.key, copied.key)
    copied.key.chmod(0o600)
    return copied


def tls(pair: Certificate, **more: Any) -> Tls:
    return Tls(**{"cert": str(pair.certificate), "key": str(pair.key)} | more)


def expiry_s(pair: Certificate) -> float:
    return load(tls(pair), 0.0).expires_s


def refusal(settings: Tls) -> str:
    with pytest.raises(ConfigError) as refused:
        load(settings, NOW_S)
    return str(refused.value)


def test_a_sound_certificate_causes_no_warning(pair: Certificate) -> None:
    expires_s = expiry_s(pair)
    assert load(tls(pair), expires_s - SOON_S - 1).warnings == []


def test_certificate_and_key_may_be_in_one_file(pair: Certificate) -> None:
    pair.certificate.write_bytes(pair.certificate.read_bytes() + pair.key.read_bytes())
    pair.certificate.chmod(0o600)
    expires_s = load(tls(pair, key=""), 0.0).expires_s
    assert load(tls(pair, key=""), expires_s - SOON_S - 1).warnings == []


@pytest.mark.parametrize(
    ("before_s", "warning"),
    [
        (0, "has expired: clients refuse it, so renew it and send SIGHUP"),
        (3 * 86_400, "expires in 3 days: renew it and send SIGHUP"),
        (365 * 86_400, "is not valid yet: clients refuse it, or a clock is wrong"),
    ],
)
def test_the_times_of_a_certificate_are_warned_of(
    pair: Certificate, before_s: float, warning: str
) -> None:
    warnings = load(tls(pair), expiry_s(pair) - before_s).warnings
    assert warnings == [f'the certificate "{pair.certificate}" {warning}']


def test_a_key_that_everyone_can_read_is_warned_of(pair: Certificate) -> None:
    pair.key.chmod(0o644)
    (warning,) = load(tls(pair), expiry_s(pair) - SOON_S - 1).warnings
    assert warning.startswith(f'everyone on this machine can read the key "{pair.key}"')


@pytest.mark.parametrize("name", ["cert", "key", "client_ca"])
def test_a_file_that_cannot_be_read_is_named(pair: Certificate, name: str, tmp_path: Path) -> None:
    missing = str(tmp_path / "none.pem")
    assert refusal(tls(pair, **{name: missing})) == (
        f'listen.tls.{name}: "{missing}" cannot be read: No such file or directory'
    )
    assert "cannot be read: Is a directory" in refusal(tls(pair, **{name: str(tmp_path)}))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_a_key_without_the_right_to_read_it_is_named(pair: Certificate) -> None:
    pair.key.chmod(0)
    assert "cannot be read: Permission denied" in refusal(tls(pair))


@pytest.mark.parametrize("name", ["cert", "key", "client_ca"])
def test_a_file_of_another_kind_is_named(pair: Certificate, name: str, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(b"\x30\x82\x00\xff")
    assert f'listen.tls.{name}: "{other}" is not PEM' in refusal(tls(pair, **{name: str(other)}))
    other.write_text("-----BEGIN NOTHING-----\nAAAA\n-----END NOTHING-----\n")
    assert refusal(tls(pair, **{name: str(other)})).startswith(
        f'listen.tls.{name}: "{other}" holds no valid '
    )


def test_a_key_of_another_certificate_is_named(pair: Certificate, authority: Authority) -> None:
    other = authority.issue("other")
    assert refusal(tls(pair, key=str(other.key))) == (
        f'listen.tls.key: "{other.key}" is not the key of the certificate "{pair.certificate}"'
    )


def test_nobody_is_asked_for_a_passphrase(pair: Certificate, tmp_path: Path) -> None:
    locked = tmp_path / "locked.pem"
    subprocess.run(
        ["openssl", "ec", "-in", pair.key, "-aes256", "-passout", "pass:secret", "-out", locked],
        check=True,
        capture_output=True,
    )
    assert "has a passphrase, and nobody can type it" in refusal(tls(pair, key=str(locked)))


# Times in certificates


def test_bytes_that_are_no_certificate_have_no_times() -> None:
    for data in (b"", b"\x30", b"\x30\x03\x02\x01", b"\x30\x00", b"\x02\x01\x00", bytes(100)):
        with pytest.raises(BadCertificateError):
            validity(data)


# Settings that a running server takes over


def listening(tls: Tls) -> Config:
    return Config(listen=Listen(tls=tls))


def test_files_and_versions_reload_but_tls_is_not_turned_on_or_off() -> None:
    before = Tls(cert="a", key="b")
    found = merge(listening(before), listening(Tls(cert="c", min_version=TlsVersion.TLS_1_3)))
    assert found.changed == ["listen.tls.cert", "listen.tls.key", "listen.tls.min_version"]
    assert found.config.listen.tls == Tls(cert="c", min_version=TlsVersion.TLS_1_3)
    for one, other in ((Tls(), before), (before, Tls())):
        found = merge(listening(one), listening(other))
        assert (found.changed, found.config.listen.tls) == ([], one)
        assert found.waiting == ["listen.tls.cert", "listen.tls.key"]
