"""`headrace config`: the settings in force with the origin of each value, and the reference page."""

import json
from collections.abc import Iterator
from itertools import groupby
from typing import Annotated, Any

import typer

from headrace.cli.common import options
from headrace.cli.common.options import option
from headrace.cli.common.output import print_table
from headrace.config.load import (
    RULE_SETTINGS,
    SETTINGS,
    TABLE_SETTINGS,
    TABLES,
    Loaded,
    Setting,
    allowed,
    value_of,
)
from headrace.config.settings import BUILT_IN_RULES, Config
from headrace.config.values import Address, KeyValues
from headrace.printing import MASK, masked_secret, quoted


def config(
    settings: options.SettingsFlags,
    as_json: options.Json = False,
    as_toml: Annotated[bool, option("--toml", "Print a complete, commented TOML file.")] = False,
    as_markdown: Annotated[
        bool, option("--markdown", "Print the reference page of all settings.")
    ] = False,
) -> None:
    """Show the settings in force.

    Prints each value that `headrace serve` would use with the same flags, and its origin.

    \b
    headrace config --config headrace.toml
    headrace config --toml > headrace.toml
    """
    options.only_one(json=as_json, toml=as_toml, markdown=as_markdown)
    loaded = settings.load()
    if as_json:
        typer.echo(_to_json(loaded))
    elif as_toml:
        typer.echo(_to_toml(loaded), nl=False)
    elif as_markdown:
        typer.echo(to_markdown(), nl=False)
    else:
        _print_table(loaded)


def _shown_of(config: Config, key: str) -> Any:
    """Return the value for printing: a secret is masked."""
    value = value_of(config, key)
    if isinstance(value, KeyValues):
        return value.masked()
    return masked_secret(value) if SETTINGS[key].is_secret else value


def _print_table(loaded: Loaded) -> None:
    rows = [(key, str(_shown_of(loaded.config, key)), loaded.origins[key]) for key in SETTINGS]
    for key in TABLES:
        for table, origin in _tables(loaded, key):
            (_, name), *rest = _fields(key, table, masked=True).items()
            rows.append((f"{key} {quoted(name)}", ", ".join(_lines(dict(rest))), origin))
    print_table([dict(zip(("setting", "value", "from"), row, strict=True)) for row in rows])


def _to_json(loaded: Loaded) -> str:
    settings = {
        key: {
            "value": _plain(_shown_of(loaded.config, key)),
            "from": loaded.origins[key],
            "unit": setting.unit or None,
        }
        for key, setting in SETTINGS.items()
    }
    tables = {
        key: [
            _fields(key, table, masked=True) | {"from": origin}
            for table, origin in _tables(loaded, key)
        ]
        for key in TABLES
    }
    return json.dumps({"settings": settings} | tables, indent=2)


def _to_toml(loaded: Loaded) -> str:
    lines = ["# Every setting with the value in force. Flags and HEADRACE_... override this file."]
    for section, settings in _sections():
        lines += ["", f"[{section}]"] if section else []
        for setting in settings:
            unit = f" ({setting.unit})" if setting.unit else ""
            name = setting.key.rpartition(".")[2]
            lines += [
                f"# {setting.doc}{unit} Must be {allowed(setting)}.",
                f"{name} = {_literal(_shown_of(loaded.config, setting.key))}",
            ]
            if _shown_of(loaded.config, setting.key) != value_of(loaded.config, setting.key):
                lines[-1] = f"# masked, set it yourself: {lines[-1]}"
    lines += ["", "# Tokens for clients, besides those of `headrace token`."]
    for token in loaded.config.access.token:
        lines += _table_lines("access.token", token)
    lines += ["", "# Roles in JWTs, and the grants that they stand for."]
    for role in loaded.config.access.jwt.role:
        lines += _table_lines("access.jwt.role", role)
    lines += ["", "# Grants of clients with a certificate of listen.tls.client_ca."]
    for certificate in loaded.config.access.certificate:
        lines += _table_lines("access.certificate", certificate)
    lines += ["", "# Limits of each connection, address and principal, and of single principals."]
    for peer in loaded.config.limits.peer:
        lines += _table_lines("limits.peer", peer)
    lines += [
        "",
        "# Settings of topics whose names begin with a prefix. The longest prefix wins.",
    ]
    for rule in loaded.config.topics:
        lines += _table_lines("topics", rule)
    for rule in BUILT_IN_RULES:
        lines += ["# built in:", *(f"# {line}" for line in _table_lines("topics", rule))]
    return "\n".join(lines) + "\n"


def to_markdown() -> str:
    """Return the text of docs/configuration.md."""
    parts = [_MARKDOWN_HEAD]
    for section, settings in _sections():
        parts.append(f"## [{section}]\n" if section else "## Top level\n")
        parts.append(_markdown_table(settings))
    parts.append(_MARKDOWN_TOKENS)
    parts.append(_markdown_table(TABLE_SETTINGS["access.token"].values()))
    parts.append(_MARKDOWN_ROLES)
    parts.append(_markdown_table(TABLE_SETTINGS["access.jwt.role"].values()))
    parts.append(_MARKDOWN_CERTIFICATES)
    parts.append(_markdown_table(TABLE_SETTINGS["access.certificate"].values()))
    parts.append(_MARKDOWN_PEERS)
    parts.append(_markdown_table(TABLE_SETTINGS["limits.peer"].values()))
    parts.append(_MARKDOWN_RULES)
    parts.append(_markdown_table(RULE_SETTINGS.values()))
    parts.append(_MARKDOWN_BUILT_IN)
    rules = ["\n".join(_table_lines("topics", rule)) for rule in BUILT_IN_RULES]
    return "\n".join(parts) + "\n" + "\n\n".join(rules) + "\n```\n"


