"""Request bodies: from bytes to a Struct, as forgiving as Ollama is and no more.

The Content-Type does not matter, field names match in any case, `null` means absent, and unknown fields are ignored.
A field that is known, but cannot be honoured, is refused by name: see `Body`.
"""

from __future__ import annotations

import functools
import re
import typing
from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from localllm.errors import BodyTooLarge, InvalidRequest, RequestCancelled, Unsupported

MAX_BODY_BYTES = 64 << 20
JSON = "application/json; charset=utf-8"

_encoder = msgspec.json.Encoder()
_VALIDATION = re.compile(r"(?P<what>.*?)(?: - at `\$\.?(?P<path>.*)`)?", re.DOTALL)


class Body(msgspec.Struct, kw_only=True):
    """Base of request bodies.

    `refused` lists fields that this version cannot honour, each with the values that ask for nothing: any other value
    is answered 400.
    """

    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {}


class ModelBody(Body, kw_only=True):
    """What every request to a model may say: see options, turn and docs/api.md. Some of it is nobody's but ours."""

    model: str = ""
    options: dict[str, Any] = msgspec.field(default_factory=dict)
    keep_alive: Any = msgspec.UNSET
    priority: int | msgspec.UnsetType = msgspec.UNSET


class AnswerBody(ModelBody, kw_only=True):
    """What every request for text may say besides."""

    pin: bool = False
    grammar: str = ""
    regex: str = ""


B = TypeVar("B", bound=Body)


async def read_body(request: Request) -> bytes:
    """The whole body. Raises BodyTooLarge, or RequestCancelled when the client leaves in the middle of it."""
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > MAX_BODY_BYTES:
        raise _too_large()
    body = bytearray()
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise RequestCancelled("the client went away while it sent its request")
        body += message.get("body", b"")
        if len(body) > MAX_BODY_BYTES:
            raise _too_large()
        if not message.get("more_body", False):
            return bytes(body)


def _too_large() -> BodyTooLarge:
    return BodyTooLarge(
        f"the request body is over the limit of {MAX_BODY_BYTES >> 20} MiB", hint="Send less text at a time."
    )


def decode(body: bytes, type: type[B]) -> B:
    """Raises InvalidRequest that names the field, or Unsupported for a field of `type.refused`."""
    raw = _parse(body)
    folded = _fold(raw, type)
    for field, neutral in type.refused.items():
        if field in folded and folded[field] not in neutral:
            raise unsupported(field)
    try:
        return msgspec.convert(folded, type)
    except msgspec.ValidationError as error:
        raise _wrong_type(str(error)) from None


def unsupported(field: str, why: str = "is not supported yet") -> Unsupported:
    return Unsupported(f'"{field}" {why}', hint="Leave the field out.", field=field)


def invalid(field: str, what: str, hint: str = "") -> InvalidRequest:
    return InvalidRequest(f'"{field}": {what}', hint=hint, field=field)


def check_integers(value: Any, where: str) -> None:
    """Raises InvalidRequest for an integer of more than 64 bits, which could not be passed on to a runner."""
    try:
        msgspec.msgpack.encode(value)
    except OverflowError:
        raise InvalidRequest(f'"{where}" has an integer of more than 64 bits', field=where) from None


def _parse(body: bytes) -> dict[str, Any]:
    if not body.strip():
        raise InvalidRequest("missing request body", hint="Send a JSON object.")
    try:
        raw = msgspec.json.decode(body)
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"the request body is not valid JSON: {error}") from None
    except RecursionError:
        raise InvalidRequest("the request body is nested too deeply") from None
    if not isinstance(raw, dict):
        raise InvalidRequest("the request body must be a JSON object")
    return raw


def _wrong_type(text: str) -> InvalidRequest:
    match = _VALIDATION.fullmatch(text)
    assert match is not None
    what = match["what"].replace("`", "")
    return invalid(match["path"], what[:1].lower() + what[1:]) if match["path"] else InvalidRequest(what)


def _fold(value: dict[str, Any], struct: type[msgspec.Struct]) -> dict[str, Any]:
    """Lower-case the field names of `struct`, and of the Structs in it, and leave out what is null."""
    inside = _structs_inside(struct)
    folded: dict[str, Any] = {}
    for key, item in value.items():
        if item is None:
            continue
        name = key if key in inside else key.lower()
        child = inside.get(name)
        folded[name] = item if child is None else _fold_child(item, child)
    return folded


def _fold_child(item: Any, struct: type[msgspec.Struct]) -> Any:
    if isinstance(item, list):
        return [_fold_child(element, struct) for element in item]
    return _fold(item, struct) if isinstance(item, dict) else item


@functools.cache
def _structs_inside(struct: type[msgspec.Struct]) -> dict[str, type[msgspec.Struct] | None]:
    """The names of all fields, each with the Struct that it holds, alone or in a list, if it holds one."""
    hints = typing.get_type_hints(struct)
    return {field.encode_name: _struct_of(hints[field.name]) for field in msgspec.structs.fields(struct)}


def _struct_of(hint: Any) -> type[msgspec.Struct] | None:
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return hint
    return next(filter(None, map(_struct_of, typing.get_args(hint))), None)


def json_bytes(value: Any) -> bytes:
    return _encoder.encode(value)


def json_line(value: Any) -> bytes:
    return _encoder.encode_lines((value,))


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(json_bytes(value), status, headers, media_type=JSON)
