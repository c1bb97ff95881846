"""OpenAPI 3.1 description of the channel endpoints, at `/openapi.json`: their paths, limits and statuses.

Elsewhere: the endpoints themselves (`channels.py`). Other endpoints are documented only in `docs/http.md`.
"""

from typing import Any

from headrace import __version__
from headrace.model import CHANNEL_PREFIX, PAYLOAD_BYTES_MAX, RESERVED_TOPIC_BYTES_MAX
from headrace.payload.channel import NUMBER_MAX, PROCESSOR_BYTES_MAX
from headrace.payload.reducers import STATE_BYTES_MAX
from headrace.wire.channel import LEASE_S_MAX, LEASE_S_MIN, OFFSET_MAX

PATH = "/openapi.json"

CHANNELS_LISTED_MAX = 200
"""Channels in one answer. The next page starts `after` the last name."""

MESSAGES_MAX = 500
WAIT_S_MAX = 60

RAW = "application/octet-stream"
JSON = "application/json"

STATUSES = {
    "bad-channel": 400,
    "bad-content": 400,
    "bad-offset": 400,
    "bad-message": 400,
    "wrong-credentials": 401,
    "forbidden": 403,
    "not-found": 404,
    "not-joined": 409,
    "gap": 409,
    "not-uploaded": 409,
    "too-large": 413,
    "cannot-fold": 422,
    "too-many": 429,
    "over-rate": 429,
    "unavailable": 503,
}

_Json = dict[str, Any]


def description() -> _Json:
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Headrace: channels over HTTP",
            "version": __version__,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
            "description": "Endpoints for processors that poll, and for operators. docs/protocols/channel.md "
            "explains them.",
        },
        # Without tokens in the configuration, all requests are allowed.
        "security": [{}, {"bearer": []}],
        "paths": PATHS,
        "components": {
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
            "schemas": _SCHEMAS,
        },
    }


# Schemas


def _whole(minimum: int = 0, maximum: int | None = None, **more: object) -> _Json:
    bounds = {"minimum": minimum} | ({} if maximum is None else {"maximum": maximum})
    return {"type": "integer", **bounds, **more}


def _object(optional: tuple[str, ...] = (), **fields: _Json) -> _Json:
    required = [name for name in fields if name not in optional]
    return {"type": "object", "properties": fields, "required": required}


def _list(of: _Json) -> _Json:
    return {"type": "array", "items": of}


def _or_null(schema: _Json) -> _Json:
    return {"anyOf": [schema, {"type": "null"}]}


def _ref(name: str) -> _Json:
    return {"$ref": f"#/components/schemas/{name}"}


def _with_content(**fields: _Json) -> _Json:
    """Return the schema of an object with `fields` and either `payload` or `bytes`."""
    schema = _object(("payload", "bytes"), **fields, payload={}, bytes=_BASE64)
    return schema | {"oneOf": [{"required": ["payload"]}, {"required": ["bytes"]}]}


_TEXT: _Json = {"type": "string"}
_TRUTH: _Json = {"type": "boolean"}
_BASE64: _Json = {"type": "string", "contentEncoding": "base64"}
_NUMBER = _whole(1, NUMBER_MAX, description="The processor's own count of its messages.")
_OFFSET = _whole(0, OFFSET_MAX, description="A byte position in the log, just past a message.")
_LEASE = {"type": "number", "minimum": LEASE_S_MIN, "maximum": LEASE_S_MAX}
_MS = _whole(description="Milliseconds since 1970.")
_LOST = _whole(1, description="Messages before or among these that cannot be read any more.")

_MEMBER = _object(
    processor=_TEXT,
    present=_TRUTH,
    receive={"enum": ["push", "signal", "poll", None]},
    new=_TRUTH,
    cursor=_OFFSET,
    number=_whole(0, NUMBER_MAX),
    lag_messages=_whole(),
    lag_bytes=_whole(),
    missed_messages=_whole(),
    leased_until_ms=_MS,
    holds=_TRUTH,
)

