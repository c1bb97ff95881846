"""The server process: sockets, timers and signals. It connects sessions to the broker."""
