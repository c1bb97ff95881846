"""Batches: staged uploads that are appended exactly once."""
