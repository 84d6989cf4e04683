"""What a request says about its turn: how urgent it is, and whether its prompt is worth keeping.

`priority` and `pin` stand beside the other fields of a body, or, for clients whose types leave no room for that, in its
`options`; `X-Priority` can be set where nothing but headers can.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from msgspec import UNSET
from starlette.requests import Request

from localllm.api.access import current_key
from localllm.api.generation import client_of
from localllm.api.wire import AnswerBody, ModelBody, invalid
from localllm.errors import InvalidOption

HEADER = "x-priority"
# Beyond these, the engine makes no difference.
MIN_PRIORITY, MAX_PRIORITY = -10, 10
_INTEGER = re.compile(r"[+-]?\d{1,9}", re.ASCII)


@dataclass(frozen=True)
class Turn:
    """`priority`: lower is sooner; None when the body does not say. `pin`: keep what the prompt begins with."""

    priority: int | None = None
    pin: bool = False

    def priority_for(self, request: Request) -> int:
        """Raises InvalidRequest for a header that is no number. A request may be less urgent than its key, not more."""
        key = current_key()
        asked = self._asked(request)
        if key is None:
            return asked or 0
        return key.priority if asked is None else max(asked, key.priority)

    def _asked(self, request: Request) -> int | None:
        if self.priority is not None:
            return self.priority
        text = request.headers.get(HEADER)
        if text is None:
            return None
        if not _INTEGER.fullmatch(text.strip()):
            raise invalid("X-Priority", f"must be an integer from {MIN_PRIORITY} (first) to {MAX_PRIORITY} (last)")
        return _clamp(int(text))

    def fields(self, request: Request) -> dict[str, Any]:
        """Those of a ChatRequest. Raises as `priority_for`."""
        return {"client": client_of(request), "priority": self.priority_for(request), "pin": self.pin}


def turn_of(body: ModelBody) -> Turn:
    """Raises InvalidOption that names the field."""
    priority = body.options.get("priority") if body.priority is UNSET else body.priority
    pin = body.options.get("pin")
    if priority is not None and type(priority) is not int:
        raise InvalidOption('option "priority" must be of type integer', field="priority")
    if pin is not None and not isinstance(pin, bool):
        raise InvalidOption('option "pin" must be of type boolean', field="pin")
    is_pinned = bool(pin) or (isinstance(body, AnswerBody) and body.pin)
    return Turn(None if priority is None else _clamp(priority), is_pinned)


def _clamp(priority: int) -> int:
    return min(max(priority, MIN_PRIORITY), MAX_PRIORITY)
