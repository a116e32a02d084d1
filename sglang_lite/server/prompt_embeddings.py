"""``input_embeds`` of ``/generate``: prompts as vectors, which take the place of what the model's embedding gives."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from sglang_lite.config import ServerConfig
from sglang_lite.frontend.fields import shorten, wrong_type
from sglang_lite.frontend.request_limits import LIMITS
from sglang_lite.server.context import ServerContext
from sglang_lite.types import Float32Array, RequestError

FIELD = "input_embeds"
_LARGEST = 1e300
_EXPECTED = "a sequence of vectors, or a sequence of such prompts"


def read_embeddings(context: ServerContext, body: Mapping[str, Any]) -> tuple[list[Float32Array], bool]:
    """The prompts, float32[T, hidden] each, and whether they came as a list.

    Raises:
        RequestError: a wrong type or shape, a number that is not finite, too many, or a server that cannot.
    """
    _check_server(context.config)
    value = body[FIELD]
    if not isinstance(value, list):
        wrong_type(FIELD, value, _EXPECTED)
    if not value:
        raise RequestError(f"{FIELD} cannot be empty.", field=FIELD)
    is_batch = isinstance(value[0], list) and bool(value[0]) and isinstance(value[0][0], list)
    prompts = value if is_batch else [value]
    width = context.engine.description.hidden_size
    rows = sum(len(prompt) for prompt in prompts if isinstance(prompt, list))
    if rows * width > LIMITS.embedding_values:
        raise RequestError(
            f"{FIELD} has {rows} vectors of {width} numbers, over the limit of {LIMITS.embedding_values} numbers; send "
            "several requests",
            field=FIELD,
        )
    return [
        _matrix(prompt, width, f"{FIELD}[{index}]" if is_batch else FIELD) for index, prompt in enumerate(prompts)
    ], (is_batch)


def check_embedded(body: Mapping[str, Any]) -> None:
    """Refuse what a prompt without tokens cannot have.

    Raises:
        RequestError: names the field.
    """
    starts = body.get("logprob_start_len")
    if body.get("return_logprob") and any(start is not None and start >= 0 for start in _as_list(starts)):
        raise RequestError(
            f"logprob_start_len: a prompt of {FIELD} has no tokens to score; leave it out, and outputs are scored",
            field="logprob_start_len",
        )
    if body.get("session_params"):
        raise RequestError(f"session_params continue tokens, and {FIELD} are none; send one of them", field=FIELD)


def _as_list(value: Any) -> list[Any]:
    return [one for one in (value if isinstance(value, list) else [value]) if not isinstance(one, str)]


def _check_server(config: ServerConfig) -> None:
    """Embeddings reach one rank of one engine, and nothing but the served model can read them."""
    reasons = {
        "--tp-size above 1": config.tp_size > 1,
        "--disaggregation-mode": config.is_disaggregated,
        f"--speculative-algorithm {str(config.speculative_algorithm).upper()}": config.drafts_with_weights,
    }
    found = next((name for name, holds in reasons.items() if holds), None)
    if found is not None:
        raise RequestError(
            f"{FIELD} does not go together with {found}; send text or input_ids", status=501, field=FIELD
        )


def _matrix(prompt: Any, width: int, field: str) -> Float32Array:
    if not isinstance(prompt, list) or not prompt:
        wrong_type(field, prompt, "a sequence of vectors, at least one")
    matrix: Float32Array = np.empty((len(prompt), width), dtype=np.float32)
    with np.errstate(over="ignore"):  # what is too large for float32 is found below
        for index, row in enumerate(prompt):
            if not isinstance(row, list) or not set(map(type, row)) <= {float, int}:
                wrong_type(f"{field}[{index}]", _culprit(row), f"a sequence of {width} numbers")
            if len(row) != width:
                raise RequestError(
                    f"{field}[{index}] has {len(row)} numbers; the model's hidden size is {width}", field=field
                )
            try:
                matrix[index] = row
            except OverflowError:  # an integer that no float holds
                matrix[index] = [math.inf if abs(number) > _LARGEST else number for number in row]
    good = np.isfinite(matrix)
    if not good.all():
        row, column = np.argwhere(~good)[0].tolist()
        raise RequestError(
            f"{field}[{row}][{column}] must be a finite 32-bit number, got {shorten(prompt[row][column])}", field=field
        )
    return matrix


def _culprit(row: Any) -> Any:
    if not isinstance(row, list):
        return row
    return next((item for item in row if type(item) not in (float, int)), row)
