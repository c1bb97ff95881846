"""The reasons not to read from a connection. Elsewhere: the connection that pauses (`connection.py`)."""


class Pause:
    """Reasons not to read from a connection. The flags are plain integers: they are checked very often."""

    PUBLISHES = 1
    ANSWERS = 2
    COMMANDS = 4
    CLOSING = 8
    TURN = 16
    CHECKING = 32
    HELD = 64
