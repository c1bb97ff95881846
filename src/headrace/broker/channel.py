"""One channel: who its members are, what they send, what they get and what they have acknowledged.

Knows no connection and no frame. Whatever must be durable is one change of the store, and answered when that
is committed; what is in memory runs ahead of it, because commits are made in the order of the calls. All
records of the topic come through here, so the offset of a message is known before it is written.

One **job** at a time looks at the beginning of the log (`channel_jobs.py`). Who joins meanwhile waits for it:
nobody is told of a snapshot or a start that is about to move.
"""

from headrace.broker.channel_joining import Joining
from headrace.broker.channel_sending import Sending


class Channel(Joining, Sending):
    __slots__ = ()
