"""Whether a directory has a Delta table that a job made beside a lake; one of something else is refused."""

from pathlib import Path

from deltalake import DeltaTable
from deltalake.exceptions import TableNotFoundError

from headrace.lake.delta import LOG
from headrace.lake.format import LakeError, check_format, check_path
from headrace.lake.manifests import HIDDEN
from headrace.lake.trouble import in_a_sentence


def open_ours(directory: Path, format_key: str, what: str) -> bool:
    """Whether there is one; False where it can be made. Changes nothing."""
    check_path(directory)
    if not directory.exists():
        return False
    if not directory.is_dir():
        raise LakeError(f"{directory} is no directory: name a new or an empty one")
    with in_a_sentence(directory, LOG):
        try:
            number = DeltaTable(str(directory)).metadata().configuration.get(format_key)
        except TableNotFoundError:
            # One that was left while it was made has a part of these.
            others = sorted({path.name for path in directory.iterdir()} - {HIDDEN, LOG})
            if others:
                raise _not_ours(directory, what, others[0]) from None
            return False
    if number is None or not number.isdigit():
        raise _not_ours(directory, what, "a Delta table of something else")
    check_format(int(number), str(directory))
    return True


def _not_ours(directory: Path, what: str, found: str) -> LakeError:
    return LakeError(
        f"{directory} holds something else than {what} ({found}): name a new or an empty directory"
    )
