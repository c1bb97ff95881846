"""Loading of the configuration: flags override the environment, which overrides one TOML file.

Values that no source gives have their defaults. Every error is one sentence with the setting, the allowed
values and the origin of the wrong value.
"""

import dataclasses
import difflib
import json
import math
import operator
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, NamedTuple, get_args

import msgspec
from msgspec import Meta

from headrace.access.certificates import CertificateRule
from headrace.access.grants import configured, parse_all
from headrace.config.jwt import JwtRole
from headrace.config.protocols import AccessToken, CertificateGrants
from headrace.config.settings import BUILT_IN_RULES, Config, PeerLimits, PrefixRule
from headrace.config.values import (
    JWT_ALGORITHMS,
    NUMBER_MAX,
    UNITS_HELP,
    Address,
    Grants,
    HostNames,
    JwtAlgorithms,
    KeyValues,
    ListenerNames,
    Origins,
    Quantity,
    ReaderNames,
)
from headrace.errors import BadGrantError, ConfigError
from headrace.printing import quoted

CONFIG_FILE_VARIABLE = "HEADRACE_CONFIG"

# These variables are not settings. The command line or the test suite uses them, or Kubernetes sets them in
# every container beside a service called "headrace".
_OTHER_VARIABLES = {
    *(CONFIG_FILE_VARIABLE, "HEADRACE_URL", "HEADRACE_HTTP", "HEADRACE_WS", "HEADRACE_TOKEN"),
    *("HEADRACE_CA", "HEADRACE_CERT", "HEADRACE_KEY"),
    *("HEADRACE_TORTURE", "HEADRACE_SEED", "HEADRACE_REQUIRE_TOOLS"),
    "HEADRACE_PORT",
}
_OTHER_PREFIXES = ("HEADRACE_PORT_", "HEADRACE_SERVICE_")

_SHOWN_MAX = 200
"""Maximum number of characters of a wrong value that an error shows."""

DEFAULT = "default"

NEAR_MIN = 0.75
NEAR_IN_SECTION_MIN = 0.6
"""Minimum similarity, from 0 to 1, of a known name that is suggested for an unknown one."""


class Setting(NamedTuple):
    """One setting: its name in the file, its allowed values and its description."""

    key: str
    type: Any
    default: Any
    doc: str
    unit: str
    flag: str
    """The flag of `headrace serve` for this setting, or empty: `--set` works for every setting."""
    is_secret: bool
    """True if a value must not be shown in full."""
    reloads: bool
    """True if a running server applies a new value on SIGHUP."""
    allowed: str
    """The allowed values as the end of a sentence; empty if type and bounds say it."""
    bounds: Meta

    @property
    def variable(self) -> str:
        return "HEADRACE_" + self.key.upper().replace(".", "_")


class TableKind(NamedTuple):
    """A list of tables in the file, each `[[KEY]]`."""

    type: type
    """Type of a table. Its first field identifies a table among the others."""
    noun: str


TABLES = {
    "topics": TableKind(PrefixRule, "rules"),
    "access.token": TableKind(AccessToken, "tokens"),
    "access.jwt.role": TableKind(JwtRole, "tables"),
    "access.certificate": TableKind(CertificateGrants, "rules"),
    "limits.peer": TableKind(PeerLimits, "tables"),
}


class Loaded(NamedTuple):
    config: Config
    origins: dict[str, str]
    """Origin of each value, by key. A key of `TABLES` stands for all its tables."""


def load(
    flags: Mapping[str, object], environ: Mapping[str, str], file: Path | None = None
) -> Loaded:
    """Return the configuration. `flags` maps keys to values; None means that the flag is not given."""
    values: dict[str, object] = {}
    origins = dict.fromkeys([*SETTINGS, *TABLES], DEFAULT)
    if file is None and environ.get(CONFIG_FILE_VARIABLE):
        file = Path(environ[CONFIG_FILE_VARIABLE])
    table: dict[str, Any] = {}
    if file is not None:
        table = _read_file(file)
        for key in TABLES:
            origins[key] = f"file {file}"
            values[key] = _tables(key, _take(table, key), origins[key])
    for is_text, source in (
        (False, _in_file(table, f"file {file}")),
        (True, _in_environment(environ)),
        (True, _in_flags(flags)),
    ):
        names: dict[str, str] = {}
        for setting, name, value, origin in source:
            _refuse_other_name(names, setting.key, name, origin)
            values[setting.key] = _convert(setting, value, origin, text=is_text)
            origins[setting.key] = origin
    config = _build(values)
    _check_listeners(config, origins)
    for rule in config.topics:
        _check_rule(rule, origins["topics"])
    for role in config.access.jwt.role:
        _check_role(role, origins["access.jwt.role"])
    for token in config.access.token:
        _check_grants(token, origins["access.token"])
    _check_certificates(config, origins["access.certificate"])
    return Loaded(config, origins)


