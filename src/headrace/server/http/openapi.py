"""OpenAPI 3.1 description of the channel endpoints, at `/openapi.json`, with the code's limits and statuses.

Elsewhere: the endpoints themselves (`channels.py`). Other endpoints are documented only in `docs/http.md`.
"""

from typing import Any

from headrace import __version__
from headrace.model import CHANNEL_PREFIX, PAYLOAD_BYTES_MAX, RESERVED_TOPIC_BYTES_MAX
from headrace.payload.channel import NUMBER_MAX, PROCESSOR_BYTES_MAX
from headrace.payload.reducers import STATE_BYTES_MAX
from headrace.server.http.channels import (
    CHANNELS_LISTED_MAX,
    JSON,
    MESSAGES_MAX,
    RAW,
    STATUSES,
    WAIT_S_MAX,
)
from headrace.wire.channel import LEASE_S_MAX, LEASE_S_MIN, OFFSET_MAX

PATH = "/openapi.json"

_Json = dict[str, Any]


def description() -> _Json:
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Headrace: channels over HTTP",
            "version": __version__,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
            "description": "For processors that poll, and for operators. docs/protocols/channel.md says "
            "what it all means.",
        },
        # Without tokens in the configuration, all requests are allowed.
        "security": [{}, {"bearer": []}],
        "paths": {
            "/v1/channels": {"get": _LIST},
            "/v1/channel": {"get": _DESCRIBE, "delete": _DESTROY},
            "/v1/channel/keep": {"post": _KEEP},
            "/v1/channel/join": {"post": _JOIN},
            "/v1/channel/leave": {"post": _LEAVE},
            "/v1/channel/messages": {"post": _SEND, "get": _POLL},
            "/v1/channel/ack": {"post": _ACK},
            "/v1/channel/snapshot": {"put": _UPLOAD, "get": _SNAPSHOT},
        },
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
_NUMBER = _whole(1, NUMBER_MAX, description="The processor's own count of what it sends.")
_OFFSET = _whole(0, OFFSET_MAX, description="A byte position in the log, just past a message.")
_LEASE = {"type": "number", "minimum": LEASE_S_MIN, "maximum": LEASE_S_MAX}
_MS = _whole(description="Milliseconds since 1970.")
_LOST = _whole(
    1, description="How many that belong before or among these cannot be read any more, if any."
)

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
        error={"type": "string", "minLength": 1, "description": "What is wrong, in a sentence."},
        code={"enum": sorted(STATUSES)},
        retry={"type": "boolean", "description": "Whether the same again can succeed."},
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


def _query(name: str, schema: _Json, example: object, *, required: bool = True) -> _Json:
    return {"name": name, "in": "query", "required": required, "schema": schema, "example": example}


_NAME = _query(
    "name",
    {
        "type": "string",
        "minLength": 1,
        "maxLength": RESERVED_TOPIC_BYTES_MAX - len(CHANNEL_PREFIX),
        "description": "The channel. What counts is its length in bytes of UTF-8.",
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
        "description": "Who asks. What counts is its length in bytes of UTF-8.",
    },
    "b",
)

# Answers and bodies


def _json(description: str, schema: _Json) -> _Json:
    return {"description": description, "content": {JSON: {"schema": schema}}}


_COMMON_CODES = ("bad-message", "bad-channel", "wrong-credentials", "forbidden", "unavailable")


def _operation(
    name: str,
    summary: str,
    parameters: list[_Json],
    answers: dict[int, _Json],
    *codes: str,
    others: dict[int, str] | None = None,
    content: _Json | None = None,
) -> _Json:
    """Return an operation. `codes` are its error codes in addition to those of every request."""
    told = {400: ["a parameter is missing or makes no sense"], 401: ["a token is needed"]}
    told |= {403: ["a page in a browser asks"], 503: ["the log has failed or is stopping"]}
    for status, reason in (others or {}).items():
        told.setdefault(status, []).append(reason)
    for code in (*_COMMON_CODES, *codes):
        told.setdefault(STATUSES[code], []).append(f"`{code}`")
    errors = {status: _json("; ".join(why), _ref("Error")) for status, why in told.items()}
    body = {} if content is None else {"requestBody": content}
    return {
        "operationId": name,
        "summary": summary,
        "parameters": parameters,
        **body,
        "responses": {str(status): one for status, one in sorted((answers | errors).items())},
    }


def _content(bytes_max: int) -> _Json:
    return {
        "required": True,
        "description": f"JSON that is stored as it comes, or bytes; at most {bytes_max} of them.",
        "content": {
            JSON: {"schema": {}, "example": {"insert": "x"}},
            RAW: {"schema": {"type": "string", "format": "binary", "maxLength": bytes_max}},
        },
    }


def _or_raw(answer: _Json, what: str, **headers: _Json) -> _Json:
    raw = {"schema": {"type": "string", "format": "binary"}}
    text = f"{answer['description']}. With `Accept: {RAW}`, {what} as it is, JSON or bytes."
    told = {"description": text, "content": answer["content"] | {RAW: raw}}
    return told | _headers(**headers)


