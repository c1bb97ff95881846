"""The command line, one file per command or group of commands. It decides nothing about the log."""
