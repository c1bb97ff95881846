"""JWTs: the keys that are accepted, the tokens that are accepted, and attacks on both. Time is passed in.

Most tokens are made by PyJWT. Those that it refuses to make are put together by hand.
"""

import base64
import functools
import hashlib
import hmac
import json
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import jwt
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from hypothesis import given
from hypothesis import strategies as st
from jwt.algorithms import get_default_algorithms

from headrace.access.grants import Grant
from headrace.access.jwt import (
    KEYS_MAX,
    JwtRules,
    Keys,
    read_keys,
    verify,
)
from headrace.access.operations import Operation
from headrace.access.principals import Kind, Principal
from headrace.access.tokens import GRANTS_MAX, is_jwt
from headrace.errors import BadKeyError
from headrace.model import TOKEN_BYTES_MAX

NOW = 1_763_000_000
NOW_MS = NOW * 1000
SECRET = b"0123456789abcdef0123456789abcdef"


@functools.cache
def rsa_key(bits: int = 2048, name: str = "") -> rsa.RSAPrivateKey:
    """Return a key. Making one takes a while, so tests share it by its name."""
    return rsa.generate_private_key(65537, bits)


EC = {
    name: ec.generate_private_key(curve)
    for name, curve in (("P-256", ec.SECP256R1()), ("P-384", ec.SECP384R1()))
}
ED = ed25519.Ed25519PrivateKey.generate()


def pem(private: Any) -> bytes:
    found: bytes = private.public_key().public_bytes(
        Encoding.PEM, PublicFormat.SubjectPublicKeyInfo
    )
    return found


def jwk(algorithm: str, key: Any, **more: Any) -> dict[str, Any]:
    """Return a public key, or a secret, as a JWK without `alg`."""
    public = key if isinstance(key, bytes) else key.public_key()
    found = get_default_algorithms()[algorithm].to_jwk(public, as_dict=True)
    return {k: v for k, v in found.items() if k not in ("alg", "key_ops")} | more


def jwks(*keys: dict[str, Any]) -> bytes:
    return json.dumps({"keys": keys}).encode()


def token(
    key: Any = EC["P-256"],
    algorithm: str = "ES256",
    *,
    headers: dict[str, Any] | None = None,
    **claims: Any,
) -> str:
    """Return a token that is valid, apart from what the arguments change. None removes a claim."""
    given = {"sub": "anna", "exp": NOW + 60, "headrace": ["publish:orders/*"]} | claims
    left = {name: value for name, value in given.items() if value is not None}
    return jwt.encode(left, key, algorithm, headers=headers)


def by_hand(header: object, claims: object, sign: Callable[[bytes], bytes] = lambda _: b"") -> str:
    """Put a token together as an attacker does."""
    parts = [
        encoded(one if isinstance(one, bytes) else json.dumps(one).encode())
        for one in (header, claims)
    ]
    signed = b".".join(parts)
    return b".".join([signed, encoded(sign(signed))]).decode()


def encoded(data: bytes) -> bytes:
    return base64.urlsafe_b64encode(data).rstrip(b"=")


KEYS = read_keys(pem(EC["P-256"]))
CLAIMS = {"sub": "anna", "exp": NOW + 60, "headrace": ["all:*"]}


def check(shown: str, keys: Keys = KEYS, now_ms: int = NOW_MS, **rules: Any) -> Principal | str:
    return verify(shown, keys, JwtRules(**rules), now_ms)


def reason(shown: str, keys: Keys = KEYS, now_ms: int = NOW_MS, **rules: Any) -> str:
    found = check(shown, keys, now_ms, **rules)
    assert isinstance(found, str), found
    return found


def principal(shown: str, keys: Keys = KEYS, now_ms: int = NOW_MS, **rules: Any) -> Principal:
    found = check(shown, keys, now_ms, **rules)
    assert isinstance(found, Principal), found
    return found


# Tokens that are accepted


def test_a_token_proves_who_its_bearer_is_and_what_is_allowed() -> None:
    found = principal(token())
    assert (found.kind, found.name) == (Kind.JWT, "anna")
    assert found.grants == (Grant.parse("publish:orders/*"),)
    assert found.expires_ms == (NOW + 60) * 1000
    assert str(found) == "jwt:anna"
    assert found.allows(Operation.PUBLISH, "orders/1")
    assert not found.allows(Operation.SUBSCRIBE, "orders/1")


