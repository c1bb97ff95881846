"""Section of the configuration for JSON Web Tokens. Elsewhere: what is checked (`access/jwt.py`)."""

from dataclasses import MISSING, dataclass

from headrace.config.values import FILE, JwtAlgorithms, seconds, setting


@dataclass(frozen=True, kw_only=True)
class JwtRole:
    """A role of the issuer, and the grants that it stands for here."""

    name: str = setting(
        MISSING,
        "Name of the role, as tokens have it.",
        pattern=r"^[^\x00-\x1f]{1,255}\Z",
        allowed="a text of 1 to 255 characters",
        reloads=True,
    )
    grants: tuple[str, ...] = setting(
        MISSING,
        "What the role allows, such as `publish:orders/*` (see `docs/access.md`).",
        reloads=True,
    )


@dataclass(frozen=True, kw_only=True)
class JwtSettings:
    key_file: str = setting(
        "",
        "File with the issuer's keys: public keys or certificates in PEM, or a JWKS. It turns access control "
        "on, and is read again on SIGHUP. Needs the extra `jwt`.",
        pattern=FILE,
        allowed="a path, or nothing",
        reloads=True,
    )
    algorithms: JwtAlgorithms = setting(
        JwtAlgorithms(),
        "Algorithms that tokens may be signed with. Each must fit a key of the file. Without any, each key "
        "has one algorithm: the one that a JWKS names for it, or else RS256, ES256, ES384, ES512, EdDSA or "
        "HS256, by the type of the key.",
        reloads=True,
    )
    issuer: str = setting(
        "", "The `iss` that a token must have. Without a value, any or none.", reloads=True
    )
    audience: str = setting(
        "",
        "The `aud` that a token must name. Without a value, a token that names any audience is refused.",
        reloads=True,
    )
    leeway_s: float = seconds(
        30.0,
        "Tolerated difference between the clocks of issuer and server. A token stays valid for this long "
        "after its `exp`.",
        le=600,
        reloads=True,
    )
    grants_claim: str = setting(
        "headrace",
        "Claim with a list of grants. Without a value, tokens bring no grants of their own.",
        reloads=True,
    )
    roles_claim: str = setting(
        "",
        "Claim with roles, which [[access.jwt.role]] maps to grants: a list, or a text with spaces. A dot "
        "leads into an object, as in `realm_access.roles`.",
        reloads=True,
    )
    role: tuple[JwtRole, ...] = setting(
        (), "Grants of roles. A role that is not listed grants nothing.", reloads=True
    )
