"""The client for topics, over Figg and Wombat, asynchronous and blocking."""
