"""TLS on the listeners: certificates and their reload, and the layer between a socket and a connection."""
