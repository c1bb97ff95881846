"""Short pauses between the attempts of a request: in these tests, many attempts fail."""

import pytest

from headrace.lake.storage import objects, options


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (objects, options):
        monkeypatch.setattr(module, "BACKOFF_S", 0.01)
        monkeypatch.setattr(module, "BACKOFF_S_MAX", 0.5)
