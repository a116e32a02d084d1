"""Routes over a model that emits a chosen list of token ids: real output processing, no engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from sglang_lite.frontend.output import OutputProcessor
from sglang_lite.frontend.request import GenerateRequest, GenerationOutput
from sglang_lite.frontend.tokenizer import Tokenizer
from sglang_lite.types import FinishCode
from tests.support.fake_engine import FakeEngine
from tests.unit.frontend.frames import ending, frame, scores


class ScriptedModel(FakeEngine):
    """Emits ``token_ids`` whatever it is asked, then ends: by its last token if that is an end token, else by length.

    Args:
        per_frame: tokens of one frame of the engine.
        per_snapshot: frames between two looks of a streaming reader.
    """

    def __init__(
        self, tokenizer: Tokenizer, token_ids: Sequence[int], *, per_frame: int = 1, per_snapshot: int = 1
    ) -> None:
        super().__init__(self._play)
        self.tokenizer = tokenizer
        self._token_ids = list(token_ids)
        self._per_frame = per_frame
        self._per_snapshot = per_snapshot

    def _play(self, request: GenerateRequest) -> list[GenerationOutput | Exception]:
        processor = OutputProcessor(self.tokenizer)
        state = processor.add(1, request, 3, 0.0)
        end_token = self._token_ids[-1] in self.info.eos_token_ids
        shown: list[GenerationOutput | Exception] = []
        size = self._per_frame
        for number in range(-(-len(self._token_ids) // size)):
            part = self._token_ids[number * size : (number + 1) * size]
            last = (number + 1) * size >= len(self._token_ids)
            rows = [(1, token, FinishCode.RUNNING, -1) for token in part]
            if last:
                code = FinishCode.STOP_TOKEN if end_token else FinishCode.LENGTH
                rows[-1] = ending(1, code, part[-1], part[-1] if end_token else -1)
            logprobs = [scores(1, [token], top=request.top_logprobs_num) for token in part]
            processor.process(frame(rows, logprobs=logprobs if request.return_logprob else None), 1.0)
            ended = state.finish_reason is not None
            if ended or (request.stream and number % self._per_snapshot == self._per_snapshot - 1):
                output = processor.snapshot(state)
                shown.append(
                    dataclasses.replace(
                        output,
                        output_ids=list(output.output_ids),
                        output_logprobs=list(output.output_logprobs),
                    )
                )
            if ended:
                break
        return shown
