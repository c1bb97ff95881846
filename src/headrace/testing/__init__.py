"""Tools for tests of Headrace and of applications that use it: a server process and a log checker."""

from headrace.testing.checker import Kind, LogChecker, Violation
from headrace.testing.server import ServerFailedError, ServerProcess, hold_port, wait_until

__all__ = [
    "Kind",
    "LogChecker",
    "ServerFailedError",
    "ServerProcess",
    "Violation",
    "hold_port",
    "wait_until",
]
