"""Envelopes: payloads as columns, for JSON, Logux events and channel messages."""
