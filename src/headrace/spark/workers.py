"""Check that the Python of Spark's workers has the needed modules, without starting a worker."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.errors import HeadraceError

if TYPE_CHECKING:
    from pyspark import SparkContext

NEEDED = ("headrace", "crc32c", "msgspec", "numpy", "pyarrow")
"""Modules that workers import. Spark itself provides `pyspark`."""

_PROBE = (
    "import json, sys\n"
    "from importlib.util import find_spec\n"
    "missing = [name for name in sys.argv[1:] if find_spec(name) is None]\n"
    "print(json.dumps([missing, list(sys.version_info[:2])]))\n"
)
_PROBE_S = 30.0
"""Timeout of the probe. A Python that takes longer is accepted."""

_good: set[tuple[str, ...]] = set()
"""Interpreters that passed the check, because each new Spark session registers the format again."""


class WorkerPythonError(HeadraceError):
    """Spark's workers run a Python without Headrace: install it there, or set PYSPARK_PYTHON."""


def check_workers(context: "SparkContext") -> None:
    """Raise `WorkerPythonError` if every use of the format would fail.

    Spark plans reads of the format in a worker on the driver's machine, on clusters too, so this checks the
    Python there. It does not start executors on other machines.
    """
    from pyspark import SparkFiles

    includes = [
        str(Path(SparkFiles.getRootDirectory(), name)) for name in context._python_includes or ()
    ]
    check_python(
        context.pythonExec,
        includes,
        context.environment,
        is_local=str(context.master).startswith("local"),
    )


def check_python(
    name: str, includes: Sequence[str], environment: Mapping[str, str], *, is_local: bool
) -> None:
    """Check one interpreter; `includes` are the entries that `addPyFile` adds to its path."""
    found = shutil.which(name)
    if found is None:
        if not is_local:
            return  # the program may be in an archive that only executors unpack
        raise WorkerPythonError(
            f"Spark's workers are to run {name!r}, and there is no such program: {_advice()}"
        )
    if _is_ours(found) or (found, *includes) in _good:
        return
    told = _probe(found, includes, environment)
    if told is None:
        return
    missing, version = told
    if missing:
        raise WorkerPythonError(
            f"Spark's workers run {found}, which has no {' and no '.join(missing)}: {_advice()}, or install "
            "'headrace[spark]' there"
        )
    if version != list(sys.version_info[:2]):
        theirs, ours = (".".join(map(str, one)) for one in (version, sys.version_info[:2]))
        raise WorkerPythonError(
            f"Spark's workers run {found}, which is Python {theirs}, and this is Python {ours}: {_advice()}"
        )
    _good.add((found, *includes))


def _advice() -> str:
    return f"set PYSPARK_PYTHON={sys.executable} before the session starts"


def _is_ours(found: str) -> bool:
    """True if `found` is this Python. A link from another directory may belong to another environment."""
    here = Path(sys.executable)
    there = Path(found).absolute()
    return there.parent == here.parent and there.samefile(here)


def _probe(
    python: str, includes: Sequence[str], environment: Mapping[str, str]
) -> tuple[list[str], list[int]] | None:
    """Return the missing modules and the version; None if the interpreter does not answer."""
    environ = {**os.environ, **environment}
    path = [*includes, *filter(None, [environ.get("PYTHONPATH")])]
    try:
        done = subprocess.run(
            [python, "-c", _PROBE, *NEEDED],
            env=environ | {"PYTHONPATH": os.pathsep.join(path)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_PROBE_S,
            check=False,
        )
        missing, version = json.loads(done.stdout)
    except (OSError, subprocess.TimeoutExpired, ValueError, TypeError):
        return None
    return missing, version
