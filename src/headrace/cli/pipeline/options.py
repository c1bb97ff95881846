"""The command line of a job and its table in docs/pipeline.md, made from its options (`config/pipeline.py`).

`python -m headrace.cli.pipeline.options` rewrites the tables.
"""

import inspect
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, get_args

from headrace.cli.common import options
from headrace.cli.common.options import App
from headrace.cli.common.output import UsageError
from headrace.config.load import load
from headrace.config.pipeline import JOBS, Field, JobOptions, LakePartition, Pipeline, fields_of

_EVERYWHERE = ("0.0.0.0", "::")
"""Hosts that mean: the server listens on all addresses."""


@dataclass
class Given:
    """A command line: the options that the user gave, and the settings behind them."""

    values: dict[str, Any]
    """Values of all options by name; None if an option is not given, False for a flag."""
    config_file: Path | None
    fields: list[Field]

    @property
    def as_json(self) -> bool:
        return bool(self.values["as_json"])

    @cached_property
    def settings(self) -> Pipeline:
        """Settings of `[pipeline]`: flags override the environment, which overrides the file."""
        flags: dict[str, object] = {}
        for field in self.fields:
            if field.key and field.option.flag:
                value = self.values[field.name]
                if field.option.values is LakePartition:
                    value = LakePartition.TOPIC.value if value else None
                elif value == []:
                    value = None
                flags[field.key] = value
        return load(flags, os.environ, self.config_file).config.pipeline

    def keywords(self, job: type[JobOptions]) -> dict[str, Any]:
        """Return the keywords of the job's Python function; raise UsageError if an option is missing."""
        found: dict[str, Any] = {}
        for field in fields_of(job):
            option, value = field.option, self.values.get(field.name)
            if field.key:
                value = option.keyword(getattr(self.settings, option.setting))
            if field.key and field.is_required and not value:
                raise UsageError(
                    f"{option.usage} is missing: give it, or set {option.setting} in [pipeline] of --config"
                )
            if field.key or value is not None:
                found[field.name] = value
        if found.get("topics") and "pattern" in found:
            # Topics on the command line override a pattern in the settings.
            found["pattern"] = self.values["pattern"] or ""
        return found

    def server(self, data_dir: str | bool | None = None) -> dict[str, Any]:
        """Return how the server is reached: by option, environment, file or default.

        All values are empty if only `data_dir` is given.
        """
        http = self.values["url"]
        if data_dir and not http:
            return {"url": "", "token": "", "token_file": "", "insecure_token": False, "ca": ""}
        if not http and not os.environ.get("HEADRACE_HTTP") and self.config_file:
            listen = load({}, os.environ, self.config_file).config.listen
            at = listen.http
            at = at._replace(host="127.0.0.1") if at.host in _EVERYWHERE else at
            http = f"https://{at}" if listen.tls.covers("http") else str(at)
        values = self.values
        token = options.TokenFlags(
            values["token"], values["token_file"], bool(values["insecure_token"])
        )
        api = options.http_api(http, token)
        return {
            "url": api.base,
            # The job reads the file again for each request.
            "token": "" if token.token_file else api.token or "",
            "token_file": token.token_file or "",
            "insecure_token": token.insecure_token,
            "ca": values["ca"] or "",
        }


def command(
    app: App, job: str, *, also: Mapping[str, Any] | None = None, short_help: str | None = None
) -> Callable[[Callable[[Given], None]], None]:
    """Add the command of a job; `also` are options that only the command line has."""
    fields = fields_of(*JOBS[job])
    more = {**(also or {}), "config_file": options.ConfigFile}
    if not any(field.option.flag == "--json" for field in fields):
        more["as_json"] = options.Json

    def add(function: Callable[[Given], None]) -> None:
        def run(config_file: Path | None, **values: Any) -> None:
            function(Given(values, config_file, fields))

        parameters = [_parameter(field) for field in fields if field.option.usage]
        for name, annotation in more.items():
            default = False if get_args(annotation)[0] is bool else None
            parameters.append(_keyword(name, annotation, default))
        run.__doc__ = function.__doc__
        app.command(job, short_help=short_help)(options.with_parameters(run, parameters))

    return add


def _parameter(field: Field) -> inspect.Parameter:
    option = field.option
    kinds = get_args(field.type) or (field.type,)
    if not option.flag and field.is_required:
        completed = options.argument(
            option.usage, option.help, autocompletion=options.complete_topic
        )
        return _keyword(field.name, Annotated[str, completed], inspect.Parameter.empty)
    if not option.flag:
        several = options.argument(option.usage, option.help)
        return _keyword(field.name, Annotated[list[str] | None, several], None)
    if bool in kinds:
        switch = options.option(option.usage, option.help)
        return _keyword(field.name, Annotated[bool, switch], False)
    if Mapping[str, str] in kinds:
        repeated = options.option(option.usage, option.help + _origin(field))
        return _keyword(field.name, Annotated[list[str] | None, repeated], None)
    # The settings parse their values themselves.
    kind: Any = next((one for one in (int, float) if one in kinds and str not in kinds), str)
    kind = str if field.key or option.usage.endswith(" TIME") else kind
    least = None if kind is str else option.ge
    info = options.option(option.usage, option.help + _origin(field), min=least)
    if field.is_required and not field.key:
        return _keyword(field.name, Annotated[kind, info], inspect.Parameter.empty)
    return _keyword(field.name, Annotated[kind | None, info], None)


def _origin(field: Field) -> str:
    """Return the end of a help text: where the value comes from if the flag is not given."""
    default = f"else {field.shown_default}" if field.shown_default else ""
    found = ", ".join(filter(None, [field.key, field.option.otherwise, default]))
    return f"  [{found}]" if found else ""


def _keyword(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=default, annotation=annotation)


PAGE = Path("docs/pipeline.md")

_TABLE = re.compile(r"(<!-- options of (\w+): written by `make docs` -->\n)(?:\|.*\n)*")


def updated(page: str) -> str:
    """Return the page with the present table of options after each marker."""
    return _TABLE.sub(lambda found: found[1] + _table(found[2]), page)


def _table(job: str) -> str:
    rows = ["| option | setting | in Python | default | |", "|---|---|---|---|---|"]
    for field in fields_of(*JOBS[job]):
        option = field.option
        is_list = option.usage and not option.flag and not field.is_required
        usage = option.usage + ("…" if is_list else "")
        cells = (usage, field.key, field.name, field.shown_default)
        shown = [f" `{cell}` " if cell else " " for cell in cells]
        rows.append(f"|{'|'.join(shown)}| {option.help} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text("utf-8")), "utf-8")
