"""The embedded store fulfils the contract of stores, in each durability."""

import pytest

from headrace.model import Durability
from tests.log.contract.closing import ClosingContract
from tests.log.contract.notes import NotesContract
from tests.log.contract.topics import Harness, StoreContract


class TestSynced(StoreContract, NotesContract, ClosingContract):
    @pytest.fixture
    def harness(self, open_store):
        return Harness(open_store, Durability.SYNCED)


class TestWritten(StoreContract, NotesContract, ClosingContract):
    @pytest.fixture
    def harness(self, open_store):
        return Harness(open_store, Durability.WRITTEN)


class TestMemory(StoreContract):
    @pytest.fixture
    def harness(self, open_store):
        return Harness(open_store, Durability.MEMORY)
