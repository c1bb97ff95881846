"""The command line, one file per command. It makes no decisions about the log: it asks the server."""
