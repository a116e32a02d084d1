"""What a core with a role makes of a request that its front has refused."""

from __future__ import annotations

import pytest

from sglang_lite.engine.frames import decode_command, encode_requests
from sglang_lite.engine.messages import Pause
from sglang_lite.engine.refusals import refusal
from sglang_lite.frontend.request import GenerateRequest
from sglang_lite.types import FinishCode, RequestColumns
from tests.unit.engine.test_roles import PARAMS, Side


@pytest.mark.parametrize("is_paused", [False, True])
@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_the_partner_is_told_and_nothing_is_kept(kind: str, is_paused: bool) -> None:
    side = Side(kind)
    if is_paused:
        side.transport.put(Pause(0, 0, "in_place"))
        side.turn()
    columns = decode_command(encode_requests(refusal(3, GenerateRequest(request_id="r", text="x", transfer=PARAMS))))
    assert isinstance(columns, RequestColumns)
    side.transport.put(columns)
    side.turn()
    assert side.sessions.told == [("refuse", "r")]
    assert side.ends == [FinishCode.ERROR]
    assert side.tokens == []
    assert side.used_pages == 0
    assert not side.scheduler.held()
