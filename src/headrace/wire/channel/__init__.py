"""The codec of channels: messages in both directions. Pure."""
