"""Channel sessions, client and server side, without I/O."""
