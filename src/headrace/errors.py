"""The one tree of errors. Each says who is wrong and what to do next, and carries the facts."""


class HeadraceError(Exception):
    """Anything Headrace raises on purpose."""


class ConfigError(HeadraceError):
    """The configuration is wrong: correct the named key and start again."""


class ListenError(HeadraceError):
    """An address cannot be listened on: free it, or choose another."""


class BadTopicNameError(HeadraceError, ValueError):
    """The caller named a topic that cannot exist: use 1 to 255 bytes of UTF-8."""


class BadReaderNameError(HeadraceError, ValueError):
    """The caller named a reader that cannot be: use 1 to 255 bytes of UTF-8."""


class PayloadTooLargeError(HeadraceError, ValueError):
    """The caller's payload is over the limit: split it."""


class BadEventError(HeadraceError, ValueError):
    """The caller's event cannot be in a log: make it a dict with a string `type`, of what JSON has."""


class BadBlockError(HeadraceError, ValueError):
    """The caller's upload is not made of blocks: nothing of it is kept; correct it and upload again."""


class StagingFullError(HeadraceError):
    """There is no room for another staged file: commit or wait, or raise `limits.staged_bytes_max`."""


class UnknownStagedError(HeadraceError):
    """The caller named a staged file that is not there, or never was: upload it again."""


class StagedClaimedError(HeadraceError):
    """The caller named a staged file that is part of another batch: upload it again."""


class BatchNumberError(HeadraceError):
    """The caller's batch has a smaller number than one of its producer that was written: use a larger one."""


class LocalProtocolError(HeadraceError):
    """The caller asked for something the protocol does not allow in this state."""


class StoreError(HeadraceError):
    """The log cannot do what was asked of it."""


class DataDirectoryError(StoreError):
    """The data directory cannot be used: the message says why and what to change."""


class DataDirectoryLockedError(DataDirectoryError):
    """Another server uses the data directory: stop it, or choose another directory."""


class StoreFailedError(StoreError):
    """A write or fsync of the journal failed. Nothing more is accepted; restart when the disk is well."""


class UnknownTopicError(StoreError):
    """There is no topic of this name."""


class BadCursorError(StoreError, ValueError):
    """The position cannot be where a reader goes on: use one that the topic has given."""


class TooManyCursorsError(StoreError):
    """No room is left for new cursors: drop those of readers that are gone."""


class ClientError(HeadraceError):
    """The client cannot do what was asked of it."""


class ClientClosedError(ClientError):
    """The client was closed: make a new one."""


class ConnectTimeoutError(ClientError, TimeoutError):
    """No server answered in time: check the address, or wait longer (`connect_timeout_s`)."""


class UnacknowledgedError(ClientError):
    """The client closed before every publish was acknowledged: those may or may not be in the log."""

    def __init__(self, publishes: int) -> None:
        super().__init__(f"{publishes} publishes were not acknowledged before the client closed")
        self.publishes = publishes


class PublishRefusedError(ClientError):
    """The server does not take this publish, and hung up on it again and again: it is not in the log."""

    def __init__(self, reason: str, times: int) -> None:
        super().__init__(
            f"the server hung up {times} times in a row when it was sent this publish, which is given up; "
            f"its last words: {reason}"
        )
        self.reason = reason


class RefusedError(ClientError):
    """Server and client do not take each other: correct what `kind` says, and make a new client."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind
        """`auth`: the credentials; `protocol`: the version."""


class LocalStoreError(ClientError):
    """The file of a local log cannot be used: the message says why. Nothing of the call was stored."""


class ReaderLostError(ClientError):
    """Another process reads under this name now: what was not acknowledged is delivered there."""


class ReaderRefusedError(ClientError):
    """The server does not let this reader read, or knows no readers: the message says which."""


class WindowFullError(ClientError):
    """Too many publishes are unacknowledged: await `client.window()` and publish again."""


class QueueFullError(ClientError):
    """Too many messages of a channel wait to be accepted: await `channel.room()` and send again."""


class ReplacedError(ClientError):
    """Another client with the same processor's name has joined: give every client a name of its own."""


class LeftError(ClientError):
    """The processor has left the channel elsewhere: make a new client to be a member again."""


class ChannelRefusedError(ClientError):
    """The server does not do what was asked on a channel: correct what `code` says."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        """As docs/protocols/channel.md has them under Errors."""