def _headers(**schemas: _Json) -> _Json:
    """Return the headers of an answer that is sent as raw content."""
    return {"headers": {f"Headrace-{name}": {"schema": one} for name, one in schemas.items()}}


_UPLOADED_IN_TIME = {408: "the body did not come in time"}

_JOIN = _operation(
    "join",
    "Become a member, and a subscriber for a while",
    [
        _NAME,
        _PROCESSOR,
        _query("from", {"anyOf": [{"const": "state"}, _OFFSET]}, "state", required=False),
        _query("lease_s", _LEASE, 60, required=False),
    ],
    {200: _json("Where the log is, and what was missed", _ref("Joined"))},
    "too-many",
)
_LEAVE = _operation(
    "leave",
    "Be a member no more",
    [_NAME, _PROCESSOR],
    {200: _json("Left, or never was there", _object(channel=_TEXT))},
)
_SEND = _operation(
    "send",
    "Send a message",
    [_NAME, _PROCESSOR, _query("number", _NUMBER, 1)],
    {
        200: _json("A duplicate: it was stored before", _ref("Sent")),
        201: _json("Stored", _ref("Sent")),
    },
    "bad-content",
    "not-joined",
    "gap",
    "too-large",
    "cannot-fold",
    others=_UPLOADED_IN_TIME,
    content=_content(PAYLOAD_BYTES_MAX),
)
_POLL = _operation(
    "poll",
    "Get what is pending; it stays so until it is acknowledged",
    [
        _NAME,
        _PROCESSOR,
        _query("ack", _OFFSET, 0, required=False),
        _query("from", _OFFSET, 0, required=False),
        _query("max", _whole(1, MESSAGES_MAX), 10, required=False),
        _query("wait_s", _whole(0, WAIT_S_MAX), 0, required=False),
    ],
    {
        200: _or_raw(
            _json("What is pending", _ref("Messages")),
            "the next message",
            Offset=_OFFSET,
            Processor=_TEXT | {"description": "Percent-encoded UTF-8."},
            Number=_NUMBER,
            More={"enum": ["true", "false"]},
            Lost=_LOST,
        ),
        204: {"description": f"With `Accept: {RAW}`: nothing is pending"} | _headers(Lost=_LOST),
    },
    "not-joined",
    "bad-offset",
    others={503: "too many requests wait"},
)
_ACK = _operation(
    "ack",
    "Acknowledge everything up to an offset",
    [_NAME, _PROCESSOR, _query("offset", _OFFSET, 0)],
    {200: _json("Where the cursor is", _ref("Place"))},
    "not-joined",
    "bad-offset",
)
_UPLOAD = _operation(
    "upload",
    "Upload the state that all messages up to an offset make",
    [_NAME, _PROCESSOR | {"required": False}, _query("offset", _OFFSET, 0)],
    {200: _json("The offset of the state that is kept", _ref("Place"))},
    "bad-content",
    "not-joined",
    "bad-offset",
    "not-uploaded",
    "too-large",
    "not-found",
    others=_UPLOADED_IN_TIME | {404: "without a processor: there is no such channel"},
    content=_content(STATE_BYTES_MAX),
)
_SNAPSHOT = _operation(
    "snapshot",
    "Get the last known state",
    [_NAME],
    {
        200: _or_raw(
            _json("The state", _object(channel=_TEXT, snapshot=_ref("Snapshot"))),
            "the state",
            Offset=_OFFSET,
            Epoch=_whole(),
        )
    },
    "not-found",
    others={404: "there is none"},
)
_LIST = _operation(
    "list",
    "List channels, in the order of their names' bytes",
    [
        _query("prefix", _TEXT, "doc/", required=False),
        _query("after", _TEXT, "doc/0", required=False),
        _query("limit", _whole(1, CHANNELS_LISTED_MAX), 10, required=False),
    ],
    {200: _json("A page of them", _object(channels=_list(_ref("Channel")), more=_TRUTH))},
)
_DESCRIBE = _operation(
    "describe",
    "What there is to know of a channel",
    [_NAME],
    {200: _json("Its members, what holds its log and what comes next", _ref("Channel"))},
    "not-found",
    others={404: "there is no such channel"},
)
_DESTROY = _operation(
    "destroy",
    "Destroy a channel: its log, its snapshot and every membership",
    [_NAME],
    {200: _json("What it had", _object(channel=_TEXT, messages=_whole(), members=_whole()))},
    "not-found",
    others={404: "there is no such channel"},
)
_KEEP = _operation(
    "keep",
    "Cancel a scheduled destruction",
    [_NAME],
    {200: _json("Whether there was one", _object(channel=_TEXT, cancelled=_TRUTH))},
    "not-found",
    others={404: "there is no such channel"},
)
