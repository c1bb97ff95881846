"""Places where a lake's files are kept: a directory, or a prefix in object storage."""
