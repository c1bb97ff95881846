"""Channels as the configuration wants them: their reducers are loaded when the server starts."""

from collections.abc import Callable
from functools import cache

from headrace.broker.channels import ChannelRule, Channels
from headrace.broker.snapshots import NotedSnapshots
from headrace.config import Config
from headrace.log.embedded import EmbeddedStore
from headrace.log.runner import Runner
from headrace.model import CHANNEL_PREFIX
from headrace.reducers import Reducer, reducer
from headrace.server.hooks import load_hook


def make_channels(
    config: Config, store: EmbeddedStore, runner: Runner, clock_ms: Callable[[], int]
) -> Channels:
    """Raises `ConfigError` for a reducer that cannot be loaded."""
    settings = config.channels
    named = {config.channels.reducer: "channels.reducer"}
    named |= {rule.reducer: "topics.reducer" for rule in config.topics if rule.reducer is not None}
    reducers = {name: _load(key, name) for name, key in named.items()}

    # The same for many channels: it is one object for all that have the same.
    @cache
    def rule(name: str, lease_s: float, grace_s: float, wait_for: tuple[str, ...]) -> ChannelRule:
        return ChannelRule(
            reducers[name],
            int(lease_s * 1000),
            int(grace_s * 1000),
            int(settings.presence_s * 1000),
            wait_for,
        )

    def rule_of(channel: str) -> ChannelRule:
        found = config.rule(CHANNEL_PREFIX + channel)
        return rule(found.reducer, found.lease_s, found.grace_s, tuple(found.retention_wait_for))

    return Channels(
        store,
        runner,
        NotedSnapshots(store),
        rule_of,
        clock_ms,
        members_max=settings.members_max,
        remember_ms=int(settings.remember_s * 1000),
    )


def _load(key: str, name: str) -> Reducer:
    def load(hook: str) -> Callable[..., object]:
        found = load_hook(key, hook)
        assert found is not None
        return found

    return reducer(name, load)
