"""Table formats of a lake: Delta, Iceberg and plain Parquet."""
