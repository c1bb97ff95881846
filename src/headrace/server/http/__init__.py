"""The HTTP listener and its API."""
