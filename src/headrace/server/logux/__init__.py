"""Logux connections of the server."""
