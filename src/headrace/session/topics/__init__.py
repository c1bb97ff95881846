"""Shared parts of Figg and Wombat client sessions: topics, publishes and readers. No I/O."""
