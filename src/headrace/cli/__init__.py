"""The command line, one file per command. Decides nothing about the log: it asks the server."""
