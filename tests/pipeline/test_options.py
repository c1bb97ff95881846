"""Options of jobs: one description gives the command line, the settings and the keywords of the functions."""

import inspect

import pytest
from typer.main import get_command

from headrace import pipeline
from headrace.cli.main import app, main
from headrace.cli.pipeline.options import Given
from headrace.client import Options
from headrace.config.load import SETTINGS
from headrace.config.pipeline import (
    JOBS,
    AggregateStreamOptions,
    AuditOptions,
    CompactOptions,
    DedupeOptions,
    ExportOptions,
    ReplayOptions,
    check,
    fields_of,
)
from headrace.errors import OptionError

FUNCTIONS = {
    **JOBS,
    "aggregate": JOBS["aggregate"][:1],
    "aggregate_stream": (AggregateStreamOptions,),
}


@pytest.mark.parametrize("job", FUNCTIONS)
def test_every_option_is_a_keyword_of_the_function(job):
    parameters = inspect.signature(getattr(pipeline, job)).parameters
    for field in fields_of(*FUNCTIONS[job]):
        default = parameters[field.name].default
        assert (default is inspect.Parameter.empty) == field.is_required
        assert field.is_required or default == field.default


@pytest.mark.parametrize("job", JOBS)
def test_every_option_with_a_flag_is_on_the_command_line(job):
    command = get_command(app).commands["pipeline"].commands[job]
    flags = {flag for parameter in command.params for flag in parameter.opts}
    assert {field.option.flag for field in fields_of(*JOBS[job])} - {""} <= flags


def test_topics_on_the_command_line_override_a_pattern_in_the_settings(monkeypatch):
    monkeypatch.setenv("HEADRACE_PIPELINE_PATTERN", "a.*")
    monkeypatch.setenv("HEADRACE_PIPELINE_LAKE", "/lake")
    for options in (ExportOptions, AuditOptions):
        fields = fields_of(options)
        given = Given(dict.fromkeys([one.name for one in fields]), None, fields)
        assert given.keywords(options).get("pattern", "a.*") == "a.*"
        given.values["topics"] = ["b"]
        assert given.keywords(options).get("pattern", "") == ""


def test_storage_options_come_from_flags_variables_and_the_file(monkeypatch, tmp_path):
    fields, file = fields_of(CompactOptions), tmp_path / "headrace.toml"
    file.write_text('[pipeline]\nstorage_options = { A = "1=2", B = "" }\n')
    given = Given(dict.fromkeys([one.name for one in fields]) | {"lake": "x"}, file, fields)

    def found():
        given.__dict__.pop("settings", None)
        return given.keywords(CompactOptions)["storage_options"]

    assert found() == {"A": "1=2", "B": ""}
    monkeypatch.setenv("HEADRACE_PIPELINE_STORAGE_OPTIONS", "A=3,C=4")
    assert found() == {"A": "3", "C": "4"}
    monkeypatch.setenv("HEADRACE_PIPELINE_STORAGE_OPTIONS", '{"A": "3,4"}')
    assert found() == {"A": "3,4"}
    given.values["storage_options"] = ["D=5,6", "E==7"]
    assert found() == {"D": "5,6", "E": "=7"}
    given.values["storage_options"] = []
    assert found() == {"A": "3,4"}
    monkeypatch.delenv("HEADRACE_PIPELINE_STORAGE_OPTIONS")
    given.config_file = None
    assert found() is None


def test_values_of_storage_options_are_never_shown(monkeypatch, capsys):
    secret = "s3cr3t"
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["config", f"--set=pipeline.storage_options=KEY={secret}"])
    said = capsys.readouterr().out
    assert "KEY=***" in said and secret not in said
    monkeypatch.setenv("HEADRACE_PIPELINE_STORAGE_OPTIONS", secret)
    with pytest.raises(SystemExit, match=r"^2$"):
        main(["config"])
    said = capsys.readouterr().err
    assert "pipeline.storage_options must be a table of texts" in said and secret not in said
    given = {"storage_options": {"KEY": secret}}
    assert secret not in repr(CompactOptions("x", **given))
    assert secret not in repr(Options(lake="x", lake_options=given["storage_options"]))


def test_every_setting_is_an_option_of_a_job():
    keys = {field.key for some in JOBS.values() for one in some for field in fields_of(one)}
    assert keys - {""} == {key for key in SETTINGS if key.startswith("pipeline.")}


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (CompactOptions("x", file_bytes=0), "file_bytes must be at least 1 bytes, not 0"),
        (
            CompactOptions("x", sweep_after_s=60),
            "sweep_after_s must be at least 3600 seconds, not 60",
        ),
        (
            CompactOptions("x", sweep_after_s=float("inf")),
            "at least 3600 and at most 4.61169e[+]18 seconds, not inf",
        ),
        (DedupeOptions("x", "y", window_s=float("nan")), "window_s must be at least 0 and at most"),
        (ExportOptions("x", every_s=1e6), "every_s must be at least 0 and at most 86400 seconds"),
        (ReplayOptions("x", "a", "b", from_offset=-1), "from_offset must be at least 0, not -1"),
        (ReplayOptions("x", "a", "b", rate=0), "rate must be at least 0.001, not 0"),
    ],
)
def test_a_number_that_is_out_of_bounds_is_refused(options, sentence):
    with pytest.raises(OptionError, match=sentence):
        check(options)


def test_the_defaults_are_within_their_bounds():
    check(ExportOptions("x"))
    check(CompactOptions("x"))
    check(DedupeOptions("x", "y", window_s=None))
    check(AggregateStreamOptions("x", reducer="last"))


def test_an_unknown_keyword_is_refused():
    with pytest.raises(TypeError, match="batches"):
        pipeline.export("/lake", batches=3)