_MARKDOWN_HEAD = """\
# Configuration

`make docs` writes this page from `src/headrace/config/settings.py`. A test checks that it is up to date.

A flag of `headrace serve` overrides an environment variable, which overrides the TOML file that `--config`
or `HEADRACE_CONFIG` names, which overrides the default. Settings without a flag of their own use
`--set KEY=VALUE`, such as `--set journal.files=8`. The variable of a setting is `HEADRACE_` followed by its
key in capitals, with `_` for the dot: `journal.files` is `HEADRACE_JOURNAL_FILES`. Unknown keys and
variables are refused.

A setting in seconds or bytes accepts a plain number, or a text with a unit: `ms`, `s`, `m`, `h`, `d`, `w`
for durations; `B`, `KiB`, `MiB`, `GiB`, `TiB` (powers of 1024) or `KB`, `MB`, `GB`, `TB` (powers of 1000)
for sizes, in upper or lower case. With a unit, the name does not need its ending: `retention.age = "7d"`
is `retention.age_s = 604800`, and `HEADRACE_JOURNAL_FILE=64MiB` is `HEADRACE_JOURNAL_FILE_BYTES=67108864`.
Names that would be ambiguous, such as `wait` for `wait_s` and `wait_bytes`, keep their ending.

`headrace config` shows each value in force and its origin. `headrace config --toml` prints a complete file
to start from. Both mask passwords. The hashes of tokens are printed in the file only.

On SIGHUP a running server reads the file again and applies the settings that are marked with ↻. A file
with a mistake changes nothing. See [Operating](operating.md#change-settings).

The other commands read `HEADRACE_URL` (the server's address, default `figg://127.0.0.1:8119`),
`HEADRACE_HTTP` (the address of the HTTP API, default `127.0.0.1:8121`), `HEADRACE_WS` (the address for
Logux, default `127.0.0.1:8120`) and `HEADRACE_TOKEN` (the token for the server). Headrace ignores the
variables that Kubernetes sets for a service called `headrace`.
"""

_MARKDOWN_TOKENS = """\
## [[access.token]]

Tokens of clients, for every protocol, besides those of `headrace token create`. They can only be set in the
file. [Access control](access.md#tokens) says when the server asks for a token, and what each allows.
"""

_MARKDOWN_ROLES = """\
## [[access.jwt.role]]

Roles of JSON Web Tokens, by the claim that `access.jwt.roles_claim` names, and the grants that each stands
for. They can only be set in the file.
"""

_MARKDOWN_CERTIFICATES = """\
## [[access.certificate]]

Grants of clients with a certificate of `listen.tls.client_ca`. They can only be set in the file. A client
is identified by its certificate until it shows a token. See [Operating](operating.md#tls).
"""

_MARKDOWN_PEERS = """\
## [[limits.peer]]

Limits of each connection, of each address, of each principal, and of single principals, which come before
those of each principal. They can only be set in the file. Without a value, or with 0, there is no limit. All
limits apply: those of `[limits]`, of the connection, of its address and of its principal. A network of IPv6
with 64 bits counts as one address. [Operating](operating.md#limits) shows how to use them.
"""

_MARKDOWN_RULES = """\
## [[topics]]

Settings of topics whose names begin with a prefix. They can only be set in the file. Each value comes from
the longest matching prefix that sets it, or from the settings above if no prefix does.
"""


_MARKDOWN_BUILT_IN = """\
These rules are built in and come before your own: retention by age or size never deletes records of these
topics. A rule with a shorter prefix does not change that. A rule for some of these topics that sets a
retention is refused.

```toml"""


def _markdown_table(settings: Any) -> str:
    rows = ["| key | default | unit | meaning |", "|---|---|---|---|"]
    for setting in settings:
        name = setting.key.rpartition(".")[2]
        meaning = f"{setting.doc} Must be {allowed(setting)}."
        meaning += f" Flag `{setting.flag}`." if setting.flag else ""
        meaning += " ↻" if setting.reloads else ""
        default = "" if setting.default in (None, _REQUIRED) else f"`{_literal(setting.default)}`"
        rows.append(f"| `{name}` | {default} | {setting.unit} | {meaning} |")
    return "\n".join(rows) + "\n"


_REQUIRED = RULE_SETTINGS["prefix"].default


def _sections() -> Iterator[tuple[str, Iterator[Setting]]]:
    return groupby(SETTINGS.values(), key=lambda setting: setting.key.rpartition(".")[0])


def _tables(loaded: Loaded, key: str) -> Iterator[tuple[Any, str]]:
    """Yield the tables `[[key]]` and the origin of each."""
    yield from ((table, loaded.origins[key]) for table in value_of(loaded.config, key))
    if key == "topics":
        yield from ((rule, "built in") for rule in BUILT_IN_RULES)


def _fields(key: str, table: Any, *, masked: bool = False) -> dict[str, Any]:
    """Return the fields that a table sets. A token's hash may be masked, because it reveals a weak token."""
    return {
        name: MASK if masked and setting.is_secret else _plain(value)
        for name, setting in TABLE_SETTINGS[key].items()
        if (value := getattr(table, name)) is not None
    }


def _table_lines(key: str, table: Any) -> list[str]:
    return [f"[[{key}]]", *_lines(_fields(key, table))]


def _lines(fields: dict[str, Any]) -> list[str]:
    return [f"{key} = {_literal(value)}" for key, value in fields.items()]


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple) and not isinstance(value, Address):
        return list(value)
    return value if isinstance(value, int | float) else str(value)


def _literal(value: Any) -> str:
    """Return the value as TOML, whose strings equal JSON strings without escaped surrogate pairs."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(plain := _plain(value), list):
        return f"[{', '.join(map(_literal, plain))}]"
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
