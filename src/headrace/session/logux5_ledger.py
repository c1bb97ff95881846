"""What one node of protocol 5 was sent and has got, of each channel: it outlives the connection.

A client names the newest action it has, by time, when it asks to go on. That is not always the last it got,
so what it got behind that is remembered here. It answers each message with an event or with an answer of
ours, in their order, and when it connects it says the highest number it has seen.
"""

from collections import deque

from headrace.logux_envelope import Number

UNFINISHED_MAX = 1000
"""Channels whose history was begun and not finished, that are remembered."""

UNANSWERED_MAX = 50_000
"""Of a client that lets so many messages unanswered, nothing more is remembered."""

_FINISHED = -1


class Ledger:
    def __init__(self) -> None:
        self._epoch = 0
        """The life of the log; 0 before there was anything of it."""
        self._places: dict[str, int] = {}
        """Up to where the node has got a channel, in records of the log."""
        self._unfinished: dict[str, None] = {}
        """Channels that it asked for and was not told that it has."""
        self._sent: deque[tuple[str, int]] = deque()
        """What was sent and not answered: channel and number of an event, or something that we said."""
        self._is_lost = False

    def connected(self, epoch: int, synced: Number) -> "Ledger":
        """The node is back on another connection, and has seen this number."""
        made = Ledger()
        if epoch == self._epoch:
            made._epoch = epoch
            for place in range(len(self._sent) - 1, -1, -1):
                if self._sent[place][1] == synced > 0:
                    # All that was sent before it came before it.
                    self.answered(place + 1)
                    break
            made._places = dict(self._places)
            made._unfinished = dict(self._unfinished)
        return made

    def place(self, channel: str, *, is_resumed: bool) -> int:
        """Up to where it has a channel that it asks for; 0 where it wants to begin anew."""
        if is_resumed or channel in self._unfinished:
            return self._places.get(channel, 0)
        return 0

    def begun(self, channel: str) -> None:
        if len(self._unfinished) < UNFINISHED_MAX:
            self._unfinished[channel] = None

    def forget(self, channel: str) -> None:
        self._places.pop(channel, None)
        self._unfinished.pop(channel, None)

    def sent(self, channel: str, number: int, epoch: int) -> None:
        """An event of a channel is being written."""
        if self._epoch not in (0, epoch):
            self._lose()
        self._epoch = epoch
        self._note(channel, number)

    def said(self, finished: str = "") -> None:
        """An answer of ours is going to be written; it may say that a channel's history is finished.

        It is noted before it is written, events when they are: so none is taken for answered too early.
        """
        self._note(finished, _FINISHED if finished else 0)

    def _note(self, channel: str, number: int) -> None:
        if len(self._sent) >= UNANSWERED_MAX:
            self._lose()
        if not self._is_lost:
            self._sent.append((channel, number))

    def _lose(self) -> None:
        """What was sent and what is answered can no longer be told to belong together."""
        self._is_lost = True
        self._sent.clear()
        self._places.clear()

    def answered(self, count: int) -> None:
        """So many of what was sent have come."""
        sent, places = self._sent, self._places
        for _ in range(min(count, len(sent))):
            channel, number = sent.popleft()
            if number == _FINISHED:
                self._unfinished.pop(channel, None)
            elif number:
                places[channel] = number
