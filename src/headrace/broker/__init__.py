"""Topics and their subscribers: publishing, subscriptions, positions. No sockets, no frames."""
