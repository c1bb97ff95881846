"""Stored tokens: made, found, revoked, and a damaged file that is never taken for an empty one."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.access import tokens
from headrace.access.operations import Operation
from headrace.access.tokens import KnownToken, TokenIndex
from headrace.errors import BadGrantError, BadTokenError, DamagedTokensError

TOKEN = tokens.make_token(bytes(32))
NOW = 1_800_000_000_000


def one(name="ci", token=TOKEN, grants=("publish:orders/*",), expires_ms=None, known=()):
    return tokens.added(known, name, token, grants, now_ms=NOW, expires_ms=expires_ms)


def index(stored, key=b"key"):
    return TokenIndex(
        [KnownToken(token.sha256, tokens.principal_of(token)) for token in stored], key
    )


def test_a_token_is_found_by_itself_alone():
    found = index(one()).find(TOKEN).principal
    assert str(found) == "token:ci"
    assert found.allows(Operation.PUBLISH, "orders/a")
    assert not found.allows(Operation.SUBSCRIBE, "orders/a")
    for wrong in ("", "ci", TOKEN[:-1], TOKEN.lower(), f"{TOKEN} ", "\ud800", "x" * 100_000):
        assert index(one()).find(wrong) is None
    assert index(one()).find(tokens.hash_of(TOKEN)) is None


def test_the_duration_of_a_search_depends_on_a_secret_of_the_process():
    """A search compares keyed hashes: a sender cannot choose which part of one is equal."""
    first, second = (index(one(), key=bytes([n]) * 32) for n in (1, 2))
    assert first._tokens.keys().isdisjoint(second._tokens)
    assert first.find(TOKEN) is not None
    assert second.find(TOKEN) is not None


def test_a_token_is_in_no_file():
    assert TOKEN.encode() not in tokens.encode(one())
    assert tokens.hash_of(TOKEN).encode() in tokens.encode(one())


def test_a_file_is_read_as_it_was_written():
    stored = tokens.revoked(one("b", "hr_b", known=one(expires_ms=NOW + 1)), "b", NOW + 5)
    assert tokens.decode(tokens.encode(stored)) == stored
    assert [token.state(NOW) for token in stored] == ["valid", "revoked"]
    assert [token.state(NOW + 1) for token in stored] == ["expired", "revoked"]


def test_a_file_without_tokens_is_sound():
    assert tokens.decode(tokens.encode(())) == ()


@given(st.integers(0, 10_000), st.integers(1, 255))
def test_no_damaged_byte_passes(position, flip):
    whole = bytearray(tokens.encode(one(expires_ms=NOW + 9)))
    whole[position % len(whole)] ^= flip
    try:
        found = tokens.decode(bytes(whole))
    except DamagedTokensError:
        return
    assert found == one(expires_ms=NOW + 9)  # the byte was white space


@given(st.integers(0, 1000))
def test_no_shortened_file_passes(size):
    whole = tokens.encode(one()).rstrip()
    with pytest.raises(DamagedTokensError):
        tokens.decode(whole[: size % len(whole)])


def test_a_grant_that_this_version_does_not_know_closes_the_door():
    stored = msgspec.structs.replace(one()[0], grants=("fly:*",))
    with pytest.raises(DamagedTokensError, match="fly"):
        tokens.decode(tokens.encode((stored,)))


def test_a_file_of_a_later_version_is_not_guessed_at():
    data = tokens.encode(one()).replace(b'"format": 1', b'"format": 2')
    with pytest.raises(DamagedTokensError, match="format is 2"):
        tokens.decode(data)


def test_a_name_is_taken_until_its_token_is_revoked():
    with pytest.raises(BadTokenError, match="revoke it first"):
        one(known=one())
    stored = one(token="hr_new", known=tokens.revoked(one(), "ci", NOW))
    assert [token.sha256 for token in stored] == [tokens.hash_of("hr_new")]
    stored = one(token="hr_new", known=one(expires_ms=NOW))
    assert len(stored) == 1


def test_revoking_is_said_once():
    stored = tokens.revoked(one(), "ci", NOW + 1)
    assert tokens.revoked(stored, "ci", NOW + 2) == stored
    with pytest.raises(BadTokenError, match='no token "other"'):
        tokens.revoked(stored, "other", NOW)


def test_pruning_leaves_valid_tokens():
    stored = one("b", "hr_b", known=one(expires_ms=NOW))
    assert [token.name for token in tokens.pruned(stored, NOW)] == ["b"]


@pytest.mark.parametrize("name", ["", " a", "a\n", "a\x1b[2J", "a\x9b2J", "\u202eevil", "x" * 256])
def test_a_name_that_cannot_be_printed_is_refused(name):
    with pytest.raises(BadTokenError):
        one(name)


@pytest.mark.parametrize("grants", [(), ("publish",), ("publish:a",) * 101])
def test_a_token_needs_sound_grants(grants):
    with pytest.raises(BadGrantError):
        one(grants=grants)


def test_tokens_are_limited(monkeypatch):
    monkeypatch.setattr(tokens, "TOKENS_MAX", 1)
    with pytest.raises(BadTokenError, match="prune"):
        one("b", "hr_b", known=one())


def test_an_expired_principal_says_so():
    principal = tokens.principal_of(one(expires_ms=NOW + 5)[0])
    assert not principal.is_expired(NOW + 4)
    assert principal.is_expired(NOW + 5)
    assert not tokens.principal_of(one()[0]).is_expired(NOW + 10**15)
