"""Creation of channels from the configuration. Their reducers are loaded when the server starts."""

from collections.abc import Callable
from functools import partial

from headrace.broker.channel.channel import ChannelRule
from headrace.broker.channel.hub import Channels
from headrace.broker.channel.snapshots import Snapshots
from headrace.config.protocols import LastState
from headrace.config.settings import Config
from headrace.errors import ConfigError
from headrace.log.embedded import EmbeddedStore
from headrace.log.store import Runner
from headrace.model import CHANNEL_PREFIX
from headrace.payload.reducers import reducer
from headrace.server.access import load_hook
from headrace.server.channel.snapshots import PostgresSnapshots
from headrace.server.clock import SteadyClock


def make_channels(
    current: Callable[[], Config],
    store: EmbeddedStore,
    runner: Runner,
    snapshots: Snapshots,
    clock: SteadyClock,
    count: Callable[[str], None],
) -> Channels:
    """Create the channels. `current` returns the settings in force.

    Raises `ConfigError` for a reducer that cannot be loaded.
    """
    config = current()
    settings = config.channels
    named = {settings.reducer: "channels.reducer"}
    named |= {rule.reducer: "topics.reducer" for rule in config.topics if rule.reducer is not None}
    reducers = {name: reducer(name, partial(load_hook, key)) for name, key in named.items()}

    rules: dict[ChannelRule, ChannelRule] = {}

    def rule_of(channel: str) -> ChannelRule:
        found = current().rule(CHANNEL_PREFIX + channel)
        rule = ChannelRule(
            reducers[found.reducer],
            int(found.lease_s * 1000),
            int(found.grace_s * 1000),
            int(settings.presence_s * 1000),
            tuple(found.retention_wait_for),
            found.last_state is LastState.KEPT,
        )
        return rules.setdefault(rule, rule)  # many channels have the same settings, and share them

    return Channels(
        store,
        runner,
        snapshots,
        rule_of,
        clock.now_ms,
        elapsed_ms=clock.elapsed_ms,
        members_max=settings.members_max,
        remember_ms=int(settings.remember_s * 1000),
        snapshot_age_ms=int(settings.snapshot_age_s * 1000),
        count=count,
    )


def make_postgres(config: Config, store: EmbeddedStore) -> PostgresSnapshots | None:
    """Return the PostgreSQL store of snapshots; None if snapshots are kept as notes. Raises `ConfigError`."""
    url = config.channels.snapshots_url
    if not url:
        return None
    try:
        from headrace.server.channel import postgres
    except ImportError as error:
        raise ConfigError(
            f"channels.snapshots_url needs psycopg, which cannot be loaded ({error}): "
            "pip install 'headrace[postgres]'"
        ) from None
    return PostgresSnapshots(store, postgres.connector(url))
