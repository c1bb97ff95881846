"""Shared parts of the commands: options, output, errors, and access to the server."""
