"""The one tree of errors. Each error says who is wrong and what to do next, and carries the facts."""


class HeadraceError(Exception):
    """Base class of all errors that Headrace raises on purpose."""


class ConfigError(HeadraceError):
    """The configuration is wrong: correct the named key and start again."""


class ListenError(HeadraceError):
    """The server cannot listen on an address: free the address, or choose another."""


class BadKeyError(HeadraceError, ValueError):
    """A file of keys for JWTs cannot be used: the message says why."""


class BadGrantError(HeadraceError, ValueError):
    """A grant is not `operation:pattern`: correct it. Nothing was granted."""


class BadTokenError(HeadraceError, ValueError):
    """A token cannot be made or changed: the message says why."""


class DamagedTokensError(HeadraceError):
    """The file with the tokens cannot be read: restore it from a backup, or delete it and make new tokens."""


class BadTopicNameError(HeadraceError, ValueError):
    """The caller used an invalid topic name: use 1 to 255 bytes of UTF-8."""


class BadReaderNameError(HeadraceError, ValueError):
    """The caller used an invalid reader name: use 1 to 255 bytes of UTF-8."""


class PayloadTooLargeError(HeadraceError, ValueError):
    """The caller's payload is over the limit: split it."""


class BadEventError(HeadraceError, ValueError):
    """The caller's event cannot be stored: pass a dict with a string `type` and values that JSON supports."""


class BadBlockError(HeadraceError, ValueError):
    """The caller's upload does not consist of blocks. Nothing of it is kept: correct it and upload again."""


class StagingFullError(HeadraceError):
    """Staged files have reached their limit: commit or wait, or raise `limits.staged_bytes_max`."""


class UnknownStagedError(HeadraceError):
    """The caller named a staged file that does not exist (any more): upload it again."""


class StagedClaimedError(HeadraceError):
    """The caller named a staged file that is part of another batch: upload it again."""


class BatchNumberError(HeadraceError):
    """The producer has already written a batch with a larger number: use a larger number."""


class LocalProtocolError(HeadraceError):
    """The caller asked for something that the protocol does not allow in this state."""


class StoreError(HeadraceError):
    """The log cannot do what the caller asked for."""


class DataDirectoryError(StoreError):
    """The data directory cannot be used: the message says why and what to change."""


class DataDirectoryLockedError(DataDirectoryError):
    """Another server uses the data directory: stop it, or choose another directory."""


class StoreFailedError(StoreError):
    """A write or fsync of the journal failed. Nothing more is accepted: repair the disk, then restart."""


class UnknownTopicError(StoreError):
    """No topic has this name."""


class ClosedTopicError(StoreError):
    """The topic is closed: it takes no more records. Use another topic, or delete this one first."""


class BadCursorError(StoreError, ValueError):
    """A reader cannot continue at this position: use a position that the topic has returned."""


class TooManyCursorsError(StoreError):
    """The limit of cursors is reached: delete the cursors of readers that are no longer used."""


class ChannelError(HeadraceError):
    """The broker refuses a request to a channel and has changed nothing: `code` says why."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code
        """One of the codes in docs/protocols/channel.md, section Errors."""

    @property
    def retry(self) -> bool:
        """True if the same request can succeed later."""
        return self.code in ("gap", "unavailable", "over-rate")


class ClientError(HeadraceError):
    """The client cannot do what the caller asked for."""


class ClientClosedError(ClientError):
    """The client was closed: make a new one."""


class ConnectTimeoutError(ClientError, TimeoutError):
    """No server answered in time: check the address, or wait longer (`connect_timeout_s`)."""


class UnacknowledgedError(ClientError):
    """The client closed before every publish was acknowledged: the rest may or may not be in the log."""

    def __init__(self, publishes: int) -> None:
        super().__init__(f"{publishes} publishes were not acknowledged before the client closed")
        self.publishes = publishes


class PublishRefusedError(ClientError):
    """The server refuses this publish and closed the connection on it several times. It is not in the log."""

    def __init__(self, reason: str, times: int) -> None:
        super().__init__(
            f"the server hung up {times} times in a row when it was sent this publish, which is given up; "
            f"its last words: {reason}"
        )
        self.reason = reason


class RefusedError(ClientError):
    """Server or client refused the connection: correct what `kind` says, and make a new client."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind
        """`auth`: the credentials; `protocol`: the version."""


class LocalStoreError(ClientError):
    """The file of a local log cannot be used: the message says why. The call has stored nothing."""


class ReaderLostError(ClientError):
    """Another process now reads under this name. It gets the records that were not acknowledged."""


class ReaderRefusedError(ClientError):
    """The server refuses this reader, or does not support named readers: the message says which."""


class WindowFullError(ClientError):
    """Too many publishes are unacknowledged: await `client.window()` and publish again."""


class QueueFullError(ClientError):
    """Too many messages of a channel are not accepted yet: await `channel.room()` and send again."""


class ReplacedError(ClientError):
    """Another client with the same processor name has joined: give every client its own name."""


class LeftError(ClientError):
    """The processor has left the channel elsewhere: make a new client to be a member again."""


class ChannelRefusedError(ClientError):
    """The server refused a request to a channel: correct what `code` says."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        """One of the codes in docs/protocols/channel.md, section Errors."""


class OptionError(HeadraceError, ValueError):
    """An option is unknown, invalid or in conflict with another: correct it."""


class SinkError(HeadraceError, ValueError):
    """A row cannot be written: the message says why."""
