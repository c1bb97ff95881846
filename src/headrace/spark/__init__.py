"""Headrace in Spark: `format("headrace")` for batch and streaming reads and writes, in any session."""

from headrace.spark.session import register, session
from headrace.spark.tracking import track

__all__ = ["register", "session", "track"]
