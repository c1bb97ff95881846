"""A hook for `conftest.py`: the temporary directories of test runs that begin and end at the same time."""

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Unlock the run's temporary directory before pytest deletes the directory, and not afterwards.

    Pytest deletes `pytest-7` after a run without failures, then old directories of other runs, and then the
    lock `pytest-7/.lock`. Meanwhile another run may have created its own `pytest-7` and locked it. Without
    its lock, the end of a third run deletes that directory under the servers that run in it.
    """
    factory = session.config._tmp_path_factory  # type: ignore[attr-defined]
    if hasattr(factory, "_exit_stack"):  # other versions of pytest unlock at the end of the process
        factory._exit_stack.close()
