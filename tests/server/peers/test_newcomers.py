"""Places of peers that are not known yet: which peer gives way when all places are taken."""

import random
from collections import Counter

import pytest

from headrace.server.peers.newcomers import WAIT_S_MIN
from tests.fakes.places import Places

ENEMY, NEIGHBOUR = "192.0.2.1", "192.0.2.2"


class Peer:
    def __init__(self, number: int = 0) -> None:
        self.number = number
        self.gave_way = False

    def give_way(self) -> None:
        assert not self.gave_way
        self.gave_way = True


def taken(places: Places, count: int, address: str = ENEMY) -> list[Peer]:
    """Return peers of an address that have taken this many places, one after the other."""
    peers = [Peer(number) for number in range(count)]
    for peer in peers:
        assert places.newcomers.enter(peer, address)
    return peers


def test_a_peer_of_another_address_gets_the_place_of_the_longest_waiting() -> None:
    places = Places(8)
    enemies = taken(places, 8)
    for number in range(3):
        assert places.newcomers.enter(Peer(), NEIGHBOUR)
        assert [one.gave_way for one in enemies] == [True] * (number + 1) + [False] * (7 - number)
    assert len(places.newcomers) == 8
    assert places.applied == ["handshakes_max address"] * 3


def test_an_address_that_holds_all_places_delays_only_itself() -> None:
    places = Places(8)
    enemies = taken(places, 8)
    assert not places.newcomers.enter(Peer(), ENEMY)
    assert places.applied == ["handshakes_max server"]
    places.now_s += WAIT_S_MIN
    assert places.newcomers.enter(Peer(), ENEMY)
    assert [one.number for one in enemies if one.gave_way] == [0]


def test_addresses_with_equal_shares_keep_them_for_a_while() -> None:
    places = Places(8)
    taken(places, 4, ENEMY)
    taken(places, 4, NEIGHBOUR)
    assert not places.newcomers.enter(Peer(), NEIGHBOUR)
    assert places.newcomers.enter(Peer(), "192.0.2.3")
    places.now_s += WAIT_S_MIN
    assert places.newcomers.enter(Peer(), NEIGHBOUR)


def test_a_crowd_of_addresses_gives_way_only_after_a_while() -> None:
    places = Places(8)
    first, *others = (taken(places, 1, f"192.0.2.{number}")[0] for number in range(8))
    assert not places.newcomers.enter(Peer(), "198.51.100.1")
    places.now_s += WAIT_S_MIN
    assert places.newcomers.enter(Peer(), "198.51.100.1")
    assert first.gave_way and not any(one.gave_way for one in others)


def test_a_network_of_ipv6_addresses_counts_as_one_address() -> None:
    places = Places(8)
    enemies = [taken(places, 1, f"2001:db8::{number:x}")[0] for number in range(8)]
    assert not places.newcomers.enter(Peer(), "2001:db8::ffff")
    assert places.newcomers.enter(Peer(), "2001:db8:0:1::1")
    assert [one.gave_way for one in enemies] == [True] + [False] * 7


def test_a_peer_that_left_holds_no_place() -> None:
    places = Places(2)
    first, second = taken(places, 2)
    places.newcomers.leave(first)
    places.newcomers.leave(first)
    assert places.newcomers.enter(Peer(), ENEMY)
    assert not second.gave_way and len(places.newcomers) == 2
    assert not Places(0).newcomers.has_room(ENEMY), "nobody can give way"


@pytest.mark.parametrize("seed", range(20))
def test_the_address_with_most_places_always_gives_way(seed: int) -> None:
    """A long random sequence, against a count of everybody."""
    choose = random.Random(seed)
    places = Places(20)
    held: list[tuple[str, Peer]] = []
    for _ in range(500):
        places.now_s += choose.choice((0.0, 0.0, 0.3))
        if held and choose.random() < 0.3:
            one = choose.choice(held)
            held.remove(one)
            places.newcomers.leave(one[1])
            continue
        address = f"192.0.2.{min(choose.randrange(10), choose.randrange(10))}"
        before, peer = Counter(one for one, _ in held), Peer()
        if not places.newcomers.enter(peer, address):
            assert len(held) == 20 and max(before.values()) <= before[address] + 1
            continue
        gone = [one for one in held if one[1].gave_way]
        assert len(gone) == (len(held) == 20)
        for one in gone:
            assert before[one[0]] == max(before.values())
            assert one == next(other for other in held if other[0] == one[0]), "it waited longest"
            held.remove(one)
        held.append((address, peer))
        assert len(places.newcomers) == len(held) <= 20
