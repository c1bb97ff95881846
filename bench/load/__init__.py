"""Load generators, one per protocol and peer."""