@pytest.mark.parametrize(
    ("algorithm", "key"),
    [
        ("RS256", rsa_key),
        ("PS512", rsa_key),
        ("ES256", lambda: EC["P-256"]),
        ("ES384", lambda: EC["P-384"]),
        ("EdDSA", lambda: ED),
    ],
)
def test_each_algorithm_works_with_pem_and_with_a_jwks(
    algorithm: str, key: Callable[[], Any]
) -> None:
    shown = token(key(), algorithm, headers={"kid": "a"})
    for data in (pem(key()), jwks(jwk(algorithm, key(), kid="a"))):
        assert principal(shown, read_keys(data, [algorithm])).name == "anna"


def test_a_secret_is_possible_in_a_jwks_only() -> None:
    shown = token(SECRET, "HS256")
    assert principal(shown, read_keys(jwks(jwk("HS256", SECRET)))).name == "anna"
    with pytest.raises(BadKeyError):
        read_keys(SECRET)


def test_the_key_of_a_certificate_is_used() -> None:
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "issuer")])
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(EC["P-256"].public_key())
        .serial_number(1)
        .not_valid_before(datetime.fromtimestamp(NOW, UTC))
        .not_valid_after(datetime.fromtimestamp(NOW + 60, UTC))
        .sign(EC["P-256"], hashes.SHA256())
    )
    assert principal(token(), read_keys(made.public_bytes(Encoding.PEM))).name == "anna"


def test_the_kid_of_a_token_chooses_the_key() -> None:
    keys = read_keys(
        jwks(jwk("RS256", rsa_key(), kid="old"), jwk("RS256", rsa_key(2048, "new"), kid="new"))
    )
    for name, key in (("old", rsa_key()), ("new", rsa_key(2048, "new"))):
        assert principal(token(key, "RS256", headers={"kid": name}), keys)
        assert principal(token(key, "RS256"), keys)
    wrong = token(rsa_key(), "RS256", headers={"kid": "new"})
    assert reason(wrong, keys) == "the signature of the token is wrong"


def test_several_keys_in_pem_are_all_tried() -> None:
    keys = read_keys(pem(EC["P-384"]) + b"\n" + pem(EC["P-256"]))
    assert principal(token(), keys)
    assert principal(token(EC["P-384"], "ES384"), keys)


def test_roles_are_mapped_to_grants_and_unknown_roles_are_ignored() -> None:
    roles = {"writer": (Grant.parse("publish:*"),), "reader": (Grant.parse("subscribe:*"),)}
    shown = token(headrace=None, realm={"roles": ["writer", "cook", "reader", "writer"]})
    found = principal(shown, roles_claim="realm.roles", roles=roles)
    assert [str(grant) for grant in found.grants] == ["publish:*", "subscribe:*"]
    found = principal(token(headrace=None, scope="reader cook"), roles_claim="scope", roles=roles)
    assert [str(grant) for grant in found.grants] == ["subscribe:*"]
    dotted = token(headrace=None, **{"https://example.com/roles": ["reader"]})
    found = principal(dotted, roles_claim="https://example.com/roles", roles=roles)
    assert [str(grant) for grant in found.grants] == ["subscribe:*"]


def test_a_token_without_grants_allows_nothing() -> None:
    found = principal(token(headrace=None))
    assert found.grants == () and not found.allows(Operation.PUBLISH, "orders/1")


def test_the_claim_of_grants_can_be_turned_off() -> None:
    assert principal(token(headrace=["all:*"]), grants_claim="").grants == ()


def test_issuer_and_audience_are_checked_if_they_are_configured() -> None:
    assert principal(token(iss="a", aud="b"), issuer="a", audience="b")
    assert principal(token(aud=["x", "b"]), audience="b")
    assert "issuer" in reason(token(iss="b"), issuer="a")
    assert "issuer" in reason(token(), issuer="a")
    for wrong in ("x", ["x"], [], None, "bb", {"b": 1}):
        assert "audience" in reason(token_of(aud=wrong), audience="b")
    assert "audience" in reason(token(aud="b"))


