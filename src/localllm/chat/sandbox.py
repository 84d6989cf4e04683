"""Where a template runs that is part of a file that somebody else made.

Jinja's immutable sandbox keeps it from every attribute that leads out of its data and from changing what it is given.
What Jinja does not know is how long a template takes and how much it makes (chat.limits). The code generator therefore
begins every body (of a loop, a branch, a macro) and every condition of a loop with a tick, and has every container and
text weighed that the code makes; calls, filters, tests and operators tick and are weighed here. The few operations that
make much out of little in a single step are checked before they start.
"""

from __future__ import annotations

import functools
import re
import string
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jinja2.compiler
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.utils

from localllm.chat import filters
from localllm.chat.limits import ELEMENT_WEIGHT, LimitedEnvironment, too_large

# Methods of texts that no chat template needs and that make much out of little.
_REMOVED_METHODS = frozenset(("center", "encode", "expandtabs", "ljust", "rjust", "translate", "zfill"))
_WIDE_SPEC = re.compile(r"\d{5}|\{")


class _Generator(jinja2.compiler.CodeGenerator):
    """Writes the ticks and the weighing into the code that a template becomes."""

    def blockvisit(self, nodes: Iterable[jinja2.nodes.Node], frame: jinja2.compiler.Frame) -> None:
        self.writeline("environment.tick()")
        super().blockvisit(nodes, frame)

    def visit_For(self, node: jinja2.nodes.For, frame: jinja2.compiler.Frame) -> None:
        if node.test is not None:
            tick = jinja2.nodes.Call(jinja2.nodes.EnvironmentAttribute("tick"), [], [], None, None)
            node.test = jinja2.nodes.And(tick, node.test, lineno=node.lineno)
        super().visit_For(node, frame)

    def visit_Concat(self, node: jinja2.nodes.Concat, frame: jinja2.compiler.Frame) -> None:
        self.write("environment.concat(map(str, (")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write(")))")

    def visit_List(self, node: jinja2.nodes.List, frame: jinja2.compiler.Frame) -> None:
        self._weigh(super().visit_List, node, frame, is_constant=_are_constant(node.items))

    def visit_Tuple(self, node: jinja2.nodes.Tuple, frame: jinja2.compiler.Frame) -> None:
        is_target = node.ctx != "load"
        self._weigh(super().visit_Tuple, node, frame, is_constant=is_target or _are_constant(node.items))

    def visit_Dict(self, node: jinja2.nodes.Dict, frame: jinja2.compiler.Frame) -> None:
        self._weigh(super().visit_Dict, node, frame, is_constant=False)

    def visit_Getitem(self, node: jinja2.nodes.Getitem, frame: jinja2.compiler.Frame) -> None:
        is_slice = isinstance(node.arg, jinja2.nodes.Slice)
        self._weigh(super().visit_Getitem, node, frame, is_constant=not is_slice)

    def _weigh(self, visit: Callable[..., None], node: Any, frame: jinja2.compiler.Frame, *, is_constant: bool) -> None:
        if is_constant:
            visit(node, frame)
            return
        self.write("environment.weighed(")
        visit(node, frame)
        self.write(")")


def _are_constant(nodes: Sequence[jinja2.nodes.Expr]) -> bool:
    return all(isinstance(node, jinja2.nodes.Const) for node in nodes)


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks training spans for Transformers; for a prompt it means nothing."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node | list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(jinja2.utils.Namespace):
    """Does not print what is in it, which is not weighed."""

    def __repr__(self) -> str:
        return "<Namespace>"


class Sandbox(LimitedEnvironment):
    """One for each template. Not for several threads at once."""

    code_generator_class = _Generator
    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationTag])
        functions: dict[str, Callable[..., Any]] = self.filters | filters.FILTERS
        tests: Mapping[str, Any] = self.tests
        self.filters = {name: self._counted(f) for name, f in functions.items() if name not in filters.REMOVED}
        self.tests = {name: self._counted(test) for name, test in tests.items()}
        del self.globals["lipsum"]
        self.globals |= {
            "namespace": _Namespace,
            "raise_exception": filters.raise_exception,
            "strftime_now": filters.strftime_now,
        }

    def call(self, context: jinja2.runtime.Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.tick()
        owner, name = getattr(obj, "__self__", None), getattr(obj, "__name__", "")
        if isinstance(owner, str) and name == "join":
            return filters.do_join(self, args[0] if args else (), owner)
        if isinstance(owner, str) and name == "replace":
            return filters.do_replace(self, owner, *args)
        return self.weighed(super().call(context, obj, *args, **kwargs))

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        self.tick()
        if operator == "*":
            self.check_size(max(_repeated_size(left, right), _repeated_size(right, left)))
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            self.check_size(left.bit_length() * abs(right))
        elif operator == "%" and isinstance(left, str):
            filters.check_percent(left)
        return self.weighed(super().call_binop(context, operator, left, right))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, (int, float)) or (isinstance(obj, str) and attr in _REMOVED_METHODS):
            return False
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapper = super().wrap_str_format(value)
        if wrapper is not None and isinstance(value, types.BuiltinMethodType | types.MethodType):
            for _, _, spec, _ in string.Formatter().parse(str(value.__self__)):
                if spec and _WIDE_SPEC.search(spec):
                    raise too_large("a format")
        return wrapper

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.tick()
            return self.weighed(function(*args, **kwargs))

        return counted


def _repeated_size(what: Any, times: Any) -> int:
    if not isinstance(times, int) or not isinstance(what, (str, list, tuple)):
        return 0
    return len(what) * times * (1 if isinstance(what, str) else ELEMENT_WEIGHT)
