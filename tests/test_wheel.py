"""The wheel and the source distribution: each installs into an empty environment and runs there.

The environment gets the declared dependencies of this one as links, so that no download is needed: an import
that is not declared fails. `make torture` has pip find and install the dependencies instead.
"""

import os
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from headrace import __version__
from tests.tools import TORTURE

ROOT = Path(__file__).parent.parent
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "src")
BUILD = "import sys, setuptools.build_meta as build; print(build.build_{}(sys.argv[1]))"
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]


def run(*command: object, **options: object) -> str:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


def build(kind: str, source: Path, to: Path) -> Path:
    name = run(sys.executable, "-c", BUILD.format(kind), to, cwd=source).splitlines()[-1]
    return to / name


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> dict[str, Path]:
    """The wheel of this directory, and the wheel that is built from the source distribution."""
    place = tmp_path_factory.mktemp("built")
    source = place / "source"
    source.mkdir()
    for name in SOURCES:
        origin = ROOT / name
        if origin.is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
            shutil.copytree(origin, source / name, ignore=ignored)
        else:
            shutil.copy(origin, source / name)
    archive = build("sdist", source, place)
    shutil.unpack_archive(archive, place / "unpacked", filter="data")
    (unpacked,) = (place / "unpacked").iterdir()
    (place / "from-sdist").mkdir()
    return {
        "wheel": build("wheel", source, place),
        "sdist": build("wheel", unpacked, place / "from-sdist"),
    }


def needed(name: str, found: dict[str, Distribution]) -> dict[str, Distribution]:
    """Return the distributions that a package needs without extras, by name, and itself."""
    if name not in found:
        found[name] = distribution(name)
        for line in found[name].requires or []:
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                needed(requirement.name, found)
    return found


def link(one: Distribution, packages: Path) -> None:
    """Make a distribution of this environment importable in another one."""
    for top in {path.parts[0] for path in one.files or [] if path.parts[0] != ".."}:
        target = Path(str(one.locate_file(top)))
        if target.exists() and not (packages / top).exists():
            (packages / top).symlink_to(target)


@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_it_runs_in_an_empty_environment(built, kind, tmp_path):
    environment = tmp_path / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", environment)
    python = environment / "bin" / "python"
    (packages,) = environment.glob("lib/python*/site-packages")
    pip = [*PIP, "--python", python, "install", "--quiet"]
    if TORTURE:
        run(*pip, "-c", ROOT / "constraints.txt", built[kind])
    else:
        run(*pip, "--no-deps", "--no-index", built[kind])
        dependencies = needed("headrace", {})
        del dependencies["headrace"]
        for one in dependencies.values():
            link(one, packages)
    command = environment / "bin" / "headrace"
    variables = {name: value for name, value in os.environ.items() if "PYTHON" not in name}
    options = {"cwd": tmp_path, "env": variables}
    assert run(command, "--version", **options) == f"headrace {__version__}\n"
    ports = [f"--{name}=127.0.0.1:0" for name in ("figg", "ws", "http")]
    server = subprocess.Popen(
        [command, "serve", *ports],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )
    try:
        ready = server.stdout.readline()
        assert ready.startswith("headrace ready "), server.stderr.read()
        listening = dict(part.partition("=")[::2] for part in ready.split()[2:])
        at = ("--url", f"figg://{listening['figg']}")
        run(command, "publish", "greetings", "hello, log", *at, **options)
        read = run(
            command, "subscribe", "greetings", "--from-start", "--count", "1", *at, **options
        )
        assert "hello, log" in read
        server.terminate()
        assert server.wait(60) == 0
    finally:
        server.kill()
        server.communicate()
    run(command, "verify", **options)


def test_the_wheel_has_the_package_and_nothing_else(built):
    for wheel in built.values():
        names = zipfile.ZipFile(wheel).namelist()
        assert "headrace/py.typed" in names
        tops = {name.partition("/")[0] for name in names}
        assert tops == {"headrace", f"headrace-{__version__}.dist-info"}
        modules = {name for name in names if name.endswith(".py")}
        here = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src").rglob("*.py")}
        assert modules == here
