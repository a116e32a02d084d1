"""The front's view of one sequence to generate, and of its result so far."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sglang_lite.types import Float32Array, RequestTimeline, SamplingParams, TransferParams

if TYPE_CHECKING:
    from sglang_lite.frontend.session import Turn


@dataclass(slots=True, frozen=True, eq=False)
class PromptVectors:
    """A prompt that is vectors instead of tokens.

    Attributes:
        values: float32[T, hidden], finite.
        name: only sequences of the same prompt may use what the prefix cache has under it, since the tokens that stand
            for the vectors do not tell prompts apart.
    """

    values: Float32Array
    name: str = field(default_factory=lambda: secrets.token_hex(16))


@dataclass(slots=True, kw_only=True)
class GenerateRequest:
    """One sequence to generate (a batch or ``n`` > 1 is several of these).

    Exactly one of ``text``, ``input_ids`` and ``embeds`` is set, already validated for type.

    Attributes:
        request_id: what the client calls it (``rid``); unique among live requests.
        prompt_field: where the client wrote the prompt, such as ``messages`` or ``text[2]``; error messages name it.
        limit_is_default: nobody asked for the limit of the output, so that it is cut to what fits into the context.
        logprob_start_len: first prompt position to score, -1 for none.
        return_hidden_states: with ``return_logprob``, also the hidden state behind each log-probability.
        namespace: prefix-cache name space (``cache_salt`` and ``extra_key``).
        adapter: name of the low-rank adapter, None for the base model.
        timeout: seconds until the request is ended, None for the server's default.
        replica: the data parallel replica that shall serve it, None for any.
        affinity: requests of one affinity go to the same replica while that lives; empty for none.
        turn: its place in a session, None without one.
        transfer: where its KV comes from or goes to, on a prefill or decode server.
        tenant, tenant_weight: who pays for it under fair scheduling, and that tenant's share.
        resumed: output that another server has sent already, in the portions in which it was sent; the first
            snapshots repeat them.
    """

    request_id: str
    text: str | None = None
    input_ids: list[int] | None = None
    embeds: PromptVectors | None = None
    prompt_field: str = ""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    add_special_tokens: bool = True
    stream: bool = False
    return_logprob: bool = False
    logprob_start_len: int = -1
    top_logprobs_num: int = 0
    token_ids_logprob: tuple[int, ...] = ()
    return_hidden_states: bool = False
    priority: int = 0
    namespace: str = ""
    adapter: str | None = None
    timeout: float | None = None
    replica: int | None = None
    affinity: str = ""
    turn: Turn | None = None
    tenant: str = ""
    tenant_weight: float = 1.0
    transfer: TransferParams | None = None
    resumed: tuple[tuple[int, ...], ...] = ()
    limit_is_default: bool = False

    def __post_init__(self) -> None:
        if not self.prompt_field:
            self.prompt_field = "text" if self.input_ids is None else "input_ids"

    @property
    def known_ids(self) -> list[int] | None:
        """The prompt's tokens, None while it is text; of vectors, some token that every vocabulary has for each."""
        return self.input_ids if self.embeds is None else [0] * len(self.embeds.values)

    @property
    def resumed_ids(self) -> list[int]:
        """``resumed`` without its portions."""
        return [token for portion in self.resumed for token in portion]


@dataclass(slots=True, frozen=True)
class FinishReason:
    """Why a sequence ended.

    Attributes:
        type: "stop", "length" or "abort".
        matched: stop token id, stop string or stop pattern for "stop".
        length: the limit that was reached, for "length".
        message, status_code, err_type: for "abort"; ``status_code`` None means that the client asked for it.
    """

    type: str
    matched: int | str | None = None
    length: int | None = None
    message: str | None = None
    status_code: int | None = None
    err_type: str | None = None

    def to_json(self) -> dict[str, Any]:
        """The object SGLang puts into ``meta_info.finish_reason``."""
        if self.type == "stop":
            return {"type": "stop", "matched": self.matched}
        if self.type == "length":
            return {"type": "length", "length": self.length}
        body: dict[str, Any] = {"type": "abort", "message": self.message}
        if self.status_code is not None:
            body["status_code"] = self.status_code
            body["err_type"] = self.err_type
        return body


@dataclass(slots=True, frozen=True)
class TokenLogprobs:
    """Log-probabilities of one position.

    Attributes:
        token_id, logprob: the token; ``logprob`` None for the first prompt token.
        top: (logprob, token id), most likely first.
        extra: (logprob, token id) for the requested ids.
    """

    token_id: int
    logprob: float | None
    top: tuple[tuple[float, int], ...] = ()
    extra: tuple[tuple[float, int], ...] = ()


@dataclass(slots=True)
class GenerationOutput:
    """The state of a sequence when it was looked at: everything is cumulative.

    A reader that wants deltas remembers how much of ``text``, ``output_ids`` and ``output_logprobs`` it has seen.
    ``text`` only ever grows by appending: held-back characters (an incomplete code point, a possible start of a stop
    string) are not in it.

    Attributes:
        text: stable output text so far.
        output_ids: all output tokens so far (a live list: do not modify, remember lengths instead).
        completion_tokens: output tokens counted, the end token included.
        resumed_tokens: of these, the ones that another server made.
        cached_tokens: prompt tokens served from the prefix cache.
        input_logprobs, output_logprobs: when asked for.
        hidden_states: float32[P, H] blocks of the states behind the scored positions, in their order (the first prompt
            position has none); the state behind an output token is the one it was drawn from.
        timeline: the scheduler's record, None before the prompt is computed.
        preparation: seconds before the request was sent to the engine, by what they were spent on.
    """

    request_id: str
    text: str
    output_ids: list[int]
    finish_reason: FinishReason | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    retractions: int = 0
    resumed_tokens: int = 0
    input_logprobs: list[TokenLogprobs] = field(default_factory=list)
    output_logprobs: list[TokenLogprobs] = field(default_factory=list)
    hidden_states: list[Float32Array] = field(default_factory=list)
    received_at: float = 0.0
    first_token_at: float | None = None
    finished_at: float | None = None
    timeline: RequestTimeline | None = None
    preparation: dict[str, float] = field(default_factory=dict)
