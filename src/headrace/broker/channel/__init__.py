"""Channels in the broker: members, messages, snapshots."""
