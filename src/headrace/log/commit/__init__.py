"""The write path: group commits, the journal, and the durable values that a commit carries."""
