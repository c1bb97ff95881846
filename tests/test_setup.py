"""`.ci/tools` on machines with hardly any programs, with a package manager or without."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
SCRIPT = TESTS.parent / ".ci" / "tools"
OF_PIP = {"weed"}
"""Programs that come with the packages for development."""
APT = """#!/bin/sh
echo "$@" >>{log}
case $* in
*update*) touch {log}.updated ;;
*install*) [ -e {log}.updated ] && printf '#!/bin/sh\\n' >{tools}/chromium && chmod +x {tools}/chromium ;;
esac
"""


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("sh", "sed", "chmod", "touch"):
        (tools / name).symlink_to(shutil.which(name) or "")
    return tools


def write_program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def set_up(machine: Path, *tools: str, user: int) -> list[str]:
    """Run the script, which never fails, and return the lines that it prints."""
    write_program(machine / "id", f"#!/bin/sh\necho {user}\n")
    done = subprocess.run(
        [SCRIPT, *tools], env={"PATH": str(machine)}, capture_output=True, text=True, check=True
    )
    assert done.stdout == ""
    return done.stderr.splitlines()


def test_what_may_not_be_installed_is_named_with_what_is_skipped(machine: Path) -> None:
    write_program(machine / "apt-get", "#!/bin/sh\nexit 100\n")
    java, chromium, node = set_up(machine, "java", "chromium", "node", user=1000)
    assert java.startswith("Spark needs Java 17 or newer, and the PATH has none (Debian")
    assert java.endswith("apt install openjdk-17-jre-headless): tests of Spark are skipped")
    assert chromium.startswith("Chromium is not installed (Debian, Ubuntu: apt install chromium)")
    assert chromium.endswith("tests of pages in a browser are skipped")
    assert node.startswith("Node 20 or newer with npm is not installed")


def test_root_has_it_installed_and_lists_of_packages_are_brought_up_to_date(
    machine: Path, tmp_path: Path
) -> None:
    log = tmp_path / "apt.log"
    write_program(machine / "apt-get", APT.format(log=log, tools=machine))
    assert set_up(machine, "chromium", user=0) == ["installing chromium ..."]
    asked = [line.split()[8] for line in log.read_text().splitlines()]
    assert asked == ["install", "update", "install"]
    assert set_up(machine, "chromium", user=0) == [], "it is there now"


def test_a_package_that_cannot_be_had_is_named(machine: Path) -> None:
    write_program(machine / "apt-get", "#!/bin/sh\nexit 100\n")
    said = set_up(machine, "chromium", user=0)
    assert said[0] == "installing chromium ..."
    assert said[1].startswith("Chromium is not installed")


def test_every_program_that_a_test_needs_is_looked_for() -> None:
    calls = [
        call
        for path in TESTS.rglob("*.py")
        for call in re.findall(r'\btool\("([^)]*)"\)', path.read_text("utf-8"))
    ]
    needed = {call.split('", "')[0] for call in calls}
    assert {"strace", "node", "gcc"} <= needed
    script = SCRIPT.read_text()
    assert {name for name in needed - OF_PIP if f"command -v {name} " not in script} <= {"node"}
    assert "node --version" in script
