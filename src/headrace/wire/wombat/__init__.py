"""The Wombat codec: messages, encoders and decoders. Pure."""
