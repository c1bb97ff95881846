"""The only part of the server with sockets, timers and signals. Connects sessions to the broker."""
