"""Topics and who follows them: publishing, subscriptions, positions. No sockets, no frames."""
