"""The audit trail: who did which administrative action when, as records of the topic `$audit`.

A record is a JSON object with `time_ms`, `action`, `principal`, `address` and the facts of the action. It is
appended in the step in which the action begins, so no commit has the action without its record. Elsewhere:
the actions themselves, and whether somebody may do them (`server/access.py`).
"""

import json
from collections.abc import Callable
from typing import NamedTuple

from headrace.errors import StoreFailedError
from headrace.log.records import pack_record
from headrace.log.store import Store
from headrace.model import AUDIT_TOPIC, PAYLOAD_BYTES_MAX

FACT_CHARACTERS_MAX = 1024
"""Longest text in a record. Names are shorter; a longer text is cut."""
LISTED_MAX = 100
"""Most entries of a list in a record, such as topics; `…` follows if there are more."""


class Actor(NamedTuple):
    """Principal and address that an action comes from."""

    principal: str
    """Kind and name of the principal, such as `token:ops`."""
    address: str
    """Host and port of the peer; empty for the server's own machine, such as a signal."""


OPERATOR = Actor("operator", "")
"""Somebody who may change the files of the server, or send signals to its process."""


class Audit:
    def __init__(self, store: Store, now_ms: Callable[[], int]) -> None:
        self._store = store
        self._now_ms = now_ms

    def record(self, action: str, who: Actor, **facts: object) -> None:
        """Append a record of an action that begins in this step of the loop."""
        entry = {
            "time_ms": self._now_ms(),
            "action": action,
            "principal": who.principal,
            "address": who.address,
        }
        payload = _encoded(entry | {name: _short(fact) for name, fact in facts.items()})
        assert len(payload) <= PAYLOAD_BYTES_MAX
        try:
            self._store.append({self._store.topic(AUDIT_TOPIC): [pack_record(payload)]}, _done)
        except StoreFailedError:
            return  # the action fails too: a failed store takes no change


def _encoded(entry: dict[str, object]) -> bytes:
    return json.dumps(entry, ensure_ascii=False).encode("utf-8", "surrogatepass")


def _short(fact: object) -> object:
    if isinstance(fact, str):
        return fact if len(fact) <= FACT_CHARACTERS_MAX else fact[:FACT_CHARACTERS_MAX] + "…"
    if isinstance(fact, list):
        listed = [_short(one) for one in fact[:LISTED_MAX]]
        return listed if len(fact) <= LISTED_MAX else [*listed, "…"]
    return fact


def _done() -> None:
    """Do nothing: nobody waits for a record of the trail alone."""
