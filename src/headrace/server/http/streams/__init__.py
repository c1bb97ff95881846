"""Durable Streams over HTTP: topics at `/v1/stream/NAME`."""
