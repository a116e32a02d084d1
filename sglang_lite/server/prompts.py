"""The field of an OpenAI body that holds texts or token ids."""

from __future__ import annotations

from typing import Any

from sglang_lite.frontend.fields import wrong_type
from sglang_lite.server import fields
from sglang_lite.server.sequences import Prompt
from sglang_lite.types import RequestError

_KINDS = "a string, a list of strings, a list of token ids or a list of lists of token ids"


def read_prompts(value: Any, field: str = "prompt") -> list[Prompt]:
    """The prompts in ``field``: a text, several, the token ids of one, or of several.

    Raises:
        RequestError: missing, empty or of another type.
    """
    if value is None or value == []:
        message = f"{field.capitalize()} cannot be empty" if value == [] else f"{field} is required"
        raise RequestError(message, field=field)
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        wrong_type(field, value, _KINDS)
    if fields.is_integer_list(value):
        return [value]
    if all(isinstance(item, str) for item in value) or all(fields.is_integer_list(item) for item in value):
        return value
    wrong_type(field, value, _KINDS)


def prompt_fields(value: Any, count: int, field: str = "prompt") -> list[str]:
    """The name of each prompt in the body: the field's own, or ``prompt[0]`` and so on for a list of prompts."""
    is_single = isinstance(value, str) or (bool(value) and isinstance(value[0], int))
    return [field] if is_single else [f"{field}[{index}]" for index in range(count)]
