"""Headrace in Spark: `format("headrace")` for batch and streaming reads and writes, in any session."""

from headrace.spark.progress import track
from headrace.spark.session import register, session

__all__ = ["register", "session", "track"]
