"""Checks of a data directory, without changing it."""
