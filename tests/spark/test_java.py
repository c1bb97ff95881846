"""Selection of a Java version for Spark, by a session and by `make setup`. Starts no Spark."""

import shutil
import subprocess
from pathlib import Path

import pytest

from headrace.spark.session import NoJavaError, check_java

SCRIPT = Path(__file__).parent.parent.parent / ".ci" / "tools"


def make_java(home: Path, version: str) -> Path:
    """Make a program that identifies itself as Java in both ways."""
    java = home / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\"' >&2\n")
    java.chmod(0o755)
    (home / "release").write_text(f'IMPLEMENTOR="nobody"\nJAVA_VERSION="{version}"\n')
    return java


def set_up(tmp_path: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run `.ci/tools java` on a machine with hardly any programs and no package manager."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("sh", "sed", "id"):
        (tools / name).symlink_to(shutil.which(name) or "")
    environ["PATH"] = f"{tools}:{environ.get('PATH', '')}".rstrip(":")
    return subprocess.run(
        [SCRIPT, "java"], env=environ, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("version", ["17", "17.0.15", "21-ea", "25.0.1"])
def test_java_17_and_newer_ones_are_enough(tmp_path, monkeypatch, version):
    java = make_java(tmp_path / "jdk", version)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "java").symlink_to(java)
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    check_java()
    monkeypatch.undo()
    done = set_up(tmp_path, PATH=str(tmp_path / "bin"))
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("version", ["1.8.0_292", "11.0.2"])
def test_an_older_java_is_refused_by_name(tmp_path, monkeypatch, version):
    java = make_java(tmp_path / "jdk", version)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "jdk"))
    with pytest.raises(NoJavaError, match=f"{java} is older"):
        check_java()
    done = set_up(tmp_path, JAVA_HOME=str(tmp_path / "jdk"))
    assert done.returncode == 0
    assert f"{tmp_path / 'jdk'} has none" in done.stderr


def test_a_wrapper_of_an_older_java_is_asked_which_it_is(tmp_path, monkeypatch):
    """Version managers install such a wrapper: no file beside it says which Java it starts."""
    java = make_java(tmp_path / "jdk", "11.0.2")
    (tmp_path / "jdk" / "release").unlink()
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "jdk"))
    with pytest.raises(NoJavaError, match=f"{java} is older"):
        check_java()
    # A Java that does not tell its version may be good enough. Spark will find out.
    java.write_text("#!/bin/sh\nexit 1\n")
    check_java()


def test_java_home_counts_before_the_path(tmp_path, monkeypatch):
    make_java(tmp_path / "jdk", "17")
    monkeypatch.setenv("PATH", str(tmp_path / "jdk" / "bin"))
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "nowhere"))
    with pytest.raises(NoJavaError, match=r"JAVA_HOME .* has none"):
        check_java()


def test_without_java_one_line_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NoJavaError, match="none was found: install it"):
        check_java()
    monkeypatch.undo()
    done = set_up(tmp_path)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (0, "", 1)
    assert "apt install openjdk-17-jre-headless" in done.stderr
