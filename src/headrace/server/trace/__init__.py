"""Traces: what clients send and receive, live and decoded, for operators."""
