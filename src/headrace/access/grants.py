"""Grants: what a principal may do, as `operation:pattern`. Elsewhere: who has which grants.

A pattern is a glob with one special character: `*` matches any run of characters, an empty one and one with
slashes too. A name that begins with `$` is matched only by a pattern that begins with `$`. A backslash before
`*` or another backslash makes it an ordinary character.

The pattern of `join` is a pair, `CHANNEL/PROCESSOR`, divided at its last slash. Each half is matched against
its own name, so that no slash in a name can move the border.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

from headrace.access.operations import NAME_KINDS, Member, Name, NameKind, Operation
from headrace.errors import BadGrantError
from headrace.model import OLD_PREFIXES
from headrace.printing import quoted

GRANT_CHARACTERS_MAX = 1024
"""Longest text of a grant."""

ALL = "all"
"""Stands for all operations in a grant. Its pattern is `*` (ordinary names) or `$*` (reserved names)."""

_ALL_PATTERNS = ("*", "$*")
_FORM = "a grant is OPERATION:PATTERN, such as publish:orders/*"


@dataclass(frozen=True, slots=True)
class Pattern:
    """Glob, as the literal parts between its stars. A glob without a star is a single part."""

    parts: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the pattern in a text. Raises BadGrantError."""
        parts = [""]
        characters = iter(text)
        for character in characters:
            if character == "\\":
                escaped = next(characters, None)
                if escaped is None or escaped not in "*\\":
                    raise BadGrantError(
                        f"in the pattern {quoted(text)}, a backslash may only precede * or another backslash"
                    )
                parts[-1] += escaped
            elif character != "*":
                parts[-1] += character
            elif parts[-1] or len(parts) == 1:  # several stars in a row match the same as one
                parts.append("")
        return cls(tuple(parts))

    @classmethod
    def literal(cls, name: str) -> Self:
        """Return the pattern that matches this name only."""
        return cls((name,))

    @classmethod
    def prefix(cls, prefix: str) -> Self:
        """Return the pattern of names that begin with `prefix`."""
        return cls((prefix, ""))

    def matches(self, name: str) -> bool:
        """Match a name, in time linear in its length: each part is searched once, from left to right."""
        first, *rest = self.parts
        if not rest:
            return name == first
        if not name.startswith(first) or (name.startswith("$") and not first):
            return False
        at, last = len(first), rest.pop()
        for part in rest:
            found = name.find(part, at)
            if found < 0:
                return False
            at = found + len(part)
        return len(name) - at >= len(last) and name.endswith(last)

    def __str__(self) -> str:
        return "*".join(part.replace("\\", "\\\\").replace("*", "\\*") for part in self.parts)


ANY = Pattern.parse("*")


@dataclass(frozen=True)
class Grant:
    """Operations on the names that a pattern matches."""

    operations: tuple[Operation, ...]
    """Operations whose names are of one kind. Without any, all operations."""
    patterns: tuple[Pattern, ...]
    """One pattern; for `join` one each for the channel and the processor."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the grant in a text. Raises BadGrantError: a mistake never becomes another grant."""
        if len(text) > GRANT_CHARACTERS_MAX:
            raise BadGrantError(
                f"a grant may have {GRANT_CHARACTERS_MAX} characters: {quoted(text)}"
            )
        listed, colon, pattern = text.partition(":")
        if not colon:
            raise BadGrantError(f"{quoted(text)} is not a grant: {_FORM}")
        if not pattern:
            raise BadGrantError(f"the grant {quoted(text)} has no pattern: {_FORM}")
        if pattern != pattern.strip() or not pattern.isprintable():
            raise BadGrantError(
                f"the pattern of the grant {quoted(text)} begins or ends with a space, or has a control "
                "character"
            )
        if listed == ALL:
            if pattern not in _ALL_PATTERNS:
                raise BadGrantError(
                    f"the pattern of the grant {quoted(text)} must be * or $*: all operations have names of "
                    "several kinds"
                )
            return cls((), (Pattern.parse(pattern),))
        operations = _operations(listed, text)
        return cls(operations, _patterns(NAME_KINDS[operations[0]], pattern, text))

    def allows(self, operation: Operation, name: Name) -> bool:
        if self.operations and operation not in self.operations:
            return False
        if isinstance(name, Member):
            return any(
                channel.matches(name.channel) and processor.matches(name.processor)
                for channel, processor in self._pairs
            )
        if operation is Operation.ADMIN:
            return self.patterns[0] == ANY
        return self.patterns[0].matches(name)

    @property
    def processors(self) -> Iterable[Pattern]:
        """Patterns of the processors that this grant allows in some channel."""
        if self.operations and Operation.JOIN not in self.operations:
            return ()
        return [processor for _, processor in self._pairs]

    @cached_property
    def _pairs(self) -> Sequence[tuple[Pattern, Pattern]]:
        if self.operations:
            return [(self.patterns[0], self.patterns[1])]
        [pattern] = self.patterns
        other = Pattern.prefix("$") if pattern == ANY else ANY
        # `all:*` and `all:$*` together match every pair.
        return (
            [(pattern, ANY)]
            if pattern == ANY
            else [(pattern, pattern), (pattern, other), (other, pattern)]
        )

    def __str__(self) -> str:
        operations = ",".join(self.operations) or ALL
        return f"{operations}:{'/'.join(map(str, self.patterns))}"


