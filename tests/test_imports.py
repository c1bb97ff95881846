"""The direction of imports between the layers, read from the source; and the server's modules."""

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
    "model": {"errors", "printing"},
    "picows_adapter": {"errors"},
    "tls": {"errors", "printing"},
    "tokens": BASE,
    "access": BASE,
    "payload": BASE,
    "config": BASE | {"access"},
    "wire": BASE | {"payload"},
    "session": BASE | {"wire", "payload"},
    "log": BASE | {"config"},
    "broker": BASE | {"config", "log", "payload"},
    "lake": BASE,
    "client": BASE | {"picows_adapter", "tls", "tokens", "wire", "session", "payload", "lake"},
    "server": BASE
    | {
        "access",
        "picows_adapter",
        "tls",
        "config",
        "payload",
        "wire",
        "session",
        "broker",
        "log",
        "",
    },
    "reader": BASE | {"log", "tls", "tokens"},
    "spark": BASE | {"reader", "log", "payload"},
    "pipeline": BASE | {"config", "lake", "reader", "spark", "log", "payload"},
    "cli": BASE
    | {"access", "tls", "tokens", "config", "payload", "client", "server"}
    | {"log", "spark", "pipeline", ""},
    "testing": BASE | {"config", "payload", "client", "server", "log", "broker", "session", "wire"},
    "channels": {"client"},
    "": {"client", "channels"},
    "__main__": {"cli"},
}
"""Parts of the package that each part may import; "" is the package itself."""

MAY_NOT_IMPORT = {
    "access": {"asyncio", "socket", "threading", "time", "os"},
    "wire": {"asyncio", "socket", "threading", "time", "os"},
    "session": {"asyncio", "socket", "threading", "time", "os"},
    "broker": {"socket"},
}
"""Modules for input, output and time that a layer must not import: it gets time and bytes as arguments."""

ONLY_IN = {
    "picows": {"picows_adapter"},
    "uvicorn": {"server"},
    "starlette": {"server"},
    "httptools": {"server"},
    "prometheus_client": {"server"},
    "psycopg": {"server"},
}
"""Packages whose API, or internals, only one part of the package knows."""

OF_EXTRAS = {
    "pyspark": {"spark", "pipeline"},
    "pandas": {"spark", "pipeline"},
    "pyarrow": {"reader", "spark", "pipeline", "lake"},
    "numpy": {"reader", "spark", "pipeline", "lake"},
    "deltalake": {"lake"},
    "pyiceberg": {"lake"},
    "sqlalchemy": {"lake"},
    "obstore": {"lake"},
    "hdfs_native": {"lake"},
    "botocore": {"lake"},
    "jwt": {"access"},
    "cryptography": {"access"},
}
"""Packages of extras, and the layers that may import them; everything else works without them."""

DOORS = {
    ("broker", "log"): {"store", "records"},
    ("reader", "log"): {"layout", "records", "batch.blocks", "read.index", "read.raw"},
    ("spark", "log"): set(),
    ("pipeline", "log"): set(),
    ("pipeline.audit", "log"): {
        *("layout", "records", "catalogue.rows", "read.index"),
        *("verify.checks", "verify.verify"),
    },
    ("server", "log"): {
        *("records", "store", "embedded", "layout", "disk", "saved_time"),
        *("batch.staging", "read.index", "read.raw", "quota", "shared_file"),
    },
    ("client", "session"): {
        *("client", "figg", "wombat", "logux.client", "channel.client", "channel.membership"),
        *("topics.client", "topics.events", "topics.window"),
    },
    ("server", "session"): {
        *("server", "figg", "wombat", "logux.server", "logux.server5", "channel.server"),
    },
    ("cli", "server"): {"server"},
    ("cli.doctor", "server"): {"access", "jwt", "metrics.metrics", "tls.context"},
    ("cli", "client"): {"", "connect"},
}
"""Modules of a layer that a part of another one may import; the longest name of an importing part counts."""

BUILDS_THE_SERVER = "server.server"
"""The module that puts the layers together: no door is closed to it."""

