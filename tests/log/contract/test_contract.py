"""The embedded store fulfils the contract of stores, in each durability."""

import pytest

from headrace.model import Durability
from tests.log.contract.notes import NotesContract
from tests.log.contract.topics import Harness, StoreContract


class EmbeddedHarness(Harness):
    def __init__(self, open_store, durability: Durability) -> None:
        self._open = open_store
        self.persistent = durability is not Durability.MEMORY
        self.prefix = "" if durability is Durability.SYNCED else f"{durability}/"
        self._steps = open_store()

    @property
    def store(self):
        return self._steps.store

    def flush(self) -> None:
        self._steps.runner.run()

    def settle(self) -> None:
        self._steps.settle()

    def wait(self, ms: int) -> None:
        self._steps.clock.ms += ms

    def restart(self, *, clean: bool) -> None:
        clock = self._steps.clock
        if clean:
            self._steps.close()
        self._steps = self._open(clock=clock)
        assert self._steps.reports == []


class TestSynced(StoreContract, NotesContract):
    @pytest.fixture
    def harness(self, open_store):
        return EmbeddedHarness(open_store, Durability.SYNCED)


class TestWritten(StoreContract, NotesContract):
    @pytest.fixture
    def harness(self, open_store):
        return EmbeddedHarness(open_store, Durability.WRITTEN)


class TestMemory(StoreContract):
    @pytest.fixture
    def harness(self, open_store):
        return EmbeddedHarness(open_store, Durability.MEMORY)