def token_of(**claims: Any) -> str:
    """Return a token whose claims PyJWT may refuse to sign."""
    made = {name: value for name, value in (CLAIMS | claims).items() if value is not None}
    algorithm = get_default_algorithms()["ES256"]
    return by_hand({"alg": "ES256"}, made, lambda data: algorithm.sign(data, EC["P-256"]))


# Times


def test_a_token_is_valid_until_it_expires_and_a_little_longer_with_leeway() -> None:
    last = NOW_MS + 60_000
    assert principal(token(), now_ms=last - 1).expires_ms == last
    assert reason(token(), now_ms=last) == "the token has expired"
    assert principal(token(), now_ms=last + 4_999, leeway_s=5.0).expires_ms == last + 5_000
    assert reason(token(), now_ms=last + 5_000, leeway_s=5.0) == "the token has expired"


@pytest.mark.parametrize("claim", ["nbf", "iat"])
def test_a_token_of_the_future_is_not_valid_yet(claim: str) -> None:
    assert "not valid yet" in reason(token(**{claim: NOW + 10}))
    assert principal(token(**{claim: NOW + 10}), leeway_s=10.0)
    assert principal(token(**{claim: NOW}))


@pytest.mark.parametrize(
    "exp", [None, "", "1763000060", True, [], {}, -1, 10**300, float("inf"), float("nan"), 10**12]
)
def test_a_token_must_expire_at_a_real_time(exp: Any) -> None:
    assert "(exp)" in reason(token_of(exp=exp))


@pytest.mark.parametrize("claim", ["nbf", "iat"])
def test_other_times_are_checked_too(claim: str) -> None:
    assert f"({claim})" in reason(token_of(**{claim: "soon"}))


# Names and grants


@pytest.mark.parametrize(
    "sub", [None, "", 7, ["anna"], "x" * 256, "an\nna", "a\x1b[2J", "a\u202eb"]
)
def test_a_token_must_have_a_printable_subject(sub: Any) -> None:
    assert "(sub)" in reason(token_of(sub=sub))


@pytest.mark.parametrize(
    "grants",
    [
        ["publish:orders/*", "everything:*"],
        ["publish:"],
        [7],
        {"publish": "*"},
        7,
        ["publish:x"] * (GRANTS_MAX + 1),
    ],
)
def test_a_mistake_in_a_grant_refuses_the_whole_token(grants: Any) -> None:
    assert reason(token_of(headrace=grants))


# Attacks


def test_an_unsigned_token_is_refused() -> None:
    for name in ("none", "None", "NONE", "nOnE"):
        assert "algorithm" in reason(by_hand({"alg": name, "typ": "JWT"}, CLAIMS))
        assert "algorithm" in reason(by_hand({"alg": name, "typ": "JWT"}, CLAIMS) + "AAAA")


def hmac_of(secret: bytes, algorithm: str = "sha256") -> Callable[[bytes], bytes]:
    return lambda data: hmac.digest(secret, data, algorithm)


def test_a_public_key_is_never_a_secret() -> None:
    """The attacker knows the public key, and signs with it as if it were a secret."""
    for private, data in ((rsa_key(), pem(rsa_key())), (EC["P-256"], pem(EC["P-256"]))):
        keys = read_keys(data)
        forms = [
            data,
            data.strip(),
            private.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo),
        ]
        for secret in forms:
            shown = by_hand({"alg": "HS256"}, CLAIMS, hmac_of(secret))
            assert "algorithm" in reason(shown, keys)


def test_a_public_key_is_no_secret_beside_a_real_secret_either() -> None:
    keys = read_keys(
        jwks(jwk("RS256", rsa_key(), kid="rsa"), jwk("HS256", SECRET, kid="secret")),
        ["RS256", "HS256"],
    )
    for kid in ("rsa", "secret", None):
        header = {"alg": "HS256"} | ({"kid": kid} if kid else {})
        assert reason(by_hand(header, CLAIMS, hmac_of(pem(rsa_key()))), keys)
    assert "that of its key" in reason(token(SECRET, "HS256", headers={"kid": "rsa"}), keys)


