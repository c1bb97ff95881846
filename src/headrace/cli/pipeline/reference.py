"""The tables of options in docs/pipeline.md: `python -m headrace.cli.pipeline.reference` rewrites them."""

import re
from pathlib import Path

from headrace.config.pipeline import JOBS, fields_of

PAGE = Path("docs/pipeline.md")

_TABLE = re.compile(r"(<!-- options of (\w+): written by `make docs` -->\n)(?:\|.*\n)*")


def updated(page: str) -> str:
    """Return the page with the present table of options after each marker."""
    return _TABLE.sub(lambda found: found[1] + _table(found[2]), page)


def _table(job: str) -> str:
    rows = ["| option | setting | in Python | default | |", "|---|---|---|---|---|"]
    for field in fields_of(*JOBS[job]):
        option = field.option
        is_list = option.usage and not option.flag and not field.is_required
        cells = [
            option.usage + ("…" if is_list else ""),
            field.key,
            field.name,
            field.shown_default,
        ]
        shown = [f" `{cell}` " if cell else " " for cell in cells]
        rows.append(f"|{'|'.join(shown)}| {option.help} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text("utf-8")), "utf-8")
