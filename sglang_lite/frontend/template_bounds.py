"""Bounds of rendering a template: time, and the size of what comes out.

The sandbox keeps a template from touching anything; these bounds keep it from taking long. A template belongs to the
model, but the messages it works on come from clients, and some templates take quadratic time in them.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from sglang_lite.frontend.request_limits import LIMITS
from sglang_lite.types import RequestError

_FILTER = "_bounded"
_MOST_POWER_BITS = 4096
_deadline: ContextVar[float] = ContextVar("template_deadline", default=float("inf"))


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox whose loops look at the clock and whose products stay small."""

    intercepted_binops = frozenset(["*", "**"])

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.filters[_FILTER] = _bounded

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in list(tree.find_all(nodes.For)):
            loop.iter = nodes.Filter(loop.iter, _FILTER, [], [], None, None, lineno=loop.lineno)
            loop.iter.set_environment(self)
        return tree

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        """Multiply or raise to a power, unless that makes something huge of something small."""
        if operator == "*":
            for repeated, count in ((left, right), (right, left)):
                is_sized = isinstance(repeated, str | bytes | list | tuple)
                if is_sized and isinstance(count, int) and len(repeated) * count > LIMITS.prompt_characters:
                    _too_large()
        elif isinstance(left, int) and isinstance(right, int) and left.bit_length() * abs(right) > _MOST_POWER_BITS:
            _too_large()
        return super().call_binop(context, operator, left, right)


def render_bounded(template: jinja2.Template, context: Mapping[str, Any]) -> str:
    """The text of a template.

    Raises:
        RequestError: it takes too long or becomes too long.
        Exception: whatever the template raises.
    """
    token = _deadline.set(time.monotonic() + LIMITS.template_seconds)
    try:
        pieces, size = [], 0
        for piece in template.generate(context):
            size += len(piece)
            if size > LIMITS.prompt_characters:
                _too_large()
            pieces.append(piece)
        _check_time()
        return "".join(pieces)
    finally:
        _deadline.reset(token)


def _bounded(items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        _check_time()
        yield item


def _check_time() -> None:
    if time.monotonic() > _deadline.get():
        raise RequestError(
            f"the chat template takes more than {LIMITS.template_seconds:g} s on these messages; send fewer or "
            f"shorter ones",
            field="messages",
        )


def _too_large() -> NoReturn:
    raise RequestError(
        f"the chat template makes more than {LIMITS.prompt_characters} characters of these messages; send fewer or "
        f"shorter ones",
        field="messages",
    )