def value_of(config: Config, key: str) -> Any:
    """Return the value of a setting, or all tables of a key of `TABLES`."""
    return operator.attrgetter(key)(config)


_Given = tuple[Setting, str, object, str]
"""A setting that a source gives: its name there, its value and the origin of the value."""


def _in_file(table: dict[str, Any], origin: str) -> Iterator[_Given]:
    for key, value in _flatten(table, origin):
        yield _setting(key, value, origin), key, value, origin


def _in_environment(environ: Mapping[str, str]) -> Iterator[_Given]:
    for variable, text in environ.items():
        if setting := _setting_of_variable(variable, text):
            yield setting, variable, text, f"environment {variable}"


def _in_flags(flags: Mapping[str, object]) -> Iterator[_Given]:
    for key, value in flags.items():
        if value is not None:
            setting = _setting(key, value, f"flag --set {key}")
            yield setting, key, value, f"flag {setting.flag or f'--set {key}'}"


def _refuse_other_name(names: dict[str, str], key: str, name: str, origin: str) -> None:
    """Raise ConfigError if a source gives a setting under two names; `names` has those so far, by key."""
    other = names.setdefault(key, name)
    if other != name:
        raise ConfigError(f"{other} and {name} are the same setting: give one ({origin})")


def fields_of(section: type, prefix: str = "", *, reloads: bool = False) -> Iterator[Setting]:
    """Yield the settings of a section and its own sections, in the order of their definition."""
    for field in dataclasses.fields(section):
        key = prefix + field.name
        # A value has the first part of a type such as `int | None`.
        kind: Any = get_args(field.type)[0] if isinstance(field.type, UnionType) else field.type
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            yield from fields_of(kind, f"{key}.", reloads=field.metadata["reloads"])
        elif key not in TABLES:
            setting = Setting(key, kind, field.default, **field.metadata)
            yield setting._replace(reloads=reloads or setting.reloads)


def allowed(setting: Setting) -> str:
    """Return the allowed values of a setting, as the end of a sentence."""
    kind, bounds = setting.type, setting.bounds
    if setting.allowed or kind in _ALLOWED:
        return setting.allowed or _ALLOWED[kind]
    if issubclass(kind, StrEnum):
        return "one of " + ", ".join(kind)
    number = "a whole number" if kind is int else "a number"
    low = f"over {bounds.gt:g}" if bounds.gt is not None else f"of at least {bounds.ge}"
    return f"{number} {low}" + ("" if bounds.le == NUMBER_MAX else f" and at most {bounds.le}")


_ALLOWED: dict[Any, str] = {
    Address: "HOST:PORT such as 127.0.0.1:8119 or [::1]:8119",
    Origins: "a list of origins such as https://app.example.com, which are let in besides pages of the host "
    "that is connected to, whatever their port (`same-host`); `no-same-host` leaves these out, `*` is any "
    "page, and an empty list no page at all; in flags and variables with commas",
    HostNames: "a list of host names such as log.example.com; in flags and variables with commas",
    Grants: "a list of grants such as subscribe:news/*; in flags and variables with spaces between them",
    ReaderNames: "a list of readers' names such as group:orders; in flags and variables with commas",
    JwtAlgorithms: f"a list of algorithms ({', '.join(JWT_ALGORITHMS)}); in flags and variables with commas",
    ListenerNames: "a list of `figg`, `ws` and `http`; in flags and variables with commas",
    KeyValues: "a table of texts; in flags and variables KEY=VALUE, with commas between them, or JSON",
    Path: "a path",
    bool: "true or false",
    str: "a text",
    tuple[str, ...]: "a list of texts",
}

SETTINGS = {setting.key: setting for setting in fields_of(Config)}
TABLE_SETTINGS = {
    key: {setting.key: setting for setting in fields_of(kind.type)} for key, kind in TABLES.items()
}
RULE_SETTINGS = TABLE_SETTINGS["topics"]
_SECTIONS = {
    ".".join(parts[:depth])
    for key in (*SETTINGS, *TABLES)
    if (parts := key.split("."))
    for depth in range(1, len(parts))
}
_BY_VARIABLE = {setting.variable: setting for setting in SETTINGS.values()}


def _setting(
    name: str, value: object, origin: str, settings: Mapping[str, Setting] = SETTINGS
) -> Setting:
    found = _named(name, value, settings, origin)
    if found is None:
        raise ConfigError(f"there is no setting {name} ({origin}){nearest(name, settings)}")
    return found


