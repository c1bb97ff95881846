"""The files for shipping: Dockerfile, `deploy/`. What they name exists, and the tools for them accept them.

Images are not built here: nothing but package registries is within reach, and a base image is in none.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from headrace.access.tokens import StoredToken, hash_of
from headrace.cli.main import app
from headrace.cli.token import read_tokens
from headrace.config.load import load
from headrace.config.values import LISTENERS
from tests.tools import tool, without

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"
DOCKERFILE = (ROOT / "Dockerfile").read_text()
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
KUBERNETES: list[dict[str, Any]] = list(
    yaml.safe_load_all((DEPLOY / "kubernetes" / "headrace.yaml").read_text())
)
PORTS = {8119, 8120, 8121}
USER = 10001


def check_command(words: list[str]) -> None:
    """Parse the words of a `headrace` command without running it."""
    command, rest = typer.main.get_command(app), words
    while hasattr(command, "commands"):
        assert rest[0] in command.commands, words
        command, rest = command.commands[rest[0]], rest[1:]
    command.make_context(words[0], list(rest))


def instructions(name: str) -> list[str]:
    return re.findall(rf"^{name} (.*)$", DOCKERFILE, re.MULTILINE)


def a_list(text: str) -> list[str]:
    found = yaml.safe_load(text)
    assert isinstance(found, list)
    return found


def test_the_image_runs_commands_that_exist_as_another_user_than_root():
    (check,) = instructions("HEALTHCHECK")
    command = a_list(check.partition("CMD ")[2])
    assert command[0] == "headrace"
    check_command(command[1:])
    assert a_list(instructions("ENTRYPOINT")[-1]) == ["headrace"]
    check_command(a_list(instructions("CMD")[-1]))
    assert instructions("USER")[-1] == f"{USER}:{USER}"
    assert set(map(int, instructions("EXPOSE")[-1].split())) == PORTS


def test_the_user_of_the_image_has_the_group_that_the_image_names():
    """A group that the image does not name would own nothing, and the files of a volume have another."""
    (run,) = (one for one in DOCKERFILE.split("RUN ") if "useradd" in one)
    assert f"groupadd --gid {USER} headrace" in run
    assert f"useradd --uid {USER} --gid headrace " in run


def test_the_image_copies_what_there_is_and_its_extras_exist():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = dict(part.partition("=")[::2] for part in instructions("ARG"))["EXTRAS"]
    assert set(extras.split(",")) <= set(project["optional-dependencies"])
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    for line in instructions("COPY"):
        if not line.startswith("--from"):
            for name in line.split()[:-1]:
                assert (ROOT / name).exists(), name
                assert f"!{name}" in ignored, name


def test_the_settings_of_the_pod_are_valid_and_its_probes_ask_what_is_there(tmp_path):
    maps = [one for one in KUBERNETES if one["kind"] == "ConfigMap"]
    file = tmp_path / "headrace.toml"
    file.write_text(maps[0]["data"]["headrace.toml"])
    config = load({}, {}, file).config
    (pod,) = (one for one in KUBERNETES if one["kind"] == "StatefulSet")
    assert pod["spec"]["replicas"] == 1
    spec = pod["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {name: getattr(config.listen, name).port for name in LISTENERS}
    check_command(container["args"])
    mounts = {one["name"] for one in container["volumeMounts"]}
    claims = {one["metadata"]["name"] for one in pod["spec"]["volumeClaimTemplates"]}
    assert mounts == claims | {one["name"] for one in spec["volumes"]}
    assert spec["securityContext"]["runAsNonRoot"]
    assert spec["securityContext"]["runAsUser"] == USER
    assert container["securityContext"]["readOnlyRootFilesystem"]
    (access,) = spec["initContainers"]
    check_command(access["args"])
    assert "--data-dir" not in access["args"]
    assert (
        access["env"] == container["env"]
    )  # both have the same data directory, and `kubectl exec` too
    assert access["image"] == container["image"]
    assert access["volumeMounts"][0] in container["volumeMounts"]
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        (check,) = container[probe].keys() & {"httpGet", "tcpSocket"}
        assert container[probe][check]["port"] in ports
        assert container[probe][check].get("path", "/healthz") in ("/healthz", "/readyz")


def test_the_schemas_of_kubernetes_accept_the_manifest():
    schemas = pytest.importorskip(
        "kubernetes_validate",
        reason="kubernetes-validate is not installed (its schemas take 100 MB)",
    )
    for one in KUBERNETES:
        schemas.validate(one, schemas.latest_version(), strict=True)


def run_script(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a script of a container with the `headrace` of this environment."""
    search = f"{Path(sys.executable).parent}:{os.defpath}"
    return subprocess.run(
        ["/bin/sh", "-ec", script],
        env={"PATH": search, "HOME": "/"} | environment,
        capture_output=True,
        text=True,
    )


def tokens_in(data_dir: Path) -> dict[str, StoredToken]:
    return {one.name: one for one in read_tokens(data_dir) or ()}


def test_the_first_start_of_the_pod_has_access_control_and_no_token(tmp_path):
    (pod,) = (one for one in KUBERNETES if one["kind"] == "StatefulSet")
    (access,) = pod["spec"]["template"]["spec"]["initContainers"]
    script = shlex.join(["headrace", *access["args"]])
    for _ in range(2):
        done = run_script(script, HEADRACE_DATA_DIR=str(tmp_path / "log"))
        assert done.returncode == 0, done.stderr
        assert read_tokens(tmp_path / "log") == ()


