"""States that processors compute themselves and upload, for channels whose reducer is `uploaded`."""

from collections.abc import Callable

from headrace.broker.channel import notes as notes
from headrace.broker.channel.core import ChannelState
from headrace.broker.channel.notes import StoredSnapshot
from headrace.errors import ChannelError
from headrace.log.store import ColdError
from headrace.payload.channel import Content
from headrace.payload.reducers import STATE_BYTES_MAX


def upload(
    channel: ChannelState,
    offset: int,
    content: Content,
    answer: Callable[[int], None],
    refuse: Callable[[ChannelError], None],
) -> None:
    """Store the state after all messages up to `offset`; `answer` gets the offset of the stored state.

    A state of an earlier offset never replaces a state of a later one. Raises ChannelError.
    """
    if not channel.rule.reducer.is_uploaded:
        raise ChannelError(
            "not-uploaded",
            f"channel {channel.name!r} has the reducer {channel.rule.reducer.name!r}: the server folds it",
        )
    limit = min(STATE_BYTES_MAX, channel.hub.store.note_bytes_max - 512)
    if len(content.data) > limit:
        raise ChannelError(
            "too-large", f"a state may have {limit} bytes, this one has {len(content.data)}"
        )
    if channel.hold(lambda: upload(channel, offset, content, answer, refuse)):
        return
    channel.is_busy = True

    def failed(reason: str) -> None:
        refuse(ChannelError("unavailable", f"the snapshots cannot be read: {reason}"))
        channel.job_done()

    def loaded(known: StoredSnapshot | None) -> None:
        if known is not None and known.offset >= offset:
            answer(known.offset)
            channel.job_done()
            return
        store, topic = channel.hub.store, channel.topic
        try:
            at = store.locate_offset(topic, offset)
        except ColdError as cold:
            channel.hub.warm(cold, lambda: loaded(known))
            return
        if at.offset != offset:
            refuse(
                ChannelError(
                    "bad-offset", f"no message of channel {channel.name!r} ends at offset {offset}"
                )
            )
            channel.job_done()
            return
        snapshot = StoredSnapshot(at.epoch, at.offset, at.ordinal, channel.hub.clock_ms(), content)

        def done() -> None:
            answer(offset)
            channel.hub.look_later(channel)
            channel.job_done()

        if channel.hub.snapshots.are_notes:
            channel.change(done, changed=[notes.snapshot_note(channel.name, snapshot)])
        else:
            channel.hub.snapshots.save(channel.name, snapshot, done, failed)

    channel.load_snapshot(loaded, failed)
