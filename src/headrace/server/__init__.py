"""The only place with sockets, timers and signals. Joins sessions to the broker."""