def test_algorithms_are_pinned() -> None:
    keys = read_keys(pem(rsa_key()), ["RS512"])
    assert principal(token(rsa_key(), "RS512"), keys)
    for other in ("RS256", "PS512"):
        assert "algorithm" in reason(token(rsa_key(), other), keys)
    default = read_keys(pem(rsa_key()))
    assert "algorithm" in reason(token(rsa_key(), "RS384"), default)
    own = read_keys(jwks(jwk("RS256", rsa_key(), alg="RS512")))
    assert "algorithm" in reason(token(rsa_key(), "RS256"), own)


def test_an_unknown_kid_is_refused() -> None:
    keys = read_keys(jwks(jwk("ES256", EC["P-256"], kid="a")))
    assert "kid" in reason(token(headers={"kid": "b"}), keys)
    assert "kid" in reason(token(headers={"kid": "../../etc/passwd"}), keys)
    assert principal(token(headers={"kid": "anything"}))  # a key in PEM has no name


def test_keys_inside_a_token_are_ignored() -> None:
    other = ec.generate_private_key(ec.SECP256R1())
    headers = {
        "jwk": jwk("ES256", other),
        "jku": "https://attacker.example/keys",
        "x5u": "https://attacker.example/cert",
    }
    assert "signature" in reason(token(other, headers=headers))


def test_a_changed_token_is_refused() -> None:
    header, claims, signature = token().split(".")
    forged = encoded(json.dumps(CLAIMS | {"sub": "root"}).encode()).decode()
    assert "signature" in reason(f"{header}.{forged}.{signature}")
    assert reason(f"{header}.{claims}.")
    assert reason(f"{header}.{claims}")
    zeros = encoded(bytes(64)).decode()  # CVE-2022-21449: r = s = 0
    assert "signature" in reason(f"{header}.{claims}.{zeros}")


def test_unknown_critical_headers_and_detached_payloads_are_refused() -> None:
    algorithm = get_default_algorithms()["ES256"]
    for more in ({"crit": ["exp"]}, {"b64": False, "crit": ["b64"]}, {"b64": False}, {"b64": 0}):
        shown = by_hand(
            {"alg": "ES256"} | more, CLAIMS, lambda data: algorithm.sign(data, EC["P-256"])
        )
        assert reason(shown)


@pytest.mark.parametrize(
    "shown",
    [
        "",
        ".",
        "..",
        "...",
        "a.b.c",
        "hr_0123",
        "eyJhbGciOiJFUzI1NiJ9..",
        by_hand([], {}),
        by_hand({}, {}),
        by_hand({"alg": 7}, {}),
        by_hand({"alg": ["ES256"]}, {}),
        by_hand({"alg": "ES256", "kid": 7}, {}),
        by_hand(b"\xff\xfe", {}),
        by_hand(b"[" * 3000, {}),
        by_hand(b'{"alg":' + b"9" * 5000, {}),
        "é.é.é",
        "a.b.c" + "\0",
        "\ud800.\ud800.\ud800",
    ],
)
def test_what_is_no_token_is_refused(shown: str) -> None:
    assert reason(shown)


@pytest.mark.parametrize("claims", [[], 7, "text", None, b"", b"{", b"[" * 4000, b'{"a":' * 800])
def test_signed_nonsense_is_refused(claims: Any) -> None:
    algorithm = get_default_algorithms()["ES256"]
    shown = by_hand({"alg": "ES256"}, claims, lambda data: algorithm.sign(data, EC["P-256"]))
    assert "claims" in reason(shown)


def test_a_long_token_is_refused_before_it_is_decoded() -> None:
    assert "longer" in reason("a.b." + "c" * TOKEN_BYTES_MAX)
    assert "longer" in reason(token(more="x" * TOKEN_BYTES_MAX))


@given(st.text(max_size=300) | st.binary(max_size=300).map(lambda data: data.decode("latin-1")))
def test_any_text_is_refused_without_an_error(shown: str) -> None:
    assert isinstance(check(shown), str)


@given(st.integers(0, 2000), st.integers(1, 255))
def test_any_changed_character_is_refused(place: int, by: int) -> None:
    shown = token()
    place %= len(shown)
    changed = chr((ord(shown[place]) ^ by) & 0x7F)
    if changed != shown[place]:
        assert isinstance(check(shown[:place] + changed + shown[place + 1 :]), str)


