"""Formats of application content in records: Logux events, channel messages and channel states."""
