"""The process of one target under atheris: `python -m tests.fuzz.process TARGET CORPUS [libFuzzer options]`.

CORPUS is a directory in which the fuzzer keeps the inputs that reached new code. Elsewhere: all targets one
after the other, and a report (`__main__.py`).
"""

import sys
from pathlib import Path

import atheris

# Without the bytecode of `tomllib`, the fuzzer would not see how far it comes in the text of settings.
with atheris.instrument_imports(include=["headrace", "tomllib"]):
    from tests.fuzz.changes import mutator
    from tests.fuzz.corpus import SEEDS, WORDS
    from tests.fuzz.targets import TARGETS


def main() -> None:
    name, corpus, *options = sys.argv[1:]
    directory = Path(corpus)
    directory.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(SEEDS[name]):
        (directory / f"seed-{number}").write_bytes(seed)
    if name in WORDS:
        words = directory.with_name(f"{name}.dict")
        words.write_text("".join(map(_quoted, WORDS[name])))
        options.append(f"-dict={words}")
    atheris.Setup(
        [sys.argv[0], str(directory), *options],
        TARGETS[name],
        # Asked for late: `Fuzz` puts another function in this place.
        custom_mutator=mutator(name, lambda data, bytes_max: atheris.Mutate(data, bytes_max)),
    )
    atheris.Fuzz()


def _quoted(word: bytes) -> str:
    return '"' + "".join(f"\\x{byte:02x}" for byte in word) + '"\n'


main()