def test_the_token_of_prometheus_is_made_once_and_again_if_it_was_lost(tmp_path):
    (script,) = COMPOSE["services"]["tokens"]["command"]
    assert "$" not in script  # Docker Compose would replace it
    file, data = tmp_path / "run" / "prometheus", tmp_path / "data"
    file.parent.mkdir()
    script = script.replace("/run/headrace/prometheus", str(file))
    written = set()
    for is_lost in (False, False, True):
        if is_lost:
            file.unlink()
        done = run_script(script, HEADRACE_DATA_DIR=str(data))
        assert (done.returncode, done.stdout) == (0, ""), done.stderr
        (made,) = file.read_text().splitlines()
        written.add(made)
        one = tokens_in(data)["prometheus"]
        assert one.sha256 == hash_of(made)
        assert one.grants == ("inspect:*",)
    assert len(written) == 2


@pytest.mark.parametrize(
    "path",
    [DEPLOY / "compose.yaml", DEPLOY / "kubernetes" / "headrace.yaml"],
    ids=lambda it: it.name,
)
def test_the_commands_in_comments_parse(path):
    comments = re.findall(r"^#.* headrace (token .*)$", path.read_text(), re.MULTILINE)
    assert comments
    for command in comments:
        check_command(shlex.split(command))


def test_the_service_leads_to_the_pod():
    (service,) = (one for one in KUBERNETES if one["kind"] == "Service")
    assert {port["port"] for port in service["spec"]["ports"]} == PORTS


def test_the_parts_of_the_compose_file_fit_together():
    services = COMPOSE["services"]
    volumes = set(COMPOSE["volumes"])
    for name, service in services.items():
        for volume in service.get("volumes", []):
            source = volume.partition(":")[0]
            assert source in volumes or (DEPLOY / source).exists(), (name, volume)
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:"), (name, port)
        assert set(service.get("depends_on", {})) <= set(services)
    headrace = services["headrace"]
    assert headrace["read_only"]
    assert headrace["cap_drop"] == ["ALL"]
    load({}, {key: str(value) for key, value in headrace["environment"].items()})


def test_compose_accepts_its_file(tmp_path):
    """`config` needs no daemon. Version 1 of Compose, which is older than `name`, reads a copy without it."""
    text = (DEPLOY / "compose.yaml").read_text()
    command = ["docker", "compose"]
    if (
        not shutil.which("docker")
        or subprocess.run([*command, "version"], capture_output=True).returncode
    ):
        command = [tool("docker-compose")]
        text = text.replace("\nname: headrace\n", "\n")
    file = tmp_path / "compose.yaml"
    file.write_text(text)
    done = subprocess.run([*command, "-f", file, "config"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert yaml.safe_load(done.stdout)["services"].keys() == COMPOSE["services"].keys()


def test_prometheus_scrapes_the_server_with_the_rules_beside_it():
    prometheus = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yaml").read_text())
    assert prometheus["scrape_configs"][0]["static_configs"][0]["targets"] == ["headrace:8121"]
    for name in prometheus["rule_files"]:
        assert (DEPLOY / "prometheus" / name).exists()


UNITS = sorted((DEPLOY / "systemd").iterdir())


def test_the_units_name_each_other_the_listeners_and_commands_that_exist():
    texts = {path.name: path.read_text() for path in UNITS}
    sockets = [name for name in texts if name.endswith(".socket")]
    service = texts["headrace.service"]
    (requires,) = re.findall(r"^Requires=(.*)$", service, re.MULTILINE)
    assert sorted(requires.split()) == sorted(sockets)
    names = [
        re.findall(r"^FileDescriptorName=(.*)$", texts[one], re.MULTILINE)[0] for one in sockets
    ]
    assert sorted(names) == sorted(LISTENERS)
    (command,) = re.findall(r"^ExecStart=(.*)$", service, re.MULTILINE)
    check_command(shlex.split(command)[1:])


def test_the_service_may_ask_whether_the_clock_is_synchronised_and_not_set_it():
    (service,) = (unit.read_text() for unit in UNITS if unit.name == "headrace.service")
    assert "ProtectClock=yes" not in service
    assert re.findall(r"^SystemCallFilter=(.*)$", service, re.MULTILINE)[-1].split() == [
        "adjtimex",
        "clock_adjtime",
    ]
    assert re.search(r"^CapabilityBoundingSet=$", service, re.MULTILINE)


@pytest.fixture
def units(tmp_path):
    """Return copies of the units. `systemd-analyze` looks for the program too: they name one that is here."""
    paths = [tmp_path / unit.name for unit in UNITS]
    for path, unit in zip(paths, UNITS, strict=True):
        path.write_text(unit.read_text().replace("/opt/headrace/bin/headrace", "/bin/true"))
    return paths


def test_systemd_accepts_the_units(units):
    done = subprocess.run(
        [tool("systemd-analyze"), "verify", "--man=no", *units], capture_output=True, text=True
    )
    ours = [line for line in done.stderr.splitlines() if "headrace" in line]
    assert ours == []


def test_systemd_rates_the_service_as_the_manual_says(units):
    manual = " ".join((ROOT / "docs" / "operating.md").read_text().split())
    (exposure,) = re.findall(r"rates its exposure at (\d\.\d) of 10", manual)
    (service,) = (unit for unit in units if unit.suffix == ".service")
    command = [tool("systemd-analyze"), "security", "--offline=true", "--no-pager", service]
    done = subprocess.run(command, capture_output=True, text=True)
    if "unrecognized option" in done.stderr:
        without("systemd-analyze is older than `security --offline`")
    (rated,) = re.findall(r"Overall exposure level for headrace.service: (\d\.\d)", done.stdout)
    # Later versions of systemd look at more, and each part weighs little.
    assert float(rated) == pytest.approx(float(exposure), abs=0.3)
