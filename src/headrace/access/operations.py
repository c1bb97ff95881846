"""The operations that access control decides about, and the kind of name that each is about."""

from enum import Enum, StrEnum
from typing import NamedTuple


class NameKind(Enum):
    """Kind of name that an operation is about."""

    TOPIC = "topic"
    READER = "reader"
    PRODUCER = "producer"
    MEMBER = "CHANNEL/PROCESSOR"
    USER = "user"
    SERVER = "server"


class Operation(StrEnum):
    """An operation, by its name in a grant."""

    PUBLISH = "publish"
    """Append records to a topic: publishes, events of a Logux log."""
    SUBSCRIBE = "subscribe"
    """Read the records of a topic, live or stored, by any protocol, and the last state of a channel."""
    INSPECT = "inspect"
    """See that a topic or a channel exists, and facts about it. With `*`: also metrics, status and clock."""
    CREATE = "create"
    """Make a topic by the first publish, event, message or batch for it."""
    DELETE = "delete"
    """Delete a topic; destroy or keep a channel, or replace its state, without being a member."""
    CURSORS = "cursors"
    """Move or delete the cursors of a reader. The name is the reader's."""
    BATCHES = "batches"
    """Append batches as a producer, whose name it is. Uploads need `publish` on each of their topics too."""
    JOIN = "join"
    """Join a channel as a processor: receive, send, acknowledge, upload states, leave."""
    ACT = "as"
    """Act as a user of Logux. The name is the user's: a node id up to its first colon."""
    ADMIN = "admin"
    """Administer the server, and trace other clients. It has no name, so its pattern is `*`."""


NAME_KINDS = {
    **dict.fromkeys(Operation, NameKind.TOPIC),
    Operation.CURSORS: NameKind.READER,
    Operation.BATCHES: NameKind.PRODUCER,
    Operation.JOIN: NameKind.MEMBER,
    Operation.ACT: NameKind.USER,
    Operation.ADMIN: NameKind.SERVER,
}
"""Kind of the name of each operation."""

SERVER_NAME = ""
"""Name for `inspect` and `admin` that stands for the server as a whole. Only `*` matches it."""


class Member(NamedTuple):
    """Name of the operation `join`."""

    channel: str
    processor: str


Name = str | Member
"""Subject of an operation; empty for `admin`."""
