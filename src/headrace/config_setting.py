"""How a setting is described: its meaning, unit and bounds, on the annotation of a section's field."""

from msgspec import Meta, Struct

NUMBER_MAX = 2**62  # offsets and sizes stay well inside what files and SQLite can count


def setting(
    doc: str,
    unit: str = "",
    *,
    flag: str = "",
    pattern: str | None = None,
    allowed: str = "",
    secret: bool = False,
    reloads: bool = False,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
) -> Meta:
    extra = {"unit": unit, "flag": flag, "allowed": allowed, "secret": secret, "reloads": reloads}
    if pattern is not None:
        return Meta(description=doc, pattern=pattern, extra=extra)
    if gt is not None:
        return Meta(description=doc, gt=gt, le=le, extra=extra)
    return Meta(description=doc, ge=ge, le=le, extra=extra)


class Section(Struct, frozen=True, kw_only=True):
    pass
