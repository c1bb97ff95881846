"""Messages made from a batch: the fast and the plain implementation give the same."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.client.topics.subscription import _message, _messages

serials = st.one_of(
    st.tuples(st.sampled_from(["", "3", "4", "x"]), st.integers(0, 2**64)).map(
        "{0[0]}@{0[1]}".format
    ),
    st.text(st.sampled_from("3@7x"), max_size=30),
)


@given(st.lists(st.tuples(serials, st.binary(max_size=3)), min_size=1, max_size=5))
def test_a_batch_of_serials(pairs: list[tuple[str, bytes]]) -> None:
    assert _messages("t", pairs) == [_message("t", serial, payload) for serial, payload in pairs]


@pytest.mark.parametrize(
    ("serials", "offsets", "epochs"),
    [
        (["3@7", "3@14"], [7, 14], [3, 3]),
        (["3@7", "4@14", "@21"], [7, 14, 21], [3, 4, None]),
        (["3@7", "3@", "3@x", "x", ""], [7, None, None, None, None], [3, None, None, None, None]),
        (["3@" + "7" * 21, "3@7"], [None, 7], [None, 3]),
    ],
)
def test_the_offsets_and_epochs_that_serials_tell(
    serials: list[str], offsets: list[int | None], epochs: list[int | None]
) -> None:
    made = _messages("t", [(serial, b"x") for serial in serials])
    assert [message.next_offset for message in made] == offsets
    assert [message.epoch for message in made] == epochs
    assert [message.serial for message in made] == serials