_SCHEMAS: _Json = {
    "Error": _object(
        ("code", "retry"),
        error={"type": "string", "minLength": 1, "description": "The reason, in a sentence."},
        code={"enum": sorted(STATUSES)},
        retry={"type": "boolean", "description": "True if the same request can succeed later."},
    ),
    "Snapshot": _with_content(offset=_OFFSET, epoch=_whole()),
    "Joined": _object(
        ("missed", "snapshot", "lease_s"),
        channel=_TEXT,
        epoch=_whole(),
        start=_OFFSET,
        end=_OFFSET,
        cursor=_OFFSET,
        number=_whole(0, NUMBER_MAX),
        lease_s=_LEASE,
        missed=_object(
            messages=_or_null(_whole(1)), reason={"enum": ["trimmed", "destroyed", "lost"]}
        ),
        snapshot=_ref("Snapshot"),
        was_member=_TRUTH,
    ),
    "Sent": _object(
        ("offset", "duplicate"),
        channel=_TEXT,
        number=_NUMBER,
        offset=_OFFSET,
        duplicate={"const": True},
    ),
    "Messages": _object(
        ("lost",),
        type={"const": "messages"},
        channel=_TEXT,
        count=_whole(0, MESSAGES_MAX),
        messages=_list(
            _with_content(offset=_OFFSET, processor=_TEXT, number=_NUMBER, ms=_MS),
        ),
        more=_TRUTH,
        lost=_LOST,
    ),
    "Place": _object(channel=_TEXT, offset=_OFFSET),
    "Channel": _object(
        name=_TEXT,
        exists=_TRUTH,
        epoch=_whole(),
        start=_OFFSET,
        end=_OFFSET,
        messages=_whole(),
        bytes=_whole(),
        reducer=_TEXT,
        members=_list(_MEMBER),
        readers=_list(_object(reader=_TEXT, cursor=_OFFSET, holds=_TRUTH)),
        needed_from=_OFFSET,
        snapshot=_or_null(
            _object(
                offset=_OFFSET,
                epoch=_whole(),
                ms=_MS,
                bytes=_whole(0, STATE_BYTES_MAX),
                messages_behind=_whole(),
            )
        ),
        destroyed_ms=_or_null(_MS),
        kept=_TRUTH,
        trouble=_TEXT,
        lease_ms=_whole(),
        grace_ms=_whole(),
        now_ms=_MS,
    ),
}

# Parameters


def _query(name: str, schema: _Json, example: object) -> _Json:
    return {"name": name, "in": "query", "required": True, "schema": schema, "example": example}


def _optional(name: str, schema: _Json, example: object) -> _Json:
    return _query(name, schema, example) | {"required": False}


_NAME = _query(
    "name",
    {
        "type": "string",
        "minLength": 1,
        "maxLength": RESERVED_TOPIC_BYTES_MAX - len(CHANNEL_PREFIX),
        "description": "Name of the channel. The limit is in bytes of UTF-8.",
    },
    "doc/1",
)
_PROCESSOR = _query(
    "processor",
    {
        "type": "string",
        "minLength": 1,
        "maxLength": PROCESSOR_BYTES_MAX,
        "pattern": r"^[^\x00-\x1f\x7f-\x9f]+$",
        "description": "Name of the processor. The limit is in bytes of UTF-8.",
    },
    "b",
)
_WHO = [_NAME, _PROCESSOR]

# Answers and bodies


def _json(description: str, schema: _Json) -> _Json:
    return {"description": description, "content": {JSON: {"schema": schema}}}


_COMMON_CODES = ("bad-message", "bad-channel", "wrong-credentials", "forbidden", "unavailable")

PATHS: dict[str, dict[str, _Json]] = {}
"""Operations by path and method. `operationId` is the name of the method that answers (`ChannelsApi`)."""


def _operation(
    request: str,
    name: str,
    summary: str,
    parameters: list[_Json],
    answer: _Json,
    *,
    codes: tuple[str, ...] = (),
    answers: dict[int, _Json] | None = None,
    reasons: dict[int, str] | None = None,
    bytes_max: int = 0,
) -> None:
    """Add an operation to `PATHS`.

    `answer` is its answer with status 200, `answers` are others. `codes` are its error codes in addition to
    those of every request, `reasons` are errors without a code. A body has at most `bytes_max` bytes.
    """
    told = {400: ["a parameter is missing or not valid"], 401: ["a token is needed"]}
    told |= {403: ["the request comes from a page in a browser"]}
    told |= {503: ["the log has failed or is stopping"]}
    if bytes_max:
        told[408] = ["the body did not arrive in time"]
    if "not-found" in codes:
        told[404] = ["there is no such channel or no snapshot"]
    for status, reason in (reasons or {}).items():
        told.setdefault(status, []).append(reason)
    for code in (*_COMMON_CODES, *codes):
        told.setdefault(STATUSES[code], []).append(f"`{code}`")
    errors = {status: _json("; ".join(why), _ref("Error")) for status, why in told.items()}
    responses = {200: answer} | (answers or {}) | errors
    method, path = request.split()
    PATHS.setdefault(path, {})[method.lower()] = {
        "operationId": name,
        "summary": summary,
        "parameters": parameters,
        **({"requestBody": _content(bytes_max)} if bytes_max else {}),
        "responses": {str(status): one for status, one in sorted(responses.items())},
    }


def _content(bytes_max: int) -> _Json:
    return {
        "required": True,
        "description": f"JSON, which is stored unchanged, or bytes; at most {bytes_max} bytes.",
        "content": {
            JSON: {"schema": {}, "example": {"insert": "x"}},
            RAW: {"schema": {"type": "string", "format": "binary", "maxLength": bytes_max}},
        },
    }


