"""States that processors compute themselves and upload, for channels whose reducer is `uploaded`."""

from collections.abc import Callable

from headrace.broker import channel_notes as notes
from headrace.broker.channel_errors import ChannelError
from headrace.broker.channel_notes import Snapshot
from headrace.broker.channel_state import ChannelState
from headrace.channel_envelope import Content
from headrace.log.store import ColdError
from headrace.reducers import STATE_BYTES_MAX


def upload(
    channel: ChannelState,
    offset: int,
    content: Content,
    answer: Callable[[int], None],
    refuse: Callable[[ChannelError], None],
) -> None:
    """Keep the state that all messages up to an offset make; the answer is the offset of the one kept.

    One of an earlier offset never replaces one of a later. Raises ChannelError.
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

    def loaded(known: Snapshot | None) -> None:
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
        snapshot = Snapshot(at.epoch, at.offset, at.ordinal, channel.hub.clock_ms(), content)

        def done() -> None:
            answer(offset)
            channel.hub.look_later(channel)
            channel.job_done()

        if channel.hub.snapshots.are_notes:
            channel.change(done, changed=[notes.snapshot_note(channel.name, snapshot)])
        else:
            channel.hub.snapshots.save(channel.name, snapshot, done, failed)

    channel.load_snapshot(loaded, failed)
