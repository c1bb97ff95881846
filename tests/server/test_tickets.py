"""Tickets: good once and for a short time, and limited in number."""

from headrace.access.grants import parse_all
from headrace.access.principals import Kind, Principal
from headrace.server import tickets as limits
from headrace.server.tickets import TICKET_S, TICKETS_MAX, TICKETS_PER_PRINCIPAL_MAX, Tickets

ANNA = Principal(Kind.TOKEN, "anna", parse_all(["publish:*"]))
BERT = Principal(Kind.TOKEN, "bert", parse_all(["publish:*"]))


def issued(tickets: Tickets, principal: Principal, now_s: float = 0.0) -> str:
    found = tickets.issue(principal, now_s)
    assert found is not None
    return found


def test_a_ticket_is_good_once_for_its_principal() -> None:
    tickets = Tickets()
    of_anna, of_bert = issued(tickets, ANNA), issued(tickets, BERT)
    assert of_anna != of_bert and len(of_anna) >= 43
    assert tickets.redeem(of_bert, 1.0) is BERT
    assert tickets.redeem(of_bert, 1.0) is None
    assert tickets.redeem(of_anna, 1.0) is ANNA
    assert len(tickets) == 0


def test_a_ticket_expires() -> None:
    tickets = Tickets()
    first, second = issued(tickets, ANNA, 0.0), issued(tickets, ANNA, 1.0)
    assert tickets.redeem(first, TICKET_S) is None
    assert tickets.redeem(second, TICKET_S) is ANNA
    assert len(tickets) == 0


def test_unknown_tickets_are_refused() -> None:
    tickets = Tickets()
    known = issued(tickets, ANNA)
    for wrong in ("", known[:-1], known + "x", known.swapcase(), "x" * 1_000_000, "\ud800", "é"):
        assert tickets.redeem(wrong, 0.0) is None
    assert tickets.redeem(known, 0.0) is ANNA


def test_tickets_are_limited_by_principal_and_old_ones_make_room() -> None:
    tickets = Tickets()
    for _ in range(TICKETS_PER_PRINCIPAL_MAX):
        issued(tickets, Principal(Kind.TOKEN, "anna", ()))
    assert tickets.issue(ANNA, 0.0) is None
    assert tickets.issue(BERT, 0.0) is not None
    assert tickets.issue(ANNA, TICKET_S) is not None
    assert len(tickets) == 1


def test_tickets_are_limited_in_all() -> None:
    tickets = Tickets()
    for number in range(TICKETS_MAX):
        issued(tickets, Principal(Kind.TOKEN, str(number // 500), ()))
    assert tickets.issue(ANNA, 0.0) is None
    assert len(tickets) == limits.TICKETS_MAX
