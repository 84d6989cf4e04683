"""The filters and functions that templates are given where Jinja's own could make much out of little."""

from __future__ import annotations

import datetime
import json
import re
import types
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

import jinja2
import jinja2.filters

from localllm.chat.limits import LimitedEnvironment, too_large
from localllm.errors import TemplateError

MAX_INDENT = 64

# Filters that no chat template needs and that make much out of little.
REMOVED = {"batch", "center", "filesizeformat", "forceescape", "pprint", "random", "slice"}
REMOVED |= {"truncate", "urlencode", "urlize", "wordwrap", "xmlattr"}
# A width of five digits, or one that comes from an argument, in a printf-style format.
_WIDE_PERCENT = re.compile(r"%[^a-zA-Z%]*(\*|\d{5})")


class Refusal(TemplateError):
    """The template called raise_exception: it does not accept this history, but may accept another form of it."""


def check_percent(form: str) -> None:
    if _WIDE_PERCENT.search(form):
        raise too_large("a format")


def raise_exception(message: str) -> NoReturn:
    raise Refusal(str(message))


def strftime_now(form: str) -> str:
    if len(form) > 100:
        raise too_large("a date")
    return datetime.datetime.now().strftime(form)


def do_tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As Transformers does it: plain JSON, not escaped for HTML. What `map` and `select` give is written as a list."""
    if (indent or 0) > MAX_INDENT or any(len(separator) > MAX_INDENT for separator in separators or ()):
        raise too_large("an indentation")
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys, default=_as_list
    )


def _as_list(value: Any) -> list[Any]:
    if isinstance(value, types.GeneratorType):
        return list(value)
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")


@jinja2.pass_environment
def do_join(
    environment: LimitedEnvironment, value: Iterable[Any], d: Any = "", attribute: str | int | None = None
) -> str:
    if attribute is not None:
        value = map(jinja2.filters.make_attrgetter(environment, attribute), value)
    return environment.concat(_separated(map(str, value), str(d)))


def _separated(parts: Iterable[str], separator: str) -> Iterator[str]:
    for index, part in enumerate(parts):
        if index:
            yield separator
        yield part


@jinja2.pass_environment
def do_replace(environment: LimitedEnvironment, s: Any, old: Any, new: Any, count: int | None = None) -> str:
    text = str(s)
    environment.check_size(len(text) + text.count(str(old)) * len(str(new)))
    return environment.weighed(text.replace(str(old), str(new), -1 if count is None else count))


@jinja2.pass_environment
def do_indent(env: LimitedEnvironment, s: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    size = width if isinstance(width, int) else len(width)
    env.check_size(len(str(s)) + (str(s).count("\n") + 1) * size)
    return jinja2.filters.do_indent(str(s), width, first, blank)


@jinja2.pass_environment
def do_sum(
    environment: LimitedEnvironment, iterable: Iterable[Any], attribute: str | int | None = None, start: float = 0
) -> Any:
    """Of numbers only: a sum of lists copies all of them again for each."""
    if attribute is not None:
        iterable = map(jinja2.filters.make_attrgetter(environment, attribute), iterable)
    if not isinstance(start, int | float):
        raise too_large("a sum of what are not numbers")
    return sum(iterable, start)


def do_format(value: Any, *args: Any, **kwargs: Any) -> str:
    check_percent(str(value))
    return str(value) % (kwargs or args)


FILTERS = {
    "format": do_format,
    "indent": do_indent,
    "join": do_join,
    "replace": do_replace,
    "sum": do_sum,
    "tojson": do_tojson,
}