EVERYTHING = (Grant.parse("all:*"), Grant.parse("all:$*"))


def _operations(listed: str, text: str) -> tuple[Operation, ...]:
    found: dict[Operation, None] = {}
    for name in listed.split(","):
        if name not in set(Operation):
            known = ", ".join(Operation)
            raise BadGrantError(
                f"the grant {quoted(text)} names an unknown operation {quoted(name)}: the operations are "
                f"{known} and {ALL}"
            )
        found[Operation(name)] = None
    kinds = {NAME_KINDS[operation] for operation in found}
    if len(kinds) > 1:
        raise BadGrantError(
            f"the operations of the grant {quoted(text)} have names of different kinds: make a grant of each"
        )
    return tuple(found)


def _patterns(kind: NameKind, pattern: str, text: str) -> tuple[Pattern, ...]:
    if kind is NameKind.SERVER:
        if pattern != "*":
            raise BadGrantError(
                f"the operation of the grant {quoted(text)} has no name: write admin:*"
            )
        return (ANY,)
    if kind is not NameKind.MEMBER:
        return (Pattern.parse(pattern),)
    channel, _, processor = pattern.rpartition("/")
    if not channel or not processor:
        raise BadGrantError(
            f"the pattern of the grant {quoted(text)} must be CHANNEL/PROCESSOR, such as join:orders/*"
        )
    return Pattern.parse(channel), Pattern.parse(processor)


def parse_all(texts: Iterable[str]) -> tuple[Grant, ...]:
    return tuple(map(Grant.parse, texts))


# Grants of the first form, in the configuration

HTTP = "http"
"""The old grant for the HTTP API."""

_OF_LOGS = (Operation.PUBLISH, Operation.SUBSCRIBE, Operation.INSPECT, Operation.CREATE)
_CHANNEL = "$channel/"


def is_old(text: str) -> bool:
    """Return True for a grant of the first form: `http`, or a prefix of topic names without a colon.

    A prefix that has a colon is taken for an old grant if it names a topic of Logux or of channels.
    """
    return ":" not in text or text.startswith(("$logux/", _CHANNEL, *OLD_PREFIXES))


def configured(texts: Sequence[str] | None, user: str | None) -> tuple[Grant, ...]:
    """Return the grants of a token in the configuration. Raises BadGrantError."""
    old = [text for text in texts or () if is_old(text)]
    new = parse_all(text for text in texts or () if not is_old(text))
    if new and user is not None:
        raise BadGrantError(
            f"`user` goes with prefixes of topics, and not with grants such as {quoted(str(new[0]))}: write "
            f"the grants as:{user} and join:*/{user} instead"
        )
    return (
        *new,
        *(translated(None if texts is None else old, user) if old or texts is None else ()),
    )


def translated(texts: Sequence[str] | None, user: str | None) -> tuple[Grant, ...]:
    """Return the grants that old ones stand for. None stands for everything, as far as `user` allows.

    `http` stands for all operations except acting as a user of Logux, which no endpoint needs.
    """
    users = [ANY, Pattern.prefix("$")] if user is None else [Pattern.literal(user)]
    processors = users if user is None else [*users, Pattern.prefix(f"{user}:")]
    prefixes = [""] if texts is None else [text for text in texts if text != HTTP]
    found = [Grant((Operation.ACT,), (pattern,)) for pattern in users] if prefixes else []
    if texts is None or HTTP in texts:
        topics = tuple(one for one in Operation if NAME_KINDS[one] is NameKind.TOPIC)
        for pattern in (ANY, Pattern.prefix("$")):
            found += [Grant(topics, (pattern,)), Grant((Operation.CURSORS,), (pattern,))]
            found.append(Grant((Operation.BATCHES,), (pattern,)))
            found += [Grant((Operation.JOIN,), (pattern, processor)) for processor in processors]
        found.append(Grant((Operation.ADMIN,), (ANY,)))
    for prefix in dict.fromkeys(name for one in prefixes for name in _present(one)):
        found += [Grant(_OF_LOGS, (pattern,)) for pattern in _of_prefix(prefix)]
        channel = prefix.removeprefix(_CHANNEL) if prefix.startswith(_CHANNEL) else None
        if channel is None and _CHANNEL.startswith(prefix):
            channel = ""  # the prefix contains all channels
        if channel is not None:
            found += [
                Grant((Operation.JOIN,), (pattern, processor))
                for pattern in _of_prefix(channel)
                for processor in processors
            ]
    return tuple(dict.fromkeys(found))


def _present(prefix: str) -> list[str]:
    """Return a prefix, and the present prefixes of the topics to which it applied under their old names."""
    found = [prefix]
    for old in OLD_PREFIXES:
        if prefix.startswith(old):
            found.append(f"${prefix}")
        elif old.startswith(prefix):
            found.append(f"${old}")
    return found


def _of_prefix(prefix: str) -> list[Pattern]:
    return [Pattern.prefix(prefix)] if prefix else [ANY, Pattern.prefix("$")]
