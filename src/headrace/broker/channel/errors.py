"""The error of a refused request to a channel, which says if a retry can succeed."""

from headrace.errors import HeadraceError

RETRYABLE = frozenset({"gap", "unavailable"})


class ChannelError(HeadraceError):
    """A request to a channel is refused: the code says why, and nothing was changed."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code

    @property
    def retry(self) -> bool:
        return self.code in RETRYABLE
