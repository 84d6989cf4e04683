"""How long a template may run and how much it may make.

Templates run in the runner's reader thread, which no signal reaches, and an exception thrown into a thread from
outside is only seen between two steps of Python, never inside a long one. So the compiled template looks at the clock
itself, at every `tick`. Between two ticks lies one operation on values that exist already, and each value is weighed
when it is made, so that none is ever large, however cleverly it is nested.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import jinja2
import jinja2.sandbox

from localllm.errors import TemplateError

MAX_SECONDS = 2.0
# The weight of one value, and of all that one run makes, beyond what the conversation brings along: its characters,
# and 32 for each element, which is what handling one costs more.
ELEMENT_WEIGHT = 32
MAX_WEIGHT = 8 << 20
MAX_TOTAL = 128 << 20
MAX_INTEGER_BITS = 4096

_NEVER = float("inf")
_T = TypeVar("_T")


class LimitExceeded(TemplateError):
    """The template took too long or made too much; the same conversation in another form would not help."""


def too_large(what: str) -> LimitExceeded:
    return LimitExceeded(
        f"the model's chat template makes something too large: {what}", hint="The model file may be hostile."
    )


class LimitedEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Keeps the account of the run that is going on, so each template has its own, and one thread at a time."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._deadline = _NEVER
        self._made = 0
        self._given = 0.0
        self._known: dict[int, float] = {}

    @contextlib.contextmanager
    def limits(self) -> Iterator[None]:
        """What runs inside shares one allowance of time and size. May be nested: the outermost counts."""
        if self._deadline != _NEVER:
            yield
            return
        self._deadline, self._made = time.monotonic() + MAX_SECONDS, 0
        try:
            yield
        finally:
            self._deadline = _NEVER

    def render(self, template: jinja2.Template, variables: Mapping[str, Any]) -> str:
        """Raises whatever the template raises."""
        self._known = {}
        items = [item for value in variables.values() if isinstance(value, list) for item in value]
        known = {id(item): _weight(item, {}, _NEVER) for item in items}
        self._known, self._given = known, sum(known.values())
        with self.limits():
            return template.render(variables)

    def tick(self) -> bool:
        """Called by the compiled template before anything that may repeat."""
        if time.monotonic() > self._deadline:
            raise LimitExceeded(
                f"the model's chat template ran for more than {MAX_SECONDS:g} s", hint="The model file may be hostile."
            )
        return True

    def weighed(self, value: _T) -> _T:
        """`value` itself, if it may exist."""
        if isinstance(value, str):
            self._charge(len(value))
        elif isinstance(value, list | tuple | dict):
            self._charge(len(value) * ELEMENT_WEIGHT)
            self.check_size(_weight(value, self._known, MAX_WEIGHT + self._given))
        elif isinstance(value, int) and value.bit_length() > MAX_INTEGER_BITS:
            raise too_large("a number")
        return value

    def check_size(self, size: float) -> None:
        if size > MAX_WEIGHT + self._given:
            raise too_large("one value")

    def concat(self, pieces: Iterable[str]) -> str:
        """What Jinja joins all its output with, so that no piece too much is ever joined."""
        size, parts = 0, []
        for piece in pieces:
            size += len(piece)
            self.check_size(size)
            parts.append(piece)
        self._charge(size)
        return "".join(parts)

    def _charge(self, size: int) -> None:
        self.check_size(size)
        self._made += size
        if self._made > MAX_TOTAL + 16 * self._given and self._deadline != _NEVER:
            raise too_large("all its values together")


def _weight(value: Any, known: Mapping[int, float], limit: float) -> float:
    """The weight of `value` as if nothing in it were shared, which is how it would be printed.

    Stops counting somewhere above `limit`. `known` holds what was counted before, by identity.
    """
    weight, stack = 0.0, [value]
    while stack and weight <= limit:
        item = stack.pop()
        weight += ELEMENT_WEIGHT
        if isinstance(item, str):
            weight += len(item)
        elif isinstance(item, dict | list | tuple):
            if id(item) in known:
                weight += known[id(item)]
            else:
                stack += [*item, *item.values()] if isinstance(item, dict) else item
    return weight
