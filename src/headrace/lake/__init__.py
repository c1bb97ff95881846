"""Tables of records outside of the log, that anyone can read; needs the extra `lake`, and no Spark."""
