"""Options of memory, scheduling, graphs and speculation."""

from __future__ import annotations

from typing import Annotated, Any

from sglang_lite.configuration import values
from sglang_lite.configuration.option import Integer, Number, Option, OptionGroup, Text

DEFAULT_RESERVED_SLOTS = 512
"""Token slots of the pool in a prefill/decode mode when ``--num-reserved-decode-tokens`` is not set."""

DEFAULT_DRAFT_TOKENS = 8
"""Tokens of a request verified in one step, its newest one included, when guesses cost nothing (NGRAM)."""

DRAFT_HEADS = ("eagle", "nextn")
"""Values of ``--speculative-algorithm`` that guess with a draft head; two names of one thing, as in SGLang."""

DEFAULT_DRAFT_STEPS = 3
"""Tokens that a draft model guesses for a request in one step."""

_GROUP = "Memory and scheduling"


class MemoryOptions(OptionGroup):
    """The fields of ``ServerConfig`` under the heading "Memory and scheduling"."""

    page_size: Annotated[int, Option(_GROUP, "Token slots of a KV page.", convert=values.integer, minimum=0)] = 16
    max_total_tokens: Annotated[
        Integer, Option(_GROUP, "Token slots of the KV pool.", convert=values.human_integer, minimum=0)
    ] = None
    mem_fraction_static: Annotated[
        Number,
        Option(_GROUP, "Share of memory for weights and KV pool.", convert=values.number, more_than=0, maximum=1),
    ] = None
    num_reserved_decode_tokens: Annotated[
        Integer,
        Option(
            _GROUP,
            f"Token slots of the pool in a prefill/decode mode ({DEFAULT_RESERVED_SLOTS}) or, when set, on CPU.",
            convert=values.human_integer,
            minimum=0,
        ),
    ] = None
    max_running_requests: Annotated[
        Integer, Option(_GROUP, "Most requests running at once.", convert=values.integer, minimum=1, maximum=2**20)
    ] = None
    max_queued_requests: Annotated[
        Integer, Option(_GROUP, "Most requests waiting; more are refused.", convert=values.integer, minimum=0)
    ] = None
    max_prefill_tokens: Annotated[
        int, Option(_GROUP, "Most uncached prompt tokens admitted at once.", convert=values.human_integer, minimum=1)
    ] = 16384
    chunked_prefill_size: Annotated[
        Integer,
        Option(
            _GROUP,
            "Most prompt tokens of one step; -1 does not cut prompts.",
            convert=values.human_integer,
            minimum=-1,
        ),
    ] = None
    prefill_max_requests: Annotated[
        Integer, Option(_GROUP, "Most prompts of one step.", convert=values.integer, minimum=1)
    ] = None
    schedule_policy: Annotated[
        str, Option(_GROUP, "Order of waiting requests.", choices=("fcfs", "lpm", "priority"))
    ] = "fcfs"
    enable_priority_scheduling: Annotated[
        bool, Option(_GROUP, "Order by request priority (same as --schedule-policy priority).")
    ] = False
    schedule_low_priority_values_first: Annotated[bool, Option(_GROUP, "Smaller priority values go first.")] = False
    fair_scheduling: Annotated[
        bool, Option(_GROUP, "Share the engine fairly between tenants, whom --tenants or the x-tenant header names.")
    ] = False
    tenants: Annotated[
        dict[str, Any] | None,
        Option(
            _GROUP,
            'JSON object of tenants: NAME -> weight, or {"weight": W, "api_key": KEY}; the key proves who calls.',
            convert=values.json_object,
        ),
    ] = None
    max_wait_ms: Annotated[
        float,
        Option(
            _GROUP,
            "Longest wait for more requests to batch with when idle.",
            convert=values.number,
            minimum=0,
            maximum=60_000,
        ),
    ] = 0.0
    disable_radix_cache: Annotated[bool, Option(_GROUP, "No prefix caching.")] = False
    radix_eviction_policy: Annotated[
        str, Option(_GROUP, "Eviction order of the prefix cache.", choices=("lru", "lfu", "fifo", "priority"))
    ] = "lru"
    enable_memory_saver: Annotated[
        bool, Option(_GROUP, "Take /release_memory_occupation, which gives the memory of an idle server back (CPU).")
    ] = False
    disable_overlap_schedule: Annotated[bool, Option(_GROUP, "Plan a step only after the one before it.")] = False
    cuda_graph_max_bs_decode: Annotated[
        Integer,
        Option(
            _GROUP,
            "Largest captured decode batch; default: by device memory.",
            aliases=("cuda-graph-max-bs",),
            convert=values.integer,
            minimum=1,
        ),
    ] = None
    cuda_graph_bs_decode: Annotated[
        list[str],
        Option(_GROUP, "Decode batches to capture.", aliases=("cuda-graph-bs",), convert=values.words),
    ] = []
    disable_cuda_graph: Annotated[bool, Option(_GROUP, "Capture no graphs.")] = False
    disable_decode_cuda_graph: Annotated[bool, Option(_GROUP, "Capture no decode graphs.")] = False
    disable_cuda_graph_padding: Annotated[bool, Option(_GROUP, "Replay graphs for exactly their batch size only.")] = (
        False
    )
    enable_pdmux: Annotated[
        bool,
        Option(
            _GROUP,
            "Run decode and prefill of a step on two streams of the device.",
            aliases=("enable-pd-multiplexing",),
        ),
    ] = False
    speculative_algorithm: Annotated[
        Text,
        Option(
            _GROUP,
            "Guess tokens and verify several in one step: NGRAM guesses from the request's own tokens, STANDALONE with "
            "a draft model, NEXTN with the multi-token prediction layer of the model's checkpoint, EAGLE with a head "
            "in a directory of its own.",
            convert=values.lower_text,
        ),
    ] = None
    speculative_num_draft_tokens: Annotated[
        Integer,
        Option(
            _GROUP,
            f"Tokens of a request verified in one step; {DEFAULT_DRAFT_TOKENS} by default, with a draft model one more "
            f"than it guesses.",
            convert=values.integer,
            minimum=2,
            maximum=64,
        ),
    ] = None
    speculative_draft_model_path: Annotated[
        Text,
        Option(
            _GROUP,
            "Draft model of STANDALONE or head of EAGLE: as --model-path, with the served model's tokenizer.",
            aliases=("speculative-draft-model",),
        ),
    ] = None
    speculative_num_steps: Annotated[
        Integer,
        Option(
            _GROUP,
            f"Tokens that a draft model or head guesses for a request in one step; {DEFAULT_DRAFT_STEPS} by default.",
            convert=values.integer,
            minimum=1,
            maximum=63,
        ),
    ] = None
    random_seed: Annotated[Integer, Option(_GROUP, "Seed of sampling.", convert=values.integer)] = None

    @property
    def reserved_slots(self) -> int:
        """Token slots that a prefill/decode mode gives the pool."""
        if self.num_reserved_decode_tokens is None:
            return DEFAULT_RESERVED_SLOTS
        return self.num_reserved_decode_tokens

    @property
    def drafts_with_head(self) -> bool:
        """Whether a draft head guesses from the served model's hidden states."""
        return self.speculative_algorithm in DRAFT_HEADS

    @property
    def drafts_with_weights(self) -> bool:
        """Whether what guesses has weights: a draft model or a draft head."""
        return self.speculative_algorithm == "standalone" or self.drafts_with_head

    @property
    def guessed_tokens(self) -> int:
        """Tokens guessed for a request in one step; 0 without speculation. The newest token is verified with them."""
        if self.speculative_algorithm is None:
            return 0
        if self.drafts_with_weights:
            limits = [self.speculative_num_steps, (self.speculative_num_draft_tokens or 1) - 1]
            return min([limit for limit in limits if limit], default=DEFAULT_DRAFT_STEPS)
        return (self.speculative_num_draft_tokens or DEFAULT_DRAFT_TOKENS) - 1
