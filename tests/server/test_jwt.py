"""The keys and rules of JWTs as the configuration names them, and the sentences about mistakes."""

from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from headrace.access.jwt import KNOWN
from headrace.access.operations import Operation
from headrace.access.principals import Principal
from headrace.config.load import load
from headrace.config.values import JWT_ALGORITHMS
from headrace.errors import ConfigError
from headrace.server.jwt import KEY_FILE_BYTES_MAX, load_jwt

NOW = 1_763_000_000
KEY = ec.generate_private_key(ec.SECP256R1())
PEM = KEY.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)

FILE = """
[access.jwt]
key_file = "keys.pem"
issuer = "https://issuer.example"
audience = "log"
leeway = "5s"
roles_claim = "realm.roles"

[[access.jwt.role]]
name = "writer"
grants = ["publish:orders/*", "create:orders/*"]
"""


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def settings(text: str) -> Any:
    Path("headrace.toml").write_text(text)
    return load({}, {}, Path("headrace.toml")).config.access.jwt


def test_the_file_of_settings_says_what_a_token_must_have_and_allows() -> None:
    Path("keys.pem").write_bytes(PEM)
    verify = load_jwt(settings(FILE))
    assert verify is not None
    claims = {
        "sub": "anna",
        "exp": NOW,
        "iss": "https://issuer.example",
        "aud": "log",
        "realm": {"roles": ["writer", "cook"]},
    }
    shown = jwt.encode(claims, KEY, "ES256")
    found = verify(shown, (NOW + 4) * 1000)
    assert isinstance(found, Principal)
    assert found.allows(Operation.CREATE, "orders/1")
    assert not found.allows(Operation.DELETE, "orders/1")
    assert verify(shown, (NOW + 5) * 1000) == "the token has expired"
    other = jwt.encode(claims | {"iss": "x"}, KEY, "ES256")
    assert "issuer" in str(verify(other, NOW * 1000))


def test_without_a_file_of_keys_there_are_no_jwts() -> None:
    assert load_jwt(settings("")) is None


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (None, "access.jwt.key_file: cannot read keys.pem: No such file or directory"),
        (b"hello", "access.jwt.key_file: keys.pem: it is neither PEM nor a JWKS"),
        (bytes(KEY_FILE_BYTES_MAX + 1), "access.jwt.key_file: keys.pem is larger than"),
    ],
)
def test_a_mistake_in_the_file_of_keys_is_one_sentence(data: bytes | None, said: str) -> None:
    if data is not None:
        Path("keys.pem").write_bytes(data)
    with pytest.raises(ConfigError, match=said) as raised:
        load_jwt(settings('[access.jwt]\nkey_file = "keys.pem"'))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[access.jwt]\nalgorithms = ["none"]', "access.jwt.algorithms must be"),
        ('[access.jwt]\nkeys = "a"', "there is no setting access.jwt.keys"),
        ('[access.jwt]\nrole = "a"', "access.jwt.role must be a list of tables"),
        ('[[access.jwt.role]]\nname = "a"', "grants is missing"),
        (
            '[[access.jwt.role]]\nname = "a"\ngrants = ["everything:*"]',
            'the role "a": .*unknown operation',
        ),
        (
            2 * '[[access.jwt.role]]\nname = "a"\ngrants = []\n',
            'the name "a" has two tables',
        ),
    ],
)
def test_a_mistake_in_the_settings_is_one_sentence(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        settings(text)


def test_algorithms_of_the_settings_are_those_of_the_check() -> None:
    assert set(JWT_ALGORITHMS) == KNOWN
