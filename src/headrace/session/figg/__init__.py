"""Figg sessions, client and server side, without I/O."""
