"""Every error that localllm raises on purpose.

LocalLLMError
├── InvalidRequest            400  the caller's input is wrong; names the field
│   ├── InvalidName           400  not a model name
│   ├── InvalidUsage          400  a flag or argument of a command is wrong
│   ├── InvalidOption         400  a known option with a value of the wrong kind (500 on /api, as in Ollama)
│   ├── BodyTooLarge          413  more than a request may send
│   ├── Unsupported           400  understood, but this model or version cannot do it
│   ├── ContextExceeded       400  prompt longer than the window; carries both numbers
│   └── TemplateError         400  the model's chat template refused or broke on this conversation
├── ModelNotFound             404  not in the store
├── NotFoundAtSource          404  no such repository, file, tag or package at a source
├── Unauthorized              401  a source wants credentials
│   └── InvalidKey            401  we want an API key, or another one
├── Forbidden                 403  credentials are not enough (licence not accepted, no access)
├── RateLimited               429  too many requests with one API key; carries retry_after
│   └── QuotaExceeded         429  too many tokens for today
├── RequestCancelled          499  the client went away
├── InvalidModelFile          422  not a GGUF we can trust, or damaged
├── StoreError                500  the store cannot be read or written
│   └── NoSpace               507  the disk is full, or would be
├── SourceUnavailable         502  a source could not be reached
│   └── DigestMismatch        502  the bytes are not the ones that were promised
├── Overloaded                503  try again later; carries retry_after
│   ├── QueueFull             503
│   └── ShuttingDown          503
├── DeadlineExceeded          504  not within the time that the client allows
├── ModelTooLarge             507  cannot fit in memory, whatever is evicted
├── LoadFailed                500  the runner could not load the model
│   └── LoadOutOfMemory       507  because memory, of the machine or of an accelerator, did not suffice
├── RunnerCrashed             500  the runner died under this request
├── ConfigError               500  a setting is wrong; names the setting and where it came from
├── AddressInUse              500  something else owns the port
└── DaemonUnavailable         503  the command line cannot reach or start a daemon

"Cannot now" is a return value and "must not happen" an assertion: neither belongs here.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec

Detail = str | int | float | bool | None


class ErrorInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """A LocalLLMError as plain data: what crosses a process and what a client sees."""

    code: str
    message: str
    hint: str = ""
    details: dict[str, Detail] = {}


class LocalLLMError(Exception):
    """Base of all deliberate errors.

    `code` is stable and machine-readable, `status` is the HTTP status, `hint` is one sentence that says what
    the user can do, `details` holds the numbers behind the message (for example `num_ctx`).
    """

    code: ClassVar[str] = "internal_error"
    status: ClassVar[int] = 500

    def __init__(self, message: str, *, hint: str = "", **details: Detail) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.details = details

    def info(self) -> ErrorInfo:
        return ErrorInfo(self.code, self.message, self.hint, self.details)


class InvalidRequest(LocalLLMError):
    code = "invalid_request"
    status = 400


class InvalidName(InvalidRequest):
    code = "invalid_name"


class InvalidUsage(InvalidRequest):
    code = "invalid_usage"


class InvalidOption(InvalidRequest):
    code = "invalid_option"


class BodyTooLarge(InvalidRequest):
    code = "body_too_large"
    status = 413


class Unsupported(InvalidRequest):
    code = "unsupported"


class ContextExceeded(InvalidRequest):
    code = "context_length_exceeded"


class TemplateError(InvalidRequest):
    code = "template_error"


class ModelNotFound(LocalLLMError):
    code = "model_not_found"
    status = 404


class NotFoundAtSource(LocalLLMError):
    code = "not_found_at_source"
    status = 404


class Unauthorized(LocalLLMError):
    code = "unauthorized"
    status = 401


class InvalidKey(Unauthorized):
    code = "invalid_api_key"


class Forbidden(LocalLLMError):
    code = "forbidden"
    status = 403


class RateLimited(LocalLLMError):
    """`details["retry_after"]` is the number of seconds after which there is room again."""

    code = "rate_limit_exceeded"
    status = 429


class QuotaExceeded(RateLimited):
    code = "quota_exceeded"


class RequestCancelled(LocalLLMError):
    code = "request_cancelled"
    status = 499


class InvalidModelFile(LocalLLMError):
    code = "invalid_model_file"
    status = 422


class StoreError(LocalLLMError):
    code = "store_error"


class NoSpace(StoreError):
    code = "no_space"
    status = 507


class SourceUnavailable(LocalLLMError):
    code = "source_unavailable"
    status = 502


class DigestMismatch(SourceUnavailable):
    code = "digest_mismatch"


class Overloaded(LocalLLMError):
    """`details["retry_after"]` is the number of seconds after which trying again makes sense."""

    code = "overloaded"
    status = 503


class QueueFull(Overloaded):
    code = "queue_full"


class ShuttingDown(Overloaded):
    code = "shutting_down"


class DeadlineExceeded(LocalLLMError):
    code = "deadline_exceeded"
    status = 504


class ModelTooLarge(LocalLLMError):
    code = "model_too_large"
    status = 507


class LoadFailed(LocalLLMError):
    code = "load_failed"


class LoadOutOfMemory(LoadFailed):
    code = "load_out_of_memory"
    status = 507


class RunnerCrashed(LocalLLMError):
    code = "runner_crashed"


class ConfigError(LocalLLMError):
    code = "config_error"


class AddressInUse(LocalLLMError):
    code = "address_in_use"


class DaemonUnavailable(LocalLLMError):
    code = "daemon_unavailable"
    status = 503


def _classes(root: type[LocalLLMError]) -> dict[str, type[LocalLLMError]]:
    found = {root.code: root}
    for child in root.__subclasses__():
        found.update(_classes(child))
    return found


def from_info(info: ErrorInfo) -> LocalLLMError:
    """Rebuild the error on the other side of a process boundary; an unknown code becomes the base class."""
    cls = _classes(LocalLLMError).get(info.code, LocalLLMError)
    return cls(info.message, hint=info.hint, **info.details)
