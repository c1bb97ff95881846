"""Codecs: bytes to messages and back, one folder per protocol. Pure: no I/O, no log, no clock."""
