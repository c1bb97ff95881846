"""The dashboard and the alert rules: every metric and every label that they use is in a real scrape."""

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from headrace.server.metrics.declarations import LIMITED_GAUGES, PREFIX
from headrace.testing import ServerProcess
from tests.tools import tool

DEPLOY = Path(__file__).parents[3] / "deploy"
ALERTS = DEPLOY / "prometheus" / "alerts.yaml"
RULES: list[dict[str, Any]] = yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]
PANELS: list[dict[str, Any]] = json.loads((DEPLOY / "grafana" / "headrace.json").read_text())[
    "panels"
]
TARGETS = [target for panel in PANELS for target in panel.get("targets", ())]

OF_PROMETHEUS = {"up": {"job", "instance"}}
"""Metrics that Prometheus makes itself."""
LABELS_OF_PROMETHEUS = {"job", "instance"}
"""Labels that Prometheus adds to every series of a scrape."""


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """Return the labels of each metric in a real scrape."""
    with ServerProcess(tmp_path_factory.mktemp("deploy") / "data") as server:
        text = httpx.get(server.http_url + "/metrics").text
    found = {name: set(labels) for name, labels in OF_PROMETHEUS.items()}
    for family in text_string_to_metric_families(text):
        limited = LIMITED_GAUGES.get(family.name.removeprefix(PREFIX))
        if limited is not None:  # it may have no series yet
            found[family.name] = {limited.label}
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def names(expression: str) -> set[str]:
    """Return the metrics that an expression names."""
    bare = re.sub(r'"[^"]*"|\[[^]]*\]|\b(?:by|on|without|ignoring) \([^)]*\)', "", expression)
    bare = re.sub(r"\{[^}]*\}", "", bare)
    # What is followed by a parenthesis is a function or an aggregation.
    words = re.findall(r"\b[a-z_]\w*\b(?!\s*\()", bare)
    return set(words) - {"and", "or", "unless", "on", "by", "e6"}


def labels(expression: str) -> set[str]:
    """Return the labels that an expression selects or groups by."""
    found = set(re.findall(r'(\w+)(?:=~|!~|!=|=)"', expression))
    for group in re.findall(r"\b(?:by|on|without|ignoring) \(([^)]*)\)", expression):
        found |= {label.strip() for label in group.split(",")}
    return found


def check(known: dict[str, set[str]], expression: str, shown: Iterator[str] | list[str]) -> None:
    """Check the names and labels of an expression, and the labels that a text shows of its result."""
    used = names(expression)
    assert used, f"{expression} names no metric"
    assert used <= known.keys(), expression
    has = LABELS_OF_PROMETHEUS.union(*(known[name] for name in used))
    assert labels(expression) <= has, expression
    assert set(shown) <= has, expression


def test_these_checks_find_names_and_labels():
    text = 'a_b > 1e6 and on (x) rate(c_d{y="1",z=~"e"}[5m]) / sum by (le, u) (f_bucket)'
    assert names(text) == {"a_b", "c_d", "f_bucket"}
    assert labels(text) == {"x", "y", "z", "le", "u"}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_an_alert_uses_what_a_scrape_has_and_says_what_to_do(known, rule):
    notes = rule["annotations"]
    shown = re.findall(r"\$labels\.(\w+)", " ".join(notes.values()))
    check(known, rule["expr"], shown)
    assert rule["labels"]["severity"] in ("critical", "warning")
    assert len(notes["runbook"]) > 60
    # Texts may also name metrics and settings to look at.
    assert set(re.findall(r"\bheadrace_\w+", notes["runbook"])) <= known.keys()


def test_no_alert_has_the_name_of_another():
    found = [rule["alert"] for rule in RULES]
    assert len(set(found)) == len(found) >= 12


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target["expr"][:60])
def test_a_panel_uses_what_a_scrape_has(known, target):
    shown = re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])
    check(known, target["expr"], shown)


def test_the_variables_of_the_dashboard_come_from_a_scrape(known):
    board = json.loads((DEPLOY / "grafana" / "headrace.json").read_text())
    variables = {one["name"]: one for one in board["templating"]["list"]}
    used = set(re.findall(r"\$(?!__)\{?(\w+)", json.dumps(board)))
    assert used <= variables.keys()
    for name in ("job", "instance"):
        metric = re.match(r"label_values\((\w+)", variables[name]["query"])
        assert metric and metric[1] in known
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)


def test_promtool_accepts_the_rules():
    done = subprocess.run(
        [tool("promtool"), "check", "rules", str(ALERTS)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(RULES)} rules found" in done.stdout


def test_promtool_accepts_a_scrape(tmp_path):
    promtool = tool("promtool")
    with ServerProcess(tmp_path / "data") as server:
        text = httpx.get(server.http_url + "/metrics").text
    done = subprocess.run(
        [promtool, "check", "metrics"], input=text, capture_output=True, text=True, timeout=60
    )
    assert "error" not in done.stderr.lower(), done.stderr
