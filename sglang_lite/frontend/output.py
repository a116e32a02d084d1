"""From the engine's frames to text: one state per live sequence, one pass over the rows of a frame.

One rule for what is counted: ``output_ids``, log-probabilities and ``completion_tokens`` all end with the token that
ended the sequence (the stop token, or the token with which a stop string was complete), and nothing after it exists.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from sglang_lite.frontend.detokenizer import IncrementalDetokenizer
from sglang_lite.frontend.request import FinishReason, GenerateRequest, GenerationOutput, TokenLogprobs
from sglang_lite.frontend.stop import StopChecker
from sglang_lite.frontend.tokenizer import Tokenizer
from sglang_lite.types import FinishCode, Float32Array, LogprobRecord, OutputColumns, RequestError, RequestTimeline

_RUNNING = int(FinishCode.RUNNING)
_ERROR_TYPES = {
    400: "BadRequestError",
    429: "TooManyRequestsError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}


@dataclass(slots=True, eq=False)
class SequenceState:
    """One sequence from its admission until it is forgotten.

    Attributes:
        key: the engine's key of the sequence.
        waiter: free for the owner, such as an event to set when the state changes.
        finish_reason: None while running.
        output_ids, output_logprobs, input_logprobs, hidden_states: grow by appending.
        received_at, first_token_at, finished_at: on the clock of the ``now`` arguments.
        timeline, preparation: where the time went, as in ``GenerationOutput``.
        parts: stable text so far, in pieces.
        wake_every: output tokens between two notices to a streaming reader.
        resumed: the snapshots that the request resumes.
    """

    key: int
    request: GenerateRequest
    prompt_tokens: int
    received_at: float
    detokenizer: IncrementalDetokenizer | None
    stop: StopChecker | None
    wake_every: int
    waiter: Any = None
    finish_reason: FinishReason | None = None
    output_ids: list[int] = field(default_factory=list)
    output_logprobs: list[TokenLogprobs] = field(default_factory=list)
    input_logprobs: list[TokenLogprobs] = field(default_factory=list)
    hidden_states: list[Float32Array] = field(default_factory=list)
    cached_tokens: int = 0
    retractions: int = 0
    first_token_at: float | None = None
    finished_at: float | None = None
    timeline: RequestTimeline | None = None
    preparation: dict[str, float] = field(default_factory=dict)
    parts: list[str] = field(default_factory=list)
    wake_at: int = 1
    has_news: bool = False
    resumed: list[GenerationOutput] = field(default_factory=list)

    @property
    def text(self) -> str:
        """All stable text so far."""
        if len(self.parts) > 1:
            self.parts = ["".join(self.parts)]
        return self.parts[0] if self.parts else ""


@dataclass(slots=True)
class ProcessedFrame:
    """What one frame changed.

    Attributes:
        changed: streaming sequences with something new to show, and every sequence that ended.
        finish_keys: sequences that the front ended (a stop string or pattern): the engine has to be told.
    """

    changed: list[SequenceState] = field(default_factory=list)
    finish_keys: list[int] = field(default_factory=list)


class OutputProcessor:
    """Keeps the states of live sequences and applies frames to them.

    Args:
        tokenizer: None when the server works on ids only; text is then empty.
        stream_interval: tokens between two notices to a streaming reader, unless the request says otherwise.
    """

    def __init__(self, tokenizer: Tokenizer | None, *, stream_interval: int = 1) -> None:
        self._tokenizer = tokenizer
        self.stream_interval = max(1, stream_interval)
        self._states: dict[int, SequenceState] = {}

    def __len__(self) -> int:
        return len(self._states)

    def add(self, key: int, request: GenerateRequest, prompt_tokens: int, now: float) -> SequenceState:
        """Start a sequence.

        Raises:
            RequestError: text stops were asked for and there is no tokenizer to make text with, or what the request
                resumes holds one.
        """
        sampling = request.sampling
        detokenizer: IncrementalDetokenizer | None = None
        stop: StopChecker | None = None
        if self._tokenizer is not None:
            detokenizer = self._tokenizer.detokenizer(skip_special_tokens=sampling.skip_special_tokens)
            if sampling.stop or sampling.stop_regex:
                stop = StopChecker(sampling.stop, sampling.stop_regex, no_stop_trim=sampling.no_stop_trim)
        elif sampling.stop or sampling.stop_regex:
            field_name = "stop" if sampling.stop else "stop_regex"
            raise RequestError(
                f"{field_name} needs a tokenizer, but this server runs with --skip-tokenizer-init; "
                f"use stop_token_ids instead",
                field=field_name,
            )
        state = SequenceState(
            key=key,
            request=request,
            prompt_tokens=prompt_tokens,
            received_at=now,
            detokenizer=detokenizer,
            stop=stop,
            wake_every=max(1, sampling.stream_interval or self.stream_interval),
        )
        if request.resumed:
            self._resume(state)
        self._states[key] = state
        return state

    def repeated(self, state: SequenceState) -> list[GenerationOutput]:
        """The snapshots that another server has shown of this sequence; none where it begins here."""
        return state.resumed

    def _resume(self, state: SequenceState) -> None:
        """Bring a new sequence to where another server was, portion by portion."""
        ids = state.request.resumed_ids
        for portion in state.request.resumed:
            for token in portion:
                state.output_ids.append(token)
                self._show(state, token)
            if state.finish_reason is not None:
                raise RequestError(
                    f"resume_from: its text holds the stop {state.finish_reason.matched!r}: the output had ended",
                    field="resume_from",
                )
            state.resumed.append(replace(self.snapshot(state), output_ids=ids, resumed_tokens=len(ids)))
        state.wake_at = len(ids) + 1

    def get(self, key: int) -> SequenceState | None:
        return self._states.get(key)

    def remove(self, key: int) -> SequenceState | None:
        """Forget a sequence; rows that still arrive for it are ignored."""
        return self._states.pop(key, None)

    def process(self, frame: OutputColumns, now: float) -> ProcessedFrame:
        """Apply one frame. Rows of unknown or ended sequences are ignored."""
        result = ProcessedFrame()
        states = self._states
        touched: list[SequenceState] = []
        for index, (key, token, code) in enumerate(
            zip(frame.key.tolist(), frame.token.tolist(), frame.finish.tolist(), strict=True)
        ):
            state = states.get(key)
            if state is None or state.finish_reason is not None:
                continue
            if token >= 0:
                if state.first_token_at is None:
                    state.first_token_at = now
                    state.cached_tokens = int(frame.cached_tokens[index])
                state.output_ids.append(token)
            if code:
                self._end(state, frame, index, now)
                touched.append(state)
                continue
            detokenizer = state.detokenizer
            if detokenizer is not None:
                delta = detokenizer.push(token)
                if delta:
                    if state.stop is not None:
                        delta = state.stop.push(delta)
                        if state.stop.match is not None:
                            self._end_by_stop(state, now)
                            result.finish_keys.append(key)
                    if delta:
                        state.parts.append(delta)
                        state.has_news = True
            else:
                state.has_news = True
            touched.append(state)
        for key, record in frame.timelines.items():
            known = states.get(key)
            if known is not None:
                known.timeline = record
        if frame.logprobs:
            self._apply_logprobs(frame.logprobs)
        if frame.retractions.any():
            self._apply_retractions(frame)
        result.changed = [state for state in dict.fromkeys(touched) if _is_due(state)]
        return result

    def fail_all(self, message: str, status: int, now: float) -> list[SequenceState]:
        """End every running sequence, because the engine is gone; returns those that were running."""
        return self.fail(list(self._states), message, status, now)

    def fail(self, keys: Iterable[int], message: str, status: int, now: float) -> list[SequenceState]:
        """End these sequences where they run; returns those that did."""
        known = (self._states.get(key) for key in keys)
        running = [state for state in known if state is not None and state.finish_reason is None]
        for state in running:
            self._flush(state)
            state.finish_reason = abort_reason(message, status)
            state.finished_at = now
        return running

    def snapshot(self, state: SequenceState) -> GenerationOutput:
        """The sequence as it stands; everything is cumulative."""
        return GenerationOutput(
            request_id=state.request.request_id,
            text=state.text,
            output_ids=state.output_ids,
            finish_reason=state.finish_reason,
            prompt_tokens=state.prompt_tokens,
            completion_tokens=len(state.output_ids),
            cached_tokens=state.cached_tokens,
            retractions=state.retractions,
            resumed_tokens=state.resumed[-1].resumed_tokens if state.resumed else 0,
            input_logprobs=state.input_logprobs,
            output_logprobs=state.output_logprobs,
            hidden_states=state.hidden_states,
            received_at=state.received_at,
            first_token_at=state.first_token_at,
            finished_at=state.finished_at,
            timeline=state.timeline,
            preparation=state.preparation,
        )

    def _end(self, state: SequenceState, frame: OutputColumns, index: int, now: float) -> None:
        """The engine ended the sequence with this row (which may carry a last token)."""
        token = int(frame.token[index])
        code = FinishCode(int(frame.finish[index]))
        matched = int(frame.matched[index])
        state.cached_tokens = int(frame.cached_tokens[index])
        state.retractions = int(frame.retractions[index])
        if token >= 0 and not (code is FinishCode.STOP_TOKEN and self._hides(state, matched)):
            self._show(state, token)
        if state.finish_reason is None:
            self._flush(state)
        # A stop string that this token completed wins over the engine's reason.
        if state.finish_reason is None:
            state.finish_reason = _engine_reason(state, code, matched, frame.messages.get(state.key))
        state.finished_at = now

    def _hides(self, state: SequenceState, token_id: int) -> bool:
        """Whether the matched stop token stays out of the text.

        An end token of the model that is an ordinary vocabulary entry is part of the answer and stays.
        """
        sampling = state.request.sampling
        if sampling.no_stop_trim or self._tokenizer is None:
            return False
        return token_id in self._tokenizer.special_ids or token_id in sampling.stop_token_ids

    def _show(self, state: SequenceState, token: int) -> None:
        if state.detokenizer is not None:
            self._append(state, state.detokenizer.push(token))

    def _append(self, state: SequenceState, delta: str) -> None:
        if state.stop is not None:
            delta = state.stop.push(delta)
            if state.stop.match is not None and state.finish_reason is None:
                state.finish_reason = FinishReason(type="stop", matched=state.stop.match.matched)
        if delta:
            state.parts.append(delta)

    def _end_by_stop(self, state: SequenceState, now: float) -> None:
        if state.stop is None or state.stop.match is None:
            raise ValueError(f"sequence {state.key} has no stop match")
        state.finish_reason = FinishReason(type="stop", matched=state.stop.match.matched)
        state.finished_at = now

    def _flush(self, state: SequenceState) -> None:
        """Nothing follows: bring out what was held back, once."""
        if state.detokenizer is not None:
            self._append(state, state.detokenizer.finish())
        if state.stop is not None and state.stop.match is None:
            held = state.stop.finish()
            if held:
                state.parts.append(held)

    def _apply_logprobs(self, records: list[LogprobRecord]) -> None:
        for record in records:
            state = self._states.get(record.key)
            if state is None:
                continue
            if record.hidden.shape[1] and (record.prompt or len(state.output_logprobs) < len(state.output_ids)):
                state.hidden_states.append(record.hidden.copy())  # a view would keep the whole frame alive
            if record.prompt:
                state.input_logprobs.extend(_positions(record, state.request.token_ids_logprob))
            elif len(state.output_logprobs) < len(state.output_ids):
                state.output_logprobs.extend(_positions(record, state.request.token_ids_logprob))
                del state.output_logprobs[len(state.output_ids) :]

    def _apply_retractions(self, frame: OutputColumns) -> None:
        for index in frame.retractions.nonzero()[0].tolist():
            state = self._states.get(int(frame.key[index]))
            if state is not None:
                state.retractions = int(frame.retractions[index])


def abort_reason(message: str, status: int | None = None) -> FinishReason:
    """An abort; ``status`` None when the client asked for it."""
    return FinishReason(
        type="abort", message=message, status_code=status, err_type=None if status is None else _ERROR_TYPES.get(status)
    )


def _is_due(state: SequenceState) -> bool:
    """Whether a reader has to be told now. Readers that do not stream hear only of the end."""
    if state.finish_reason is not None:
        return True
    if not state.request.stream or not state.has_news or len(state.output_ids) < state.wake_at:
        return False
    state.wake_at = len(state.output_ids) + state.wake_every
    state.has_news = False
    return True


def _engine_reason(state: SequenceState, code: FinishCode, matched: int, message: str | None) -> FinishReason:
    match code:
        case FinishCode.STOP_TOKEN:
            return FinishReason(type="stop", matched=matched)
        case FinishCode.LENGTH:
            return FinishReason(type="length", length=len(state.output_ids))
        case FinishCode.ABORTED:
            return abort_reason(message or ("Aborted" if state.output_ids else "Abort in waiting queue"))
        case FinishCode.WAITING_TIMEOUT:
            return abort_reason(message or "Request waiting timeout reached.", 503)
        case FinishCode.RUNNING_TIMEOUT:
            return abort_reason(message or "Request running timeout reached.", 503)
        case FinishCode.QUEUE_FULL:
            return abort_reason(message or "The request queue is full.", 429)
        case FinishCode.TOO_LONG:
            return abort_reason(message or "The request needs more tokens than the KV cache holds.", 400)
        case FinishCode.ERROR | FinishCode.RUNNING:
            return abort_reason(message or "The engine failed on this request.", 500)


def _positions(record: LogprobRecord, extra_ids: tuple[int, ...]) -> list[TokenLogprobs]:
    """One entry per position of a record; a NaN log-probability means that there is none."""
    tops = record.top_logprobs.tolist()
    top_ids = record.top_ids.tolist()
    extras = record.extra_logprobs.tolist()
    return [
        TokenLogprobs(
            token_id=token_id,
            logprob=None if math.isnan(logprob) else logprob,
            top=tuple(zip(tops[index], top_ids[index], strict=True)),
            extra=tuple(zip(extras[index], extra_ids, strict=False)),
        )
        for index, (token_id, logprob) in enumerate(
            zip(record.token_ids.tolist(), record.logprobs.tolist(), strict=True)
        )
    ]
