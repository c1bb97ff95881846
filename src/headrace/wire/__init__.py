"""Bytes to messages and back, one module per protocol. Pure: knows no topics and no time."""
