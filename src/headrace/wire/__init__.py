"""Codecs: bytes to messages and back, one folder or file per protocol. Pure: no I/O, no log, no clock."""
