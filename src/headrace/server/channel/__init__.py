"""Channel connections of the server."""
