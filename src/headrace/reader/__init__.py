"""Access to the log from outside: read it from files or over HTTP, decode, encode and upload. No Spark."""
