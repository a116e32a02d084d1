"""``docs/tool-calls.md`` names what there is."""

from __future__ import annotations

import re
from pathlib import Path

from sglang_lite.frontend.parsing.formats import TOOL_FORMATS
from sglang_lite.frontend.parsing.reasoning import REASONING_FORMATS

DOCUMENT = Path(__file__).parents[4] / "docs" / "tool-calls.md"


def test_every_parser_is_documented() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    calls, reasoning = text.split("| reasoning |")
    first_columns = [row.split("|")[1] for row in calls.splitlines() if row.startswith("| `")]
    assert set(re.findall(r"`([^`]+)`", " ".join(first_columns))) == set(TOOL_FORMATS)
    first_columns = [row.split("|")[1] for row in reasoning.splitlines() if row.startswith("| `")]
    assert set(re.findall(r"`([^`]+)`", " ".join(first_columns))) == set(REASONING_FORMATS)
