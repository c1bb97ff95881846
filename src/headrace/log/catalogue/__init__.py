"""The catalogue: topics, their segments and their ends, in SQLite."""
