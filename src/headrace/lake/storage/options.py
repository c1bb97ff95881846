"""Options of object storage: what users give, completed from the environment and from a profile of AWS.

obstore and deltalake know the same options, such as `AWS_REGION`, and read them from the environment
themselves. They also find the credentials of a container or of a machine's role. They do not read profiles,
and refuse endpoints without TLS.
"""

import configparser
import os
import time
from collections.abc import Mapping
from functools import lru_cache
from ipaddress import ip_address
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from headrace.lake.format import LakeError, plain

RETRIES_MAX = 20
"""Default of the option `max_retries`, for each request."""

RETRY_S_MAX = 60
"""Duration after which a request is not tried again."""

BACKOFF_S, BACKOFF_S_MAX, BACKOFF_BASE = 0.1, 5.0, 3
"""First and longest pause between attempts. A pause is random, up to `BACKOFF_BASE` times the one before."""

REQUEST_S_MAX = 120
"""Timeout of one attempt, during which a part of a file is sent or received."""

CONNECT_S_MAX = 10

CREDENTIALS_S_MAX = 300
"""Duration after which a profile is read again: its credentials may be temporary."""

_OF_CLIENT = (
    *("allow_http", "allow_invalid_certificates", "connect_timeout", "http1_only", "http2_only"),
    *("pool_idle_timeout", "pool_max_idle_per_host", "proxy_ca_certificate", "proxy_excludes"),
    *(
        "proxy_url",
        "randomize_addresses",
        "read_timeout",
        "root_certificate",
        "timeout",
        "user_agent",
    ),
)
"""Options of the HTTP client, which obstore takes apart from others."""

_KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
_ENDPOINTS = ("endpoint_url_s3", "endpoint_url", "endpoint")
_LIMITS = {"timeout": f"{REQUEST_S_MAX}s", "connect_timeout": f"{CONNECT_S_MAX}s"}
_OF_ROLES = (
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)
"""Environment variables of containers that have a role."""


class Profile(NamedTuple):
    """Settings of an AWS profile; empty if the profile lacks them."""

    credentials: Mapping[str, str] = {}
    """Keys, and a token if there is one, as options."""
    region: str = ""
    endpoint: str = ""

    def __repr__(self) -> str:
        return "Profile(…)"


class StoreOptions(NamedTuple):
    """Complete options of a storage."""

    values: Mapping[str, str]
    """Options for obstore and for libraries of tables, besides retries and a profile's credentials."""
    retries_max: int
    endpoint: str
    """Address of the store, if it is not the usual one of its kind."""
    profile: str | None
    """Profile that has the credentials; None if they are in the options, or are found without us."""

    def __repr__(self) -> str:
        return f"StoreOptions({', '.join(self.values)})"

    def for_obstore(self) -> dict[str, dict[str, str]]:
        """Return the options as arguments of a store."""
        config, client = dict[str, str](), dict[str, str]()
        for name, value in self.values.items():
            if _plain_name(name) in _OF_CLIENT:
                client[_plain_name(name)] = value
            else:
                config[name] = value
        return {"config": config, "client_options": client}

    def for_tables(self) -> dict[str, str]:
        """Return the options for libraries of tables, with the present credentials of the profile."""
        return {
            **self.values,
            **self.credentials(),
            "max_retries": str(self.retries_max),
            "retry_timeout": f"{RETRY_S_MAX}s",
            "backoff_config.base": str(BACKOFF_BASE),
            "backoff_config.init_backoff": f"{BACKOFF_S * 1000:.0f}ms",
            "backoff_config.max_backoff": f"{BACKOFF_S_MAX * 1000:.0f}ms",
        }

    def credentials(self) -> Mapping[str, str]:
        """Return the present credentials of the profile; none without a profile."""
        return {} if self.profile is None else read_profile(self.profile).credentials


def complete(address: str, options: Mapping[str, str]) -> StoreOptions:
    """Complete the options for an address; raise LakeError if they contradict it or each other."""
    given = {_plain_name(name): value for name, value in options.items()}
    if len(given) < len(options):
        raise LakeError(f"{address} has an option twice: {', '.join(sorted(options))}")
    values = {name: value for name, value in options.items() if _plain_name(name) not in _OURS}
    values.update((name, value) for name, value in _LIMITS.items() if name not in given)
    retries = given.get("max_retries", str(RETRIES_MAX))
    if not retries.isdecimal():
        raise LakeError(f"the option max_retries is {retries!r}: give a number")
    if not address.startswith("s3:"):
        return StoreOptions(values, int(retries), "", None)
    name = _profile_name(given)
    profile = Profile() if name is None else read_profile(name)
    _check_token(given, profile)
    if profile.region and not _first(given, ("region", "default_region")):
        values["AWS_REGION"] = profile.region
    endpoint = _first(given, _ENDPOINTS) or profile.endpoint
    if endpoint:
        values = {key: value for key, value in values.items() if _plain_name(key) not in _ENDPOINTS}
        # The second one too: in the environment, it would count before the first.
        values["AWS_ENDPOINT_URL"] = values["AWS_ENDPOINT_URL_S3"] = endpoint
        if _may_lack_tls(endpoint, given) and "allow_http" not in given:
            values["AWS_ALLOW_HTTP"] = "true"
    if "conditional_put" not in given:
        values["conditional_put"] = "etag"
    return StoreOptions(values, int(retries), endpoint, name if profile.credentials else None)


