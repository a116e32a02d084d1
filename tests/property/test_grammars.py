"""Whatever the schema and the model: a complete output matches it, and one that is cut is a prefix of that."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sglang_lite.engine.offline import Engine

# Every part is bounded: the model knows nothing and would never close a string or a list by itself.
LEAVES: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.builds(
        lambda low, span: {"type": "integer", "minimum": low, "maximum": low + span},
        st.integers(-50, 50),
        st.integers(0, 99),
    ),
    st.builds(
        lambda low, span: {"type": "string", "minLength": low, "maxLength": low + span},
        st.integers(0, 3),
        st.integers(0, 4),
    ),
    st.builds(lambda pattern: {"type": "string", "pattern": pattern}, st.sampled_from(["^[a-c]{2,4}$", "^\\d{3}-x$"])),
    st.builds(
        lambda values: {"enum": values}, st.lists(st.sampled_from(["a", 1, None, "é🙂", 2.5]), min_size=1, max_size=3)
    ),
)


def nested(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    names = st.sampled_from(["a", "b c", "é", '"q"'])
    return st.one_of(
        st.builds(
            lambda properties, count: {
                "type": "object",
                "properties": properties,
                "required": list(properties)[:count],
                "additionalProperties": False,
            },
            st.dictionaries(names, inner, min_size=1, max_size=3),
            st.integers(0, 3),
        ),
        st.builds(
            lambda items, low: {"type": "array", "items": items, "minItems": low, "maxItems": low + 2},
            inner,
            st.integers(0, 2),
        ),
        st.builds(lambda options: {"anyOf": options}, st.lists(inner, min_size=1, max_size=2)),
    )


SCHEMAS = st.recursive(LEAVES, nested, max_leaves=4)


@pytest.fixture(scope="module", params=["xgrammar", "llguidance"])
def engine(request: pytest.FixtureRequest, chain_model: Path) -> Iterator[Engine]:
    with Engine(
        model_path=str(chain_model), device="cpu", page_size=4, max_total_tokens=4096, grammar_backend=request.param
    ) as made:
        yield made


@pytest.mark.timeout(300)
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(schema=SCHEMAS, seed=st.integers(0, 2**31), cut=st.floats(0, 1))
def test_outputs_match_their_schema(engine: Engine, schema: dict[str, Any], seed: int, cut: float) -> None:
    parameters = {"json_schema": json.dumps(schema), "temperature": 8.0, "sampling_seed": seed, "max_new_tokens": 400}
    answer = engine.generate("A", parameters)
    length = len(answer["output_ids"])
    if answer["meta_info"]["finish_reason"]["type"] == "stop":
        jsonschema.validate(json.loads(answer["text"]), schema)
    shorter = max(1, int(length * cut))
    prefix = engine.generate("A", {**parameters, "max_new_tokens": shorter})
    assert prefix["output_ids"] == answer["output_ids"][:shorter]
