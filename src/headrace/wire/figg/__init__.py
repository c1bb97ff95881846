"""The Figg codec: messages, encoders and decoders. Pure."""
