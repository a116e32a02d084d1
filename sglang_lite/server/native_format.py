"""Results of ``/generate``: text, output ids and ``meta_info``, whole, cumulative or as deltas."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sglang_lite.engine.result import generation_result, result_options
from sglang_lite.frontend.request import GenerateRequest, GenerationOutput
from sglang_lite.frontend.tokenizer import Tokenizer
from sglang_lite.observability.explain import explanation
from sglang_lite.server.hidden_states import HiddenStates

_PER_TOKEN_LISTS = ("output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs")
_PER_PROMPT_LISTS = ("input_token_logprobs", "input_top_logprobs", "input_token_ids_logprobs")


@dataclass(slots=True, frozen=True)
class NativeFormat:
    """How the results of one HTTP request are written.

    Attributes:
        is_batch: results are a list, and stream events carry ``index``.
        incremental: stream events carry only what is new.
        text_in_logprobs: log-probabilities carry the token's text.
        with_timings: add the latencies that SGLang shows with metrics on.
        explain: the last object of a sequence says where its time went.
    """

    tokenizer: Tokenizer | None
    weight_version: str
    is_batch: bool
    incremental: bool
    text_in_logprobs: bool
    return_prompt_token_ids: bool
    with_timings: bool
    explain: bool = False


def speculation_fields(output: GenerationOutput) -> dict[str, Any]:
    """The ``spec_*`` keys of a sequence that has ended; none where nothing was guessed.

    A sequence that the front ended (a stop string) has none either: it is answered before the engine hears of that.
    """
    guessed = [] if output.timeline is None else output.timeline.guessed
    if not guessed:
        return {}
    proposed, histogram = guessed[0], guessed[1:]
    steps = sum(histogram)
    correct = sum(count * times for count, times in enumerate(histogram))
    return {
        "spec_accept_rate": correct / proposed,
        "spec_accept_length": (correct + steps) / steps,
        "spec_num_correct_drafts": correct,
        "spec_num_proposed_drafts": proposed,
        "spec_verify_ct": steps,
        "spec_correct_drafts_histogram": histogram,
    }


class NativeWriter:
    """Writes results of the sequences of one request."""

    def __init__(
        self, form: NativeFormat, requests: Sequence[GenerateRequest], hidden: HiddenStates | None = None
    ) -> None:
        self._form = form
        self._hidden = hidden
        self._requests = requests
        self._started_at = time.time()
        # (characters, tokens) that the stream of each sequence has shown.
        self._sent = [(0, 0)] * len(requests)
        token_text = form.tokenizer.token_text if form.tokenizer is not None and form.text_in_logprobs else None
        self._options = [
            result_options(
                request,
                with_text=form.tokenizer is not None,
                token_text=token_text,
                weight_version=form.weight_version,
            )
            for request in requests
        ]

    def result(self, index: int, output: GenerationOutput) -> dict[str, Any]:
        """The whole object for sequence ``index``."""
        body = generation_result(output, self._options[index])
        # The lists live on while a snapshot waits for a slow reader.
        del body["output_ids"][output.completion_tokens :]
        for name in _PER_TOKEN_LISTS:
            if name in body["meta_info"]:
                del body["meta_info"][name][output.completion_tokens :]
        if "output_token_logprobs" in body["meta_info"]:
            body["meta_info"]["output_token_logprobs_length"] = len(body["meta_info"]["output_token_logprobs"])
        if self._hidden is not None:
            self._hidden.put_into(body["meta_info"], index, output)
        if output.finish_reason is not None:
            self._add_ending(index, output, body)
        return body

    def _add_ending(self, index: int, output: GenerationOutput, body: dict[str, Any]) -> None:
        reason, now = output.finish_reason, time.time()
        body["request_id"] = output.request_id
        body["finish_reason"] = reason.type if reason is not None else None
        body["usage"] = {
            "prompt_tokens": output.prompt_tokens,
            "completion_tokens": output.completion_tokens,
            "cached_tokens": output.cached_tokens,
        }
        if self._form.return_prompt_token_ids:
            body["prompt_token_ids"] = self._prompt_ids(index)
        body["meta_info"]["response_sent_to_client_ts"] = now
        body["meta_info"] |= speculation_fields(output)
        if self._form.explain:
            body["meta_info"]["explain"] = explanation(output, now)
        if self._form.with_timings:
            finished = now if output.finished_at is None else output.finished_at
            first = finished if output.first_token_at is None else output.first_token_at
            made = output.completion_tokens - 1
            record = output.timeline
            waited = record.queue_seconds if record is not None else None
            body["meta_info"] |= {
                "queue_time": waited,
                "forward_entry_time": None if waited is None else output.received_at + waited,
                "prefill_finished_time": output.first_token_at,
                "request_received_ts": self._started_at,
                "request_finished_ts": finished,
                "first_token_latency": first - self._started_at,
                "decode_throughput": made / (finished - first) if made > 0 and finished > first else None,
            }

    def _prompt_ids(self, index: int) -> list[int]:
        request = self._requests[index]
        if request.input_ids is not None:
            return request.input_ids
        if self._form.tokenizer is None or request.text is None:
            return []
        return self._form.tokenizer.encode(request.text, add_special_tokens=request.add_special_tokens)

    def _keep_new(self, body: dict[str, Any], characters: int, tokens: int) -> None:
        if "text" in body:
            body["text"] = body["text"][characters:]
        del body["output_ids"][:tokens]
        meta = body["meta_info"]
        for name in _PER_TOKEN_LISTS:
            if name in meta:
                del meta[name][:tokens]
        if tokens:
            # Prompt positions came with the first event.
            for name in _PER_PROMPT_LISTS:
                if name in meta:
                    meta[name] = []

    def events(self, index: int, output: GenerationOutput) -> Iterator[Any]:
        """One event a snapshot, unless it shows nothing new."""
        sent, now = self._sent[index], (len(output.text), output.completion_tokens)
        if output.finish_reason is None and now == sent:
            return
        event = self.result(index, output)
        if self._form.incremental:
            self._keep_new(event, *sent)
        if self._form.is_batch:
            event["index"] = index
        self._sent[index] = now
        yield event

    def closing_events(self) -> Iterator[Any]:
        """None: every sequence ends with an event of its own."""
        return iter(())
