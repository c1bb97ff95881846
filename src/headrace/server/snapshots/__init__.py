"""Channel snapshots in PostgreSQL."""
