"""Loading the configuration: flags over the environment over one TOML file over the defaults.

Every error is one sentence: the setting, what it may be, and where the wrong value came from.
"""

import difflib
import math
import tomllib
from collections.abc import Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta, Struct

from headrace.config import BUILT_IN_RULES, Config, PrefixRule
from headrace.config_protocols import AccessToken
from headrace.config_setting import NUMBER_MAX
from headrace.config_values import Address, Origins, Readers
from headrace.errors import ConfigError

CONFIG_FILE_VARIABLE = "HEADRACE_CONFIG"

# Not settings: the command line's own variables, those of the test suite, and those that Kubernetes
# makes for every container beside a service called "headrace".
_OTHER_VARIABLES = {
    *(CONFIG_FILE_VARIABLE, "HEADRACE_URL", "HEADRACE_HTTP", "HEADRACE_TOKEN"),
    *("HEADRACE_TORTURE", "HEADRACE_SEED", "HEADRACE_REQUIRE_TOOLS"),
    "HEADRACE_PORT",
}
_OTHER_PREFIXES = ("HEADRACE_PORT_", "HEADRACE_SERVICE_")

DEFAULT = "default"


class Setting(NamedTuple):
    """One setting: its name in the file and what is allowed for it."""

    key: str
    type: Any
    """The Python type, with the bounds as annotations, as `msgspec.convert` takes it."""
    default: Any
    doc: str
    unit: str
    flag: str
    """The flag of `headrace serve` for it, or nothing: `--set` serves for every one."""

    @property
    def variable(self) -> str:
        return "HEADRACE_" + self.key.upper().replace(".", "_")


class TableKind(NamedTuple):
    """A list of tables in the file, each `[[KEY]]`."""

    type: type[Struct]
    """Its first field tells one from the others."""
    noun: str


TABLES = {
    "topics": TableKind(PrefixRule, "rules"),
    "access.token": TableKind(AccessToken, "tokens"),
}


class Loaded(NamedTuple):
    config: Config
    origins: dict[str, str]
    """Where each value came from, by key; a key of `TABLES` stands for all its tables."""


def load(
    flags: Mapping[str, object], environ: Mapping[str, str], file: Path | None = None
) -> Loaded:
    """Make the configuration; `flags` maps keys to values, where None and absence mean the same."""
    values: dict[str, object] = {}
    origins = dict.fromkeys([*SETTINGS, *TABLES], DEFAULT)
    if file is None and environ.get(CONFIG_FILE_VARIABLE):
        file = Path(environ[CONFIG_FILE_VARIABLE])
    if file is not None:
        table = _read_file(file)
        origin = f"file {file}"
        for key in TABLES:
            values[key] = _tables(key, _take(table, key), origin)
            origins[key] = origin
        for key, value in _flatten(table, origin):
            values[key] = _convert(_setting(key, origin), value, origin)
            origins[key] = origin
    for variable, text in environ.items():
        if setting := _setting_of_variable(variable):
            origin = f"environment {variable}"
            values[setting.key] = _convert(setting, text, origin, text=True)
            origins[setting.key] = origin
    for key, value in flags.items():
        if value is not None:
            setting = _setting(key, "flag --set")
            origin = f"flag {setting.flag or f'--set {key}'}"
            values[key] = _convert(setting, value, origin, text=True)
            origins[key] = origin
    config = _build(values)
    _check_together(config, origins)
    return Loaded(config, origins)


def fields_of(section: type[Struct], prefix: str = "") -> Iterator[Setting]:
    """The settings of a section in the order they are written, its own sections included."""
    hints = get_type_hints(section, include_extras=True)
    for field in msgspec.structs.fields(section):
        base, meta = get_args(hints[field.name])
        if isinstance(base, type) and issubclass(base, Struct):
            yield from fields_of(base, f"{prefix}{field.name}.")
        elif prefix + field.name not in TABLES:
            extra = meta.extra
            yield Setting(
                key=prefix + field.name,
                type=hints[field.name],
                default=field.default,
                doc=meta.description,
                unit=extra["unit"],
                flag=extra["flag"],
            )


def allowed(setting: Setting) -> str:
    """What a setting may be, as the end of a sentence."""
    base, meta = _base_and_meta(setting.type)
    if meta.extra and meta.extra["allowed"]:
        return str(meta.extra["allowed"])
    if get_origin(base) is tuple:
        return "a list of texts"
    if issubclass(base, StrEnum):
        return "one of " + ", ".join(base)
    if base is Address:
        return "HOST:PORT such as 127.0.0.1:8119 or [::1]:8119"
    if base is Origins:
        return (
            "a list of origins such as https://app.example.com, `same-host` (pages of the host that is "
            "connected to, whatever their port) and `*` (any page); in flags and variables with commas"
        )
    if base is Readers:
        return "a list of readers' names such as group:orders; in flags and variables with commas"
    if base is Path:
        return "a path"
    if base is str:
        return "a text"
    kind = "a whole number" if base is int else "a number"
    low = f"over {meta.gt:g}" if meta.gt is not None else f"of at least {meta.ge}"
    return f"{kind} {low}" + ("" if meta.le == NUMBER_MAX else f" and at most {meta.le}")


def _base_and_meta(annotated: Any) -> tuple[type, Meta]:
    base, meta = get_args(annotated)
    if get_origin(base) is UnionType:
        base = next(option for option in get_args(base) if option is not type(None))
    return base, meta


SETTINGS = {setting.key: setting for setting in fields_of(Config)}
TABLE_SETTINGS = {
    key: {setting.key: setting for setting in fields_of(kind.type)} for key, kind in TABLES.items()
}
RULE_SETTINGS = TABLE_SETTINGS["topics"]
_SECTIONS = {key.partition(".")[0] for key in (*SETTINGS, *TABLES) if "." in key}
_BY_VARIABLE = {setting.variable: setting for setting in SETTINGS.values()}


