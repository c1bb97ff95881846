"""The protocol state of one peer, without I/O: bytes in, commands out; events in, bytes out."""
