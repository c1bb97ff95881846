"""Connections to a server, over TCP or WebSocket."""
