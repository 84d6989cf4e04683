"""How errors look on the wire: one shape for /api, another for /v1, and the same status, code and hint behind both."""

from __future__ import annotations

import logging
import math

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from localllm import log
from localllm.api.wire import json_bytes, json_line, json_response
from localllm.errors import InvalidKey, InvalidOption, LocalLLMError, Overloaded, RateLimited

_log = logging.getLogger(__name__)

_RETRY_AFTER_SECONDS = 1


class NativeError(msgspec.Struct, omit_defaults=True):
    """`error` is what Ollama's clients read; `code` and `hint` are ours."""

    error: str
    code: str = ""
    hint: str = ""


class OpenAIErrorBody(msgspec.Struct, omit_defaults=True):
    message: str
    type: str
    param: str | None
    code: str | None
    hint: str = ""


class OpenAIError(msgspec.Struct):
    error: OpenAIErrorBody


class AnthropicErrorBody(msgspec.Struct):
    type: str
    message: str


class AnthropicError(msgspec.Struct, tag="error"):
    error: AnthropicErrorBody
    request_id: str


_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def anthropic_error(error: LocalLLMError) -> AnthropicError:
    """The hint has no place of its own in Anthropic's shape."""
    kind = _ANTHROPIC_TYPES.get(error.status, "invalid_request_error" if 400 <= error.status < 500 else "api_error")
    message = f"{error.message} ({error.hint})" if error.hint else error.message
    return AnthropicError(AnthropicErrorBody(kind, message), log.request_id.get())


def anthropic_event(error: LocalLLMError) -> bytes:
    """The last event of a stream that could not be finished."""
    return b"event: error\ndata: " + json_bytes(anthropic_error(error)) + b"\n\n"


def native_error(error: LocalLLMError) -> NativeError:
    return NativeError(error.message, error.code, error.hint)


def openai_error(error: LocalLLMError) -> OpenAIError:
    field = error.details.get("field")
    param = field if isinstance(field, str) else None
    return OpenAIError(OpenAIErrorBody(error.message, _openai_type(error.status), param, error.code, error.hint))


def _openai_type(status: int) -> str:
    if status in (404, 429):
        return "not_found_error" if status == 404 else "rate_limit_error"
    return "invalid_request_error" if 400 <= status < 500 else "api_error"


def native_line(error: LocalLLMError) -> bytes:
    """The last line of a stream that could not be finished."""
    return json_line(native_error(error))


def openai_event(error: LocalLLMError) -> bytes:
    """The last event of a stream that could not be finished."""
    return b"data: " + json_bytes(openai_error(error)) + b"\n\n"


def internal_error() -> LocalLLMError:
    """What a client is told about a mistake of ours; the log has the rest."""
    return LocalLLMError("internal error", hint="The daemon's log has more under this request's X-Request-Id.")


async def on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, LocalLLMError)
    return error_response(request.url.path, error)


def error_response(path: str, error: LocalLLMError) -> Response:
    is_native = not path.startswith("/v1/")
    status = error.status
    if isinstance(error, InvalidOption) and is_native:
        # Ollama's answer to an option of the wrong type, which its clients' tests expect.
        status = 500
    if status >= 500 and not isinstance(error, Overloaded):
        _log.warning("%s: %s (%s)", path, error.message, error.code)
    return json_response(_shaped(path, error), status, _headers(error))


def _shaped(path: str, error: LocalLLMError) -> NativeError | OpenAIError | AnthropicError:
    if path.startswith("/v1/messages"):
        return anthropic_error(error)
    return openai_error(error) if path.startswith("/v1/") else native_error(error)


def _headers(error: LocalLLMError) -> dict[str, str]:
    if isinstance(error, InvalidKey):
        return {"WWW-Authenticate": "Bearer"}
    if not isinstance(error, Overloaded | RateLimited):
        return {}
    seconds = error.details.get("retry_after")
    if not isinstance(seconds, int | float) or seconds <= 0:
        seconds = _RETRY_AFTER_SECONDS
    return {"Retry-After": str(math.ceil(seconds))}


async def on_http_error(request: Request, error: Exception) -> Response:
    """No such route, or not with this verb: the words of Ollama's router."""
    assert isinstance(error, HTTPException)
    text = {404: "404 page not found", 405: "405 method not allowed"}.get(error.status_code, error.detail)
    return PlainTextResponse(text, error.status_code, error.headers)
