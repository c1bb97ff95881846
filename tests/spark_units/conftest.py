"""Fixtures for tests of the parts that need no Java: the log that the tests of `reader` use too."""

from tests.reader.conftest import filled, log

__all__ = ["filled", "log"]
