"""The channel client, asynchronous and blocking."""