def _setting(key: str, origin: str) -> Setting:
    if key not in SETTINGS:
        raise ConfigError(f"there is no setting {key} ({origin}){_nearest(key, SETTINGS)}")
    return SETTINGS[key]


def _setting_of_variable(variable: str) -> Setting | None:
    if not variable.startswith("HEADRACE_") or variable in _OTHER_VARIABLES:
        return None
    if variable in _BY_VARIABLE:
        return _BY_VARIABLE[variable]
    if variable.startswith(_OTHER_PREFIXES):
        return None
    raise ConfigError(
        f"the environment sets {variable}, which is no setting{_nearest(variable, _BY_VARIABLE)}"
    )


def _nearest(name: str, names: Mapping[str, object]) -> str:
    # A name without its section is the commonest slip, and difflib alone would miss it.
    candidates = [known for known in names if known.rpartition(".")[2] == name]
    candidates += difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"; the nearest is {candidates[0]}" if candidates else ""


def _read_file(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file {file}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"the configuration file {file} is not valid TOML: {error}") from None


def _flatten(table: dict[str, Any], origin: str) -> Iterator[tuple[str, object]]:
    for name, value in table.items():
        if isinstance(value, dict):
            if name not in _SECTIONS:
                sections = dict.fromkeys([*_SECTIONS, "topics"])
                raise ConfigError(
                    f"there is no section [{name}] ({origin}){_nearest(name, sections)}"
                )
            yield from ((f"{name}.{key}", inner) for key, inner in value.items())
        elif name in _SECTIONS:
            raise ConfigError(f"{name} must be a section [{name}], not {value!r} ({origin})")
        else:
            yield name, value


def _convert(setting: Setting, value: object, origin: str, *, text: bool = False) -> Any:
    base, meta = _base_and_meta(setting.type)
    converted: object
    try:
        if base in (Origins, Readers):
            converted = base.parse(value)
        elif base in (Address, Path):
            converted = _convert_text(base, value)
        else:
            converted = msgspec.convert(value, Annotated[base, meta], strict=not text)
    except ValueError:  # which msgspec.ValidationError is
        converted = None
    if converted is None or (isinstance(converted, float) and not math.isfinite(converted)):
        # Someone may have put the secret itself where its hash belongs.
        shown = "what is there" if meta.extra and meta.extra["secret"] else repr(value)
        raise ConfigError(f"{setting.key} must be {allowed(setting)}, not {shown} ({origin})")
    return converted


def _convert_text(kind: type, value: object) -> object:
    if isinstance(value, kind):
        return value
    if not isinstance(value, str) or not value or "\0" in value:
        raise ValueError("a text is needed")
    return Address.parse(value) if kind is Address else kind(value)


def _take(table: dict[str, Any], key: str) -> object:
    """Take a list of tables out of the file's content; its section stays."""
    section, _, name = key.rpartition(".")
    inside = table.get(section, {}) if section else table
    return inside.pop(name, []) if isinstance(inside, dict) else []


def _tables(key: str, tables: object, origin: str) -> tuple[Struct, ...]:
    kind, settings = TABLES[key], TABLE_SETTINGS[key]
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise ConfigError(f"{key} must be a list of tables, each under [[{key}]] ({origin})")
    identity = next(iter(settings))
    made: dict[str, Struct] = {}
    for number, table in enumerate(tables, 1):
        where = f"[[{key}]] number {number}, {origin}"
        for name in table:
            if name not in settings:
                raise ConfigError(f"there is no setting {name} ({where}){_nearest(name, settings)}")
        for setting in settings.values():
            if setting.default is msgspec.NODEFAULT and setting.key not in table:
                raise ConfigError(f"{setting.key} is missing ({where})")
        one = kind.type(
            **{name: _convert(settings[name], value, where) for name, value in table.items()}
        )
        if getattr(one, identity) in made:
            raise ConfigError(
                f"the {identity} {getattr(one, identity)!r} has two {kind.noun} ({where})"
            )
        made[getattr(one, identity)] = one
    return tuple(made.values())


def _build(values: Mapping[str, object]) -> Config:
    top: dict[str, Any] = {}
    sections: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        section, dot, name = key.rpartition(".")
        (sections.setdefault(section, {}) if dot else top)[name] = value
    for section, inner in sections.items():
        top[section] = msgspec.structs.replace(getattr(Config(), section), **inner)
    return Config(**top)


def _check_together(config: Config, origins: Mapping[str, str]) -> None:
    _check_listeners(config, origins)
    for rule in config.topics:
        _check_rule(rule, origins["topics"])


def _check_rule(rule: PrefixRule, origin: str) -> None:
    """A retention that would never count is a mistake of whoever relies on it."""
    for key in ("retention_age_s", "retention_bytes"):
        for built_in in BUILT_IN_RULES:
            if getattr(rule, key) and rule.prefix.startswith(built_in.prefix):
                raise ConfigError(
                    f"{key} must be 0 or left out for the prefix {rule.prefix!r} ({origin}): topics under "
                    f"{built_in.prefix} are never trimmed by age or size"
                )


def _check_listeners(config: Config, origins: Mapping[str, str]) -> None:
    taken: dict[Address, str] = {}
    for key in ("listen.figg", "listen.ws", "listen.http"):
        address: Address = getattr(config.listen, key.partition(".")[2])
        if address.port and address in taken:
            other = taken[address]
            raise ConfigError(
                f"{key} ({origins[key]}) and {other} ({origins[other]}) are both {address}: "
                "each listener needs a port of its own"
            )
        taken[address] = key
