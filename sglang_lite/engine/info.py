"""What the engine core tells the front about itself: fixed facts once it is ready, and load snapshots."""

from __future__ import annotations

import msgspec

from sglang_lite.disaggregation.base import SessionStats


class KvCacheInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Geometry of the KV pool, as ``/server_info`` shows it. Sizes are in bytes.

    ``page_size_bytes`` is one page over all layers: ``page_size * bytes_per_token``.
    """

    dtype: str
    page_size: int
    num_layers: int
    kv_heads: int
    head_dim: int
    kv_tensors_per_token: int
    bytes_per_token: int
    page_size_bytes: int


class RecurrentStateInfo(msgspec.Struct, frozen=True, kw_only=True):
    """State that every running request has beside its KV, as ``/server_info`` shows it. Sizes are in bytes.

    ``conv_elements`` and ``state_elements`` are those of one layer and request; the pool holds the state of
    ``max_running_requests`` requests.
    """

    num_layers: int
    conv_elements: int
    state_elements: int
    bytes_per_request: int
    pool_bytes: int


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of a ready engine core; they do not change while it lives.

    Attributes:
        context_length: most tokens of prompt and output together.
        max_total_tokens: token slots of the KV pool (``num_pages * page_size``).
        max_req_input_len: a prompt must be shorter than this to fit into the pool.
        max_running_requests: rows of the request table.
        startup_seconds: phase -> seconds ("load", "total" and whatever else the build reports).
        weight_bytes: size of the loaded parameters.
        recurrent_state: of models with recurrent layers, None for the others.
        process_id: of the engine core.
    """

    context_length: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    num_pages: int
    page_size: int
    max_total_tokens: int
    max_req_input_len: int
    max_running_requests: int
    kv_cache: KvCacheInfo
    model_type: str
    architectures: tuple[str, ...]
    dtype: str
    device: str
    weight_bytes: int = 0
    startup_seconds: dict[str, float] = {}
    process_id: int = 0
    recurrent_state: RecurrentStateInfo | None = None


class LoadSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Load and counters of the engine core at one moment.

    Pages are free, cached (owned by the prefix tree; ``evictable_pages`` of them are unlocked) or held by requests:
    ``free_pages + cached_pages + held_pages == num_pages``. Counters only grow while the core lives.

    Attributes:
        timestamp: Unix time in seconds.
        num_prefilling: running requests whose prompt is not computed yet; included in ``num_running``.
        num_retracted: waiting requests that were preempted; included in ``num_waiting``.
        num_compiling: grammars that requests of the front wait for; the core knows nothing of them.
        waiting_tokens: prompt tokens of waiting requests that are not computed yet.
        generation_throughput: output tokens per second since the snapshot before.
        cache_hit_rate: share of prompt tokens found in the prefix cache since the snapshot before, 0 to 1.
        idle_seconds: how long the core has waited for work since it started.
        computed_prompt_tokens: positions computed by prefill, repeated work after preemptions included.
        prefill_batches, prefill_batch_requests: steps with prefill, and how many requests started in them.
        cpu_seconds: processor time of the core process.
        transfers: sessions of a prefill or decode server; checksums are there only when somebody asked for a snapshot.
        kv_event_batches, kv_events, kv_event_drops: for subscribers; drops are batches.
        drafted_tokens, accepted_tokens, verified_rows: tokens guessed, right guesses, and how often a row verified.
    """

    timestamp: float = 0.0
    num_running: int = 0
    num_prefilling: int = 0
    num_waiting: int = 0
    num_retracted: int = 0
    num_compiling: int = 0
    waiting_tokens: int = 0
    num_pages: int = 0
    page_size: int = 1
    free_pages: int = 0
    cached_pages: int = 0
    evictable_pages: int = 0
    held_pages: int = 0
    max_running_requests: int = 0
    paused: bool = False
    generation_throughput: float = 0.0
    cache_hit_rate: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_prompt_tokens: int = 0
    generated_tokens: int = 0
    retractions: int = 0
    retracted_input_tokens: int = 0
    retracted_output_tokens: int = 0
    evicted_tokens: int = 0
    prefill_batches: int = 0
    prefill_batch_requests: int = 0
    aborted_requests: int = 0
    failed_steps: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    verified_rows: int = 0
    kv_event_batches: int = 0
    kv_events: int = 0
    kv_event_drops: int = 0
    transfers: SessionStats | None = None
    steps: int = 0
    idle_seconds: float = 0.0
    cpu_seconds: float = 0.0

    @property
    def used_tokens(self) -> int:
        """Token slots held by requests or locked for them (not free and not evictable)."""
        return (self.num_pages - self.free_pages - self.evictable_pages) * self.page_size

    @property
    def accept_length(self) -> float:
        """Tokens that a row drew in a step that verified guesses, on average; 0 while there was none."""
        return 1 + self.accepted_tokens / self.verified_rows if self.verified_rows else 0.0

    @property
    def accept_rate(self) -> float:
        """Share of the guessed tokens that were right, 0 to 1."""
        return self.accepted_tokens / self.drafted_tokens if self.drafted_tokens else 0.0

    @property
    def max_total_tokens(self) -> int:
        """Token slots of the pool."""
        return self.num_pages * self.page_size

    @property
    def token_usage(self) -> float:
        """``used_tokens`` over the pool, 0 to 1."""
        return self.used_tokens / self.max_total_tokens if self.num_pages else 0.0
