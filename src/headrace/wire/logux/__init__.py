"""The Logux codecs, of the 0.x protocols and of protocol 5. Pure."""
