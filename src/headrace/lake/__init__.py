"""Tables of exported records that any tool can read; needs the extra `lake`, but no Spark."""