PROTOCOLS = {"figg", "wombat", "logux", "channel"}
SHARED_FORM = ("wire.channel", "wire.logux.messages")
"""Messages of channels are arrays in JSON or MessagePack, packed by the same functions as those of Logux."""

MODULES = sorted(PACKAGE.rglob("*.py"))


def layer_of(module: Path) -> str:
    first = module.relative_to(PACKAGE).parts[0]
    return "" if first == "__init__.py" else first.removesuffix(".py")


def imports_of(module: Path) -> Iterator[str]:
    """Yield the full names that a module imports anywhere, including imports for type checkers only."""
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
    """Return the layer of a full name below `headrace`; names defined by the package itself are layer ""."""
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
def test_a_module_enters_another_layer_through_its_doors(module):
    name = dotted(module)
    for imported in modules_imported_by(module):
        layer, _, inside = imported.partition(".")
        parts = [part for part, of in DOORS if of == layer and f"{name}.".startswith(f"{part}.")]
        if parts and name != BUILDS_THE_SERVER:
            assert inside in DOORS[max(parts, key=len), layer], f"{name} imports {imported}"


def test_every_door_is_used():
    for (part, layer), doors in DOORS.items():
        used = {
            imported
            for module in MODULES
            if f"{dotted(module)}.".startswith(f"{part}.")
            for imported in modules_imported_by(module)
        }
        assert {".".join(filter(None, [layer, door])) for door in doors} <= used


@pytest.mark.parametrize("module", MODULES, ids=lambda module: str(module.relative_to(PACKAGE)))
def test_a_protocol_knows_no_other_protocol(module):
    own = PROTOCOLS & set(dotted(module).split("."))
    others = {
        imported
        for imported in modules_imported_by(module)
        if own
        and (PROTOCOLS & set(imported.split("."))) - own
        and (dotted(module), imported) != SHARED_FORM
    }
    assert not others


def dotted(module: Path) -> str:
    """Return the name of a module below the package, such as `log.commit.journal`."""
    parts = module.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


NAMES = {dotted(module) for module in MODULES}


def modules_imported_by(module: Path) -> Iterator[str]:
    """Yield the names of our modules that a module imports, from whatever they define."""
    for node in ast.walk(ast.parse(module.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("headrace."):
            name = (node.module or "").removeprefix("headrace.")
            for alias in node.names:
                yield f"{name}.{alias.name}" if f"{name}.{alias.name}" in NAMES else name


RDDS = {"sparkContext", "rdd", "parallelize"}
INSIDE_THE_JVM = {"_jvm", "_jsparkSession", "_sc", "_jsc", "_jdf"}


@pytest.mark.parametrize("module", MODULES, ids=lambda module: str(module.relative_to(PACKAGE)))
def test_spark_is_used_through_data_frames_so_that_spark_connect_suffices(module):
    used = {
        node.attr
        for node in ast.walk(ast.parse(module.read_text("utf-8")))
        if isinstance(node, ast.Attribute)
    }
    assert not used & RDDS
    if dotted(module) != "spark.session":  # which asks first whether the JVM is here
        assert not used & INSIDE_THE_JVM


@pytest.mark.parametrize("module", MODULES, ids=lambda module: str(module.relative_to(PACKAGE)))
def test_only_those_import_what_an_extra_installs_who_need_it(module):
    for name in {name.split(".")[0] for name in imports_of(module)}:
        assert layer_of(module) in OF_EXTRAS.get(name, {layer_of(module)}), name


@pytest.mark.parametrize("module", MODULES, ids=lambda module: str(module.relative_to(PACKAGE)))
def test_a_module_leaves_packages_to_the_part_that_knows_them(module):
    for name in {name.split(".")[0] for name in imports_of(module)}:
        assert layer_of(module) in ONLY_IN.get(name, {layer_of(module)}), name


def test_nothing_the_server_loads_brings_in_what_an_extra_installs():
    script = "import sys, headrace.cli.main, headrace.server.server; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert not {name.split(".")[0] for name in done.stdout.split()} & OF_EXTRAS.keys()
