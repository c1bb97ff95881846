"""The direction of imports between the layers, read from the source; and what the server loads."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "src" / "headrace"

BASE = {"model", "errors", "printing"}
MAY_IMPORT = {
    "errors": set(),
    "printing": set(),
    "model": {"errors"},
    "json_limits": {"errors"},
    "logux_envelope": BASE | {"json_limits"},
    "channel_envelope": BASE | {"json_limits"},
    "reducers": {"errors", "json_limits", "channel_envelope"},
    "config_values": BASE,
    "config_setting": set(),
    "config_protocols": {"config_setting"},
    "config_pipeline": {"config_setting"},
    "config": BASE | {"config_values", "config_setting", "config_protocols", "config_pipeline"},
    "settings": BASE | {"config", "config_values", "config_setting", "config_protocols"},
    "wire": BASE | {"json_limits", "logux_envelope", "channel_envelope"},
    "session": BASE | {"wire", "logux_envelope", "channel_envelope"},
    "log": BASE | {"config", "logux_envelope", "channel_envelope"},
    "broker": BASE | {"config", "log", "logux_envelope", "channel_envelope", "reducers"},
    "client": BASE | {"wire", "session", "logux_envelope", "channel_envelope", "lake"},
    "server": BASE
    | {"config", "config_values", "wire", "session", "broker", "log", "logux_envelope", ""}
    | {"channel_envelope", "reducers", "config_protocols", "settings"},
    "cli": BASE
    | {"config", "config_values", "config_protocols", "settings", "client", "server", "log", ""}
    | {"config_pipeline", "pipeline", "spark", "logux_envelope"},
    "spark": BASE | {"log", "logux_envelope", "channel_envelope", "reducers"},
    "lake": BASE,
    "pipeline": BASE
    | {"lake", "spark", "log", "reducers", "channel_envelope", "logux_envelope", "json_limits"},
    "testing": BASE | {"config", "client", "server", "log", "broker", "session", "wire"},
    "channels": {"client"},
    "": {"client", "channels"},
    "__main__": {"cli"},
}
"""What each part of the package may import of the others; "" is the package itself."""

MAY_NOT_IMPORT = {
    "wire": {"asyncio", "socket", "threading", "time", "os"},
    "session": {"asyncio", "socket", "threading", "time", "os"},
    "broker": {"socket"},
}
"""Ways to the outside that a layer must not know: time and bytes are given to it."""

OF_EXTRAS = {
    "pyspark": {"spark", "pipeline"},
    "pandas": {"spark", "pipeline"},
    "pyarrow": {"spark", "pipeline", "lake"},
    "numpy": {"spark", "pipeline", "lake"},
    "deltalake": {"lake"},
    "pyiceberg": {"lake"},
    "sqlalchemy": {"lake"},
}
"""What extras install, and who may rely on it: everything else works without."""

MODULES = sorted(PACKAGE.rglob("*.py"))


def layer_of(module: Path) -> str:
    first = module.relative_to(PACKAGE).parts[0]
    return "" if first == "__init__.py" else first.removesuffix(".py")


def imports_of(module: Path) -> Iterator[str]:
    """Full names of what a module imports, wherever in it, also only for type checkers."""
    for node in ast.walk(ast.parse(module.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} has a relative import"
            if node.module == "headrace":
                yield from (f"headrace.{alias.name}" for alias in node.names)
            else:
                yield node.module or ""


def layer_named(name: str) -> str:
    """The layer of a full name below `headrace`; names the package itself defines are layer ""."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in MAY_IMPORT else ""


def test_there_is_something_to_check():
    assert len(MODULES) > 20


@pytest.mark.parametrize("module", MODULES, ids=lambda module: str(module.relative_to(PACKAGE)))
def test_a_module_imports_only_from_the_layers_below_it(module):
    layer = layer_of(module)
    assert layer in MAY_IMPORT, f"say in this test what {layer} may import"
    names = set(imports_of(module))
    ours = {name for name in names if name.split(".")[0] == "headrace"}
    upward = {name for name in ours if layer_named(name) not in MAY_IMPORT[layer] | {layer}}
    outside = {name for name in names if name.split(".")[0] in MAY_NOT_IMPORT.get(layer, set())}
    assert not upward
    assert not outside


@pytest.mark.parametrize("module", MODULES, ids=lambda module: str(module.relative_to(PACKAGE)))
def test_only_those_import_what_an_extra_installs_who_need_it(module):
    for name in {name.split(".")[0] for name in imports_of(module)}:
        assert layer_of(module) in OF_EXTRAS.get(name, {layer_of(module)}), name


def test_nothing_the_server_loads_brings_in_what_an_extra_installs():
    script = "import sys, headrace.cli.main, headrace.server.server; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert not {name.split(".")[0] for name in done.stdout.split()} & OF_EXTRAS.keys()
