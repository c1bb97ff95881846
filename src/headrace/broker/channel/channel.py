"""One channel: its members, and the messages that they send, receive and acknowledge.

Elsewhere: connections and frames. Data that must be durable is one change of the store, and the request is
answered when the change is committed. The state in memory is ahead of the commits; this is safe because
commits are made in the order of the calls. All records of the topic come through here, so the offset of a
message is known before it is written.

Only one **job** at a time works on the beginning of the log (`trimming.py`). A processor that joins meanwhile
waits for the job, so that it is not told of a snapshot or a start that is about to move.
"""

from headrace.broker.channel.joining import Joining
from headrace.broker.channel.sending import Sending


class Channel(Joining, Sending):
    __slots__ = ()
