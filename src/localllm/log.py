"""Logging set-up and the request id that every log line of a request carries."""

from __future__ import annotations

import contextvars
import logging
import secrets
import sys
from typing import TextIO

request_id: contextvars.ContextVar[str] = contextvars.ContextVar("request_id", default="-")


def new_request_id() -> str:
    return secrets.token_hex(8)


class _WithRequestId(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        record.request_id = request_id.get()
        return True


def setup(*, debug: bool = False, name: str = "daemon", stream: TextIO | None = None) -> None:
    """Send all log records of this process to `stream` (stderr by default), one line each."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.addFilter(_WithRequestId())
    handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)-7s {name} %(name)s [%(request_id)s] %(message)s"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.DEBUG if debug else logging.INFO)
    for noisy in ("httpx", "httpcore", "filelock", "urllib3"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