def _check_token(given: Mapping[str, str], profile: Profile) -> None:
    """Raise LakeError if a token of the environment would be sent with keys that it does not belong to."""
    known = given.keys() | map(_plain_name, profile.credentials)
    has_token = "session_token" in known or "token" in known
    if "access_key_id" in known and not has_token and os.environ.get("AWS_SESSION_TOKEN"):
        raise LakeError(
            "AWS_SESSION_TOKEN in the environment does not belong to the keys of the options or of the "
            "profile: unset it, or give it as an option too"
        )


_OURS = ("max_retries", "profile")
"""Options that obstore does not know."""


def _plain_name(option: str) -> str:
    return option.lower().removeprefix("aws_")


def _first(given: Mapping[str, str], names: tuple[str, ...]) -> str:
    """Return the value of the first of these options that is given, or else is in the environment."""
    found = [given.get(name) for name in names]
    found += [os.environ.get(f"AWS_{name.upper()}") for name in names]
    return next(filter(None, found), "")


def _may_lack_tls(endpoint: str, given: Mapping[str, str]) -> bool:
    """True if the store is asked without TLS; raise LakeError if nobody has said that it may."""
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise LakeError(f"the endpoint {endpoint!r} is not an address that begins with https://")
    if parts.scheme == "https":
        return False
    if _first(given, ("allow_http",)).lower() in ("true", "1", "yes", "on", "y"):
        return True
    if _is_loopback(parts.hostname):
        return True
    raise LakeError(
        f"the endpoint {endpoint} sends everything unencrypted: give an https:// address, or the option "
        "AWS_ALLOW_HTTP=true"
    )


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _profile_name(given: Mapping[str, str]) -> str | None:
    """Return the name of the profile to read; None if credentials come in another way."""
    if "access_key_id" in given or "skip_signature" in given:
        return None
    if "profile" in given:
        return given["profile"]
    if "AWS_ACCESS_KEY_ID" in os.environ:
        return None
    if named := os.environ.get("AWS_PROFILE") or os.environ.get("AWS_DEFAULT_PROFILE"):
        return named
    if any(name in os.environ for name in _OF_ROLES):
        return None
    return "default" if _has_default() else None


def _has_default() -> bool:
    """True if a file of AWS has a profile `default`."""
    files = (
        os.environ.get("AWS_SHARED_CREDENTIALS_FILE") or "~/.aws/credentials",
        os.environ.get("AWS_CONFIG_FILE") or "~/.aws/config",
    )
    found = configparser.RawConfigParser(strict=False)
    try:
        found.read([Path(file).expanduser() for file in files], "utf-8")
    except (configparser.Error, UnicodeDecodeError):
        return True  # botocore says what is wrong with it
    return found.has_section("default")


def read_profile(name: str) -> Profile:
    """Read a profile, at most once in `CREDENTIALS_S_MAX`."""
    files = tuple(sorted(pair for pair in os.environ.items() if pair[0].startswith("AWS_")))
    return _read_profile(name, files, int(time.monotonic() / CREDENTIALS_S_MAX))


@lru_cache(maxsize=4)
def _read_profile(name: str, environment: object, period: int) -> Profile:
    try:
        from botocore.exceptions import BotoCoreError
        from botocore.session import Session
    except ModuleNotFoundError as error:
        raise LakeError(
            f"the AWS profile {name!r} needs: pip install 'headrace[s3]' ({error.name} is missing)"
        ) from None
    try:
        session = Session(profile=name)
        found = session.get_credentials()
        keys = found.get_frozen_credentials() if found else ()
        return Profile(
            {name: key for name, key in zip(_KEYS, keys, strict=False) if key},
            session.get_config_variable("region") or "",
            session.get_scoped_config().get("endpoint_url") or "",
        )
    except BotoCoreError as error:
        raise LakeError(f"the AWS profile {name!r} cannot be used: {plain(error)}") from None
