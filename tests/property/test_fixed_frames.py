"""Assembled stream events are the ones that encoding the whole object gives."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sglang_lite.server.errors import encode_json
from sglang_lite.server.fixed_frames import FixedFrame

TEXT = st.text(st.characters(exclude_categories=["Cs"]))
"""Any text that JSON can carry: a lone surrogate cannot, and a detokenizer makes none."""


def chunk(name: str, text: str) -> dict[str, Any]:
    return {"id": name, "choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}], "n": 1.5}


@given(name=TEXT, texts=st.lists(TEXT, min_size=1, max_size=4))
@example(name='"}', texts=['\u2028\u0000\x7f"\\/', "🙂é", "</script>", ""])
def test_equal_to_the_full_encoder(name: str, texts: list[str]) -> None:
    frame = FixedFrame(chunk(name, FixedFrame.SLOT))
    for text in [*texts, FixedFrame.SLOT]:
        assert frame.encode(text) == encode_json(chunk(name, text))
        assert json.loads(frame.encode(text)) == chunk(name, text)


@pytest.mark.parametrize("shape", [{"text": "x"}, [FixedFrame.SLOT, FixedFrame.SLOT]])
def test_a_shape_has_one_slot(shape: Any) -> None:
    with pytest.raises(ValueError, match="expected once"):
        FixedFrame(shape)
