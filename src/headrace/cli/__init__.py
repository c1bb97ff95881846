"""The command line, one file per command, or per group of related commands. It makes no decisions about the log: it asks the server."""
