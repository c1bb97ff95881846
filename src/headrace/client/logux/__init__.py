"""The Logux client: a local log that is synchronised with a server's."""