def _setting_of_variable(variable: str, text: str) -> Setting | None:
    if not variable.startswith("HEADRACE_") or variable in _OTHER_VARIABLES:
        return None
    found = _named(variable, text, _BY_VARIABLE, f"environment {variable}")
    if found or variable.startswith(_OTHER_PREFIXES):
        return found
    raise ConfigError(
        f"the environment sets {variable}, which is no setting{_nearest_variable(variable)}"
    )


def _named(
    name: str, value: object, settings: Mapping[str, Setting], origin: str
) -> Setting | None:
    """Return the setting with this name, which may lack its unit (`age` for `age_s`) if the value has one."""
    if name in settings:
        return settings[name]
    full_name = _short_names(settings).get(name)
    if full_name is None:
        return None
    found = settings[full_name]
    quantity = Quantity.parse(value)
    if quantity is None or quantity.unit != found.unit:
        raise ConfigError(
            f"{name} must be {UNITS_HELP[found.unit]}, not {_shown(value)} ({origin}); "
            f"{full_name} also takes a plain number of {found.unit}"
        )
    return found


def _short_names(settings: Mapping[str, Setting]) -> dict[str, str]:
    """Return the short names of settings, which lack the unit, with the full name of each.

    A short name that other settings begin with is left out: `retention.wait` could mean `retention.wait_s` or
    `retention.wait_bytes`.
    """
    found: dict[str, str] = {}
    for name, setting in settings.items():
        short = re.sub("(?i:_s|_bytes)(?=$|_(?i:max)$)", "", name)
        others = [other for other in settings if other != name]
        is_taken = any(other == short or other.startswith(f"{short}_") for other in others)
        if setting.unit in UNITS_HELP and short != name and not is_taken:
            found[short] = name
    return found


def nearest(name: str, names: Iterable[str]) -> str:
    """Return a hint with the known name that was probably meant; empty if no name is similar enough."""
    known = list(names)
    section, dot, rest = name.rpartition(".")
    # A name without its section is the most common mistake, and similarity alone would miss it.
    found = [one for one in known if one.rpartition(".")[2] == name]
    if not found and dot:
        # Within a section only the rest of the name counts, because all its settings begin in the same way.
        inside = [one.rpartition(".")[2] for one in known if one.rpartition(".")[0] == section]
        near = difflib.get_close_matches(rest, inside, n=1, cutoff=NEAR_IN_SECTION_MIN)
        found = [f"{section}.{one}" for one in near]
    others = [one for one in known if not dot or one.rpartition(".")[0] != section]
    found = found or difflib.get_close_matches(name, others, n=1, cutoff=NEAR_MIN)
    return f"; did you mean {found[0]}?" if found else ""


def _nearest_variable(variable: str) -> str:
    name = variable.removeprefix("HEADRACE_").lower()
    section = next((one for one in _SECTIONS if name.startswith(f"{one}_")), "")
    key = f"{section}.{name.removeprefix(f'{section}_')}" if section else name
    hint = re.search("did you mean (.*)[?]", nearest(key, SETTINGS))
    return f"; did you mean {SETTINGS[hint[1]].variable}?" if hint else ""


def _read_file(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file {file}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"the configuration file {file} is not valid TOML: {error}") from None


def _flatten(table: dict[str, Any], origin: str, section: str = "") -> Iterator[tuple[str, object]]:
    for key, value in table.items():
        name = section + key
        if isinstance(value, dict) and name not in SETTINGS:
            if name not in _SECTIONS:
                sections = dict.fromkeys([*_SECTIONS, "topics"])
                raise ConfigError(
                    f"there is no section [{name}] ({origin}){nearest(name, sections)}"
                )
            yield from _flatten(value, origin, f"{name}.")
        elif name in _SECTIONS:
            raise ConfigError(f"{name} must be a section [{name}], not {_shown(value)} ({origin})")
        else:
            yield name, value


def _convert(setting: Setting, value: object, origin: str, *, text: bool = False) -> Any:
    base, bounded = setting.type, Annotated[setting.type, setting.bounds]
    converted: object
    quantity = Quantity.parse(value) if setting.unit in UNITS_HELP else None
    try:
        if base in (
            Origins,
            HostNames,
            Grants,
            ReaderNames,
            ListenerNames,
            JwtAlgorithms,
            KeyValues,
        ):
            converted = base.parse(value)
        elif base in (Address, Path):
            converted = _convert_text(base, value)
        elif quantity is not None:
            is_right = quantity.unit == setting.unit
            converted = msgspec.convert(quantity.value, bounded) if is_right else None
        else:
            converted = msgspec.convert(value, bounded, strict=not text)
    except ValueError:  # includes msgspec.ValidationError
        converted = None
    if converted is None or (isinstance(converted, float) and not math.isfinite(converted)):
        # The value may be the secret itself, given in place of its hash.
        shown = "what is there" if setting.is_secret else _shown(value)
        units = f", or {UNITS_HELP[setting.unit]}" if setting.unit in UNITS_HELP else ""
        must = f"{setting.key} must be {allowed(setting)}{units}"
        raise ConfigError(f"{must}, not {shown} ({origin})")
    return converted


