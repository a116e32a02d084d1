"""The table of limits is what is enforced, and what the documentation says."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from sglang_lite.frontend.request_limits import LIMITS
from sglang_lite.frontend.validation import parse_sampling_params, parse_token_ids_logprob
from sglang_lite.types import RequestError

DOCUMENT = Path(__file__).parents[3] / "docs" / "operating.md"


def test_the_documentation_has_the_same_table() -> None:
    rows = re.findall(r"^\| `(\w+)` \| ([\d.]+) \|", DOCUMENT.read_text(), re.MULTILINE)
    assert dict(rows) == {name: str(value) for name, value in dataclasses.asdict(LIMITS).items()}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", LIMITS.choices + 1),
        ("stop", ["x"] * (LIMITS.stop_strings + 1)),
        ("stop", ["x" * (LIMITS.stop_characters + 1)]),
        ("stop_regex", ["x"] * (LIMITS.stop_strings + 1)),
        ("stop_regex", ["x" * (LIMITS.pattern_bytes + 1)]),
        ("stop_regex", [f"(x{{{LIMITS.pattern_instructions}}}){{2}}"]),
        ("stop_token_ids", list(range(LIMITS.stop_token_ids + 1))),
        ("logit_bias", {str(token): 1 for token in range(LIMITS.logit_biases + 1)}),
    ],
)
def test_more_is_refused(field: str, value: object) -> None:
    with pytest.raises(RequestError) as caught:
        parse_sampling_params({field: value})
    assert (caught.value.status, caught.value.field) == (400, field)


def test_too_many_scored_tokens() -> None:
    with pytest.raises(RequestError, match="over the limit"):
        parse_token_ids_logprob(list(range(LIMITS.scored_token_ids + 1)), vocab_size=None)
    assert (
        len(parse_token_ids_logprob(list(range(LIMITS.scored_token_ids)), vocab_size=None)) == LIMITS.scored_token_ids
    )