def _or_raw(answer: _Json, what: str, **headers: _Json) -> _Json:
    raw = {"schema": {"type": "string", "format": "binary"}}
    text = f"{answer['description']}. With `Accept: {RAW}`, {what} itself, as JSON or bytes."
    told = {"description": text, "content": answer["content"] | {RAW: raw}}
    return told | _headers(**headers)


def _headers(**schemas: _Json) -> _Json:
    """Return the headers of an answer that is sent as raw content."""
    return {"headers": {f"Headrace-{name}": {"schema": one} for name, one in schemas.items()}}


_operation(
    "GET /v1/channels",
    "list",
    "List channels, ordered by the bytes of their names",
    [
        _optional("prefix", _TEXT, "doc/"),
        _optional("after", _TEXT, "doc/0"),
        _optional("limit", _whole(1, CHANNELS_LISTED_MAX), 10),
    ],
    _json("A page of channels", _object(channels=_list(_ref("Channel")), more=_TRUTH)),
)
_operation(
    "GET /v1/channel",
    "describe",
    "Describe a channel",
    [_NAME],
    _json("Members, readers, snapshot and log of the channel", _ref("Channel")),
    codes=("not-found",),
)
_operation(
    "DELETE /v1/channel",
    "destroy",
    "Destroy a channel: its log, its snapshot and every membership",
    [_NAME],
    _json(
        "Counts of what was destroyed", _object(channel=_TEXT, messages=_whole(), members=_whole())
    ),
    codes=("not-found",),
)
_operation(
    "POST /v1/channel/keep",
    "keep",
    "Cancel a scheduled destruction",
    [_NAME],
    _json("True if one was scheduled", _object(channel=_TEXT, cancelled=_TRUTH)),
    codes=("not-found",),
)
_operation(
    "POST /v1/channel/join",
    "join",
    "Become a member, and a subscriber for a while",
    [
        *_WHO,
        _optional("from", {"anyOf": [{"const": "state"}, _OFFSET]}, "state"),
        _optional("lease_s", _LEASE, 60),
    ],
    _json("The state of the log, and the messages that were missed", _ref("Joined")),
    codes=("too-many",),
)
_operation(
    "POST /v1/channel/leave",
    "leave",
    "End a membership",
    _WHO,
    _json("The processor is not a member any more", _object(channel=_TEXT)),
)
_operation(
    "POST /v1/channel/messages",
    "send",
    "Send a message",
    [*_WHO, _query("number", _NUMBER, 1)],
    _json("A duplicate: it was stored before", _ref("Sent")),
    codes=(
        *("bad-content", "not-joined", "gap", "too-large", "cannot-fold"),
        *("too-many", "over-rate"),
    ),
    answers={201: _json("Stored", _ref("Sent"))},
    bytes_max=PAYLOAD_BYTES_MAX,
)
_operation(
    "GET /v1/channel/messages",
    "poll",
    "Get pending messages; they stay pending until they are acknowledged",
    [
        *_WHO,
        _optional("ack", _OFFSET, 0),
        _optional("from", _OFFSET, 0),
        _optional("max", _whole(1, MESSAGES_MAX), 10),
        _optional("wait_s", _whole(0, WAIT_S_MAX), 0),
    ],
    _or_raw(
        _json("Pending messages", _ref("Messages")),
        "the next message",
        Offset=_OFFSET,
        Processor=_TEXT | {"description": "Percent-encoded UTF-8."},
        Number=_NUMBER,
        More={"enum": ["true", "false"]},
        Lost=_LOST,
    ),
    codes=("not-joined", "bad-offset"),
    answers={
        204: {"description": f"With `Accept: {RAW}`: no message is pending"} | _headers(Lost=_LOST)
    },
    reasons={503: "too many requests wait"},
)
_operation(
    "POST /v1/channel/ack",
    "ack",
    "Acknowledge everything up to an offset",
    [*_WHO, _query("offset", _OFFSET, 0)],
    _json("The position of the cursor", _ref("Place")),
    codes=("not-joined", "bad-offset"),
)
_operation(
    "PUT /v1/channel/snapshot",
    "upload",
    "Upload the state that results from all messages up to an offset",
    [_NAME, _PROCESSOR | {"required": False}, _query("offset", _OFFSET, 0)],
    _json("The offset of the state that is kept", _ref("Place")),
    codes=("bad-content", "not-joined", "bad-offset", "not-uploaded", "too-large", "not-found"),
    bytes_max=STATE_BYTES_MAX,
)
_operation(
    "GET /v1/channel/snapshot",
    "snapshot",
    "Get the last known state",
    [_NAME],
    _or_raw(
        _json("The state", _object(channel=_TEXT, snapshot=_ref("Snapshot"))),
        "the state",
        Offset=_OFFSET,
        Epoch=_whole(),
    ),
    codes=("not-found",),
)