def _shown(value: object) -> str:
    """Return a wrong value as errors show it, quoted and shortened."""
    text = quoted(value) if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= _SHOWN_MAX else f"{text[:_SHOWN_MAX]}…"


def _convert_text(kind: type, value: object) -> object:
    if isinstance(value, kind):
        return value
    if not isinstance(value, str) or not value or "\0" in value:
        raise ValueError("a text is needed")
    return Address.parse(value) if kind is Address else kind(value)


def _take(table: dict[str, Any], key: str) -> object:
    """Remove a list of tables from the file's content and return it. Its section stays in the content."""
    *sections, name = key.split(".")
    inside: Any = table
    for section in sections:
        inside = inside.get(section, {}) if isinstance(inside, dict) else None
    return inside.pop(name, []) if isinstance(inside, dict) else []


def _tables(key: str, tables: object, origin: str) -> tuple[Any, ...]:
    kind, settings = TABLES[key], TABLE_SETTINGS[key]
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise ConfigError(f"{key} must be a list of tables, each under [[{key}]] ({origin})")
    identity = next(iter(settings))
    made: dict[str, Any] = {}
    for number, table in enumerate(tables, 1):
        where = f"[[{key}]] number {number}, {origin}"
        names: dict[str, str] = {}
        values: dict[str, Any] = {}
        for name, value in table.items():
            setting = _setting(name, value, where, settings)
            _refuse_other_name(names, setting.key, name, where)
            values[setting.key] = _convert(setting, value, where)
        for setting in settings.values():
            if setting.default is dataclasses.MISSING and setting.key not in table:
                raise ConfigError(f"{setting.key} is missing ({where})")
        name = values[identity]
        if name in made:
            raise ConfigError(f"the {identity} {quoted(name)} has two {kind.noun} ({where})")
        made[name] = kind.type(**values)
    return tuple(made.values())


def _build(values: Mapping[str, object]) -> Config:
    config = Config()
    for key, value in values.items():
        config = with_value(config, key, value)
    return config


def with_value(section: Any, key: str, value: Any) -> Any:
    """Return the configuration, or a section of it, with another value for a setting."""
    name, _, rest = key.partition(".")
    if rest:
        value = with_value(getattr(section, name), rest, value)
    return dataclasses.replace(section, **{name: value})


def _check_rule(rule: PrefixRule, origin: str) -> None:
    """Raise ConfigError for a retention that would have no effect: its author may rely on it."""
    for key in ("retention_age_s", "retention_bytes"):
        for built_in in BUILT_IN_RULES:
            if getattr(rule, key) and rule.prefix.startswith(built_in.prefix):
                prefix = quoted(rule.prefix)
                raise ConfigError(
                    f"{key} must be 0 or left out for the prefix {prefix} ({origin}): topics under "
                    f"{built_in.prefix} are never trimmed by age or size"
                )


def _check_role(role: JwtRole, origin: str) -> None:
    try:
        parse_all(role.grants)
    except BadGrantError as error:
        raise ConfigError(f"the role {quoted(role.name)}: {error} ({origin})") from None


def _check_grants(token: AccessToken, origin: str) -> None:
    try:
        configured(token.grants, token.user)
    except BadGrantError as error:
        raise ConfigError(f"the token {quoted(token.name)}: {error} ({origin})") from None


def _check_certificates(config: Config, origin: str) -> None:
    rules = config.access.certificate
    if rules and not config.listen.tls.client_ca:
        raise ConfigError(
            f"[[access.certificate]] ({origin}) needs listen.tls.client_ca: otherwise no client is asked "
            "for a certificate"
        )
    for rule in rules:
        try:
            CertificateRule.parse(rule.match, rule.grants)
        except BadGrantError as error:
            raise ConfigError(f"[[access.certificate]]: {error} ({origin})") from None


def _check_listeners(config: Config, origins: Mapping[str, str]) -> None:
    tls = config.listen.tls
    for key in ("key", "client_ca"):
        if getattr(tls, key) and not tls.cert:
            name = f"listen.tls.{key}"
            raise ConfigError(f"{name} ({origins[name]}) needs listen.tls.cert, which has no value")
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
