"""Logux logs in the broker, which store every event once."""
