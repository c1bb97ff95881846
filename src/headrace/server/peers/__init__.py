"""Connections of any protocol, and what they share."""