def test_no_reason_repeats_control_characters_of_the_token() -> None:
    evil = "a\x1b[2J\nb"
    shown = [
        token_of(sub=evil),
        token_of(headrace=[f"publish:{evil}"]),
        token_of(headrace=[f"{evil}:x"]),
        by_hand({"alg": evil}, CLAIMS),
        by_hand({"alg": "ES256", "kid": evil}, CLAIMS),
    ]
    for one in shown:
        assert reason(one).isprintable()


# Keys that are refused


def test_weak_keys_are_refused() -> None:
    with pytest.raises(BadKeyError, match="1024 bits"):
        read_keys(pem(rsa_key(1024)))
    with pytest.raises(BadKeyError, match="31 bytes"):
        read_keys(jwks(jwk("HS256", SECRET[:31])))
    with pytest.raises(BadKeyError, match="HS512"):
        read_keys(jwks(jwk("HS256", SECRET)), ["HS512"])
    with pytest.raises(BadKeyError):
        read_keys(pem(ec.generate_private_key(ec.SECP192R1())))


def test_private_keys_are_refused() -> None:
    private = EC["P-256"].private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    with pytest.raises(BadKeyError, match="private key"):
        read_keys(private)
    found = get_default_algorithms()["RS256"].to_jwk(rsa_key(), as_dict=True)
    with pytest.raises(BadKeyError, match="private key"):
        read_keys(jwks(found))


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "neither PEM nor a JWKS"),
        (b"\xff\xfe", "neither PEM nor a JWKS"),
        (b"[" * 10_000, "neither PEM nor a JWKS"),
        (b"[]", "no JWKS"),
        (b'{"keys": 7}', "no JWKS"),
        (b'{"keys": [7]}', "no JWKS"),
        (b'{"keys": []}', "no key for signatures"),
        (b'{"keys": [{"kty": "EC"}]}', "cannot be read"),
        (b'{"keys": [{"kty": "oct", "k": 7}]}', "cannot be read"),
        (b'{"keys": [{"kty": "RSA", "n": "AQ", "e": "AQAB", "alg": "none"}]}', "not supported"),
        (b'{"keys": [{"kty": "EC", "kid": 7}]}', "kid"),
        (b"-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n", "cannot be read"),
        (b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", "cannot be read"),
        (b"-----BEGIN PUBLIC KEY-----\nAAAA\n", "no complete key"),
    ],
)
def test_a_wrong_file_is_refused_with_a_sentence(data: bytes, said: str) -> None:
    with pytest.raises(BadKeyError, match=said):
        read_keys(data)


def test_algorithms_must_fit_the_keys() -> None:
    with pytest.raises(BadKeyError, match="type that the algorithm ES256"):
        read_keys(pem(rsa_key()), ["RS256", "ES256"])
    with pytest.raises(BadKeyError, match="no algorithm"):
        read_keys(pem(rsa_key()), ["none"])
    with pytest.raises(BadKeyError, match="algorithm ES256"):
        read_keys(jwks(jwk("RS256", rsa_key(), alg="ES256")))


def test_keys_for_encryption_are_left_out() -> None:
    encryption = jwk("RS256", rsa_key(), kid="a", use="enc")
    with pytest.raises(BadKeyError, match="no key for signatures"):
        read_keys(jwks(encryption))
    keys = read_keys(jwks(encryption, jwk("ES256", EC["P-256"], kid="b")))
    assert [key.id for key in keys] == ["b"]


def test_ambiguous_and_too_many_keys_are_refused() -> None:
    key = jwk("ES256", EC["P-256"], kid="a")
    with pytest.raises(BadKeyError, match="same kid"):
        read_keys(jwks(key, key))
    many = [jwk("ES256", EC["P-256"], kid=str(number)) for number in range(KEYS_MAX + 1)]
    with pytest.raises(BadKeyError, match="at most"):
        read_keys(jwks(*many))


def test_a_key_never_appears_in_a_text() -> None:
    keys = read_keys(jwks(jwk("HS256", SECRET, kid="a")))
    assert SECRET.decode() not in repr(keys)


def test_the_form_of_a_jwt_is_recognised() -> None:
    assert is_jwt(token())
    assert not is_jwt("hr_" + hashlib.sha256(b"").hexdigest())
