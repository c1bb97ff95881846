"""Places where a lake's files are kept: a directory, a prefix in object storage, or a directory of HDFS."""
