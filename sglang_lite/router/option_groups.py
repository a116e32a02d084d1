"""Groups of the router's options: how workers are chosen, how much is let in, who may call and over what."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sglang_lite.router.manual_policy import ASSIGNMENTS
from sglang_lite.router.policies import GENERAL, POLICIES


def option(default: Any, text: str, **more: Any) -> Any:
    """A field with its help; ``choices``, ``low``, ``high`` and ``above`` bound it."""
    return field(default=default, metadata={"help": text, **more})


@dataclass(frozen=True)
class PolicyOptions:
    """How a worker is chosen."""

    policy: str = option("cache_aware", "how a worker is chosen", choices=GENERAL)
    prefill_policy: str | None = option(None, "policy of the prefill pool", choices=tuple(POLICIES))
    decode_policy: str | None = option(None, "policy of the decode pool", choices=GENERAL)
    cache_threshold: float = option(0.5, "share of a prompt that must be known to its worker", low=0, high=1)
    balance_abs_threshold: int = option(32, "difference of loads that is out of balance", low=0)
    balance_rel_threshold: float = option(1.1, "ratio of loads that is out of balance", low=1)
    max_tree_size: int = option(64 << 20, "size of a prefix tree", low=1024)
    assignment_mode: str = option("random", "manual: how a new routing key is assigned", choices=ASSIGNMENTS)
    max_idle_secs: float = option(14400.0, "manual: time after which an unused routing key is forgotten", above=0)
    bucket_adjust_interval_secs: float = option(5.0, "bucket: time between two adjustments", above=0)
    kv_events_endpoints: tuple[str, ...] = option((), "WORKER_URL=ENDPOINT[,REPLAY_ENDPOINT]; else as workers tell")
    kv_events_max_blocks: int = option(1_000_000, "blocks of all workers together that are remembered", low=1)
    disable_kv_events: bool = option(False, "cache_aware: go by what was sent, not by what workers publish")
    model_path: str | None = option(None, "directory of the workers' tokenizer: KV events are of tokens, not of texts")
    tokenizer_path: str | None = option(None, "the same, wins over --model-path")
    chat_template: str | None = option(None, "chat template of the workers, if not the tokenizer's")


@dataclass(frozen=True)
class HedgeOptions:
    """When a request goes to a second worker. Off unless one of the first two is given."""

    hedge_after_secs: float | None = option(
        None, "send to a second worker when no byte has come for so long; off by default", above=0, kind=float
    )
    hedge_quantile: float | None = option(
        None,
        "the same after this quantile of the times to the first byte lately, and not before --hedge-after-secs",
        low=0.5,
        high=0.999,
        kind=float,
    )
    hedge_max_percent: float = option(5.0, "of a hundred requests, so many go to a second worker", above=0, high=100)


@dataclass(frozen=True)
class LimitOptions:
    """How much is let in."""

    max_payload_size: int = option(1 << 20, "largest body", low=1)

    max_concurrent_requests: int = option(-1, "requests that run at once; -1 for no limit", low=-1)
    queue_size: int = option(100, "requests that wait for their turn; more get 429", low=0)
    queue_timeout_secs: float = option(60.0, "longest wait for the turn", above=0)
    rate_limit_tokens_per_second: int | None = option(
        None, "requests that may start in a second (one token each)", low=1, kind=int
    )


@dataclass(frozen=True)
class AccessOptions:
    """Who may call, and over what."""

    request_id_headers: tuple[str, ...] = option(("x-request-id",), "headers that may hold a request's id")
    api_key: str | None = option(None, "key that clients need; passed on to workers")
    control_plane_api_keys: tuple[str, ...] = option((), "ID:NAME:ROLE:KEY each; workers and control calls need one")
    control_plane_audit_enabled: bool = option(False, "log who calls the control plane")
    tenants: str | None = option(
        None, 'JSON {NAME: WEIGHT or {"weight": W, "api_key": KEY}}: fair shares of the limits'
    )
    tls_cert_path: str | None = option(None, "certificate of the router (PEM)")
    tls_key_path: str | None = option(None, "its key")
    ca_cert_paths: tuple[str, ...] = option((), "certificates that workers' are checked with, beside the system's")
    client_cert_path: str | None = option(None, "certificate that is shown to workers (PEM)")
    client_key_path: str | None = option(None, "its key")
    cors_allowed_origins: tuple[str, ...] = option((), "origins whose pages may call; * for all")
