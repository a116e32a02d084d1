"""The role of a decode server's core: pages are reserved for prompts computed elsewhere, then generated from."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

import msgspec

from sglang_lite.disaggregation.base import (
    DecodeSessions,
    FirstToken,
    KVArrived,
    KVFailed,
    KVQuiesced,
    PrefillLost,
    SessionStats,
)
from sglang_lite.disaggregation.distributions import Distributions, add
from sglang_lite.engine.roles import code_of, logprob_record
from sglang_lite.scheduler.scheduler import Scheduler
from sglang_lite.types import FinishCode, Int32Array, OutputColumns, RequestColumns, TransferParams

logger = logging.getLogger(__name__)

_PEER_REASONS = ("handshake", "peer_lost", "peer_failed", "timeout")
"""Failures of the prefill side, after which the prompt can still be computed here."""


@dataclass(frozen=True, slots=True)
class _Reserved:
    """Pages of a request that nobody was told of yet; plans up to ``stale_step`` may still write them."""

    params: TransferParams
    pages: Int32Array
    stale_step: int
    since: float


class DecodeRole:
    """See ``roles.Role``.

    Args:
        fallback: compute prompts here whose prefill server fails.
        vocab_size: of the model: first tokens from elsewhere are compared with it.
    """

    def __init__(self, scheduler: Scheduler, sessions: DecodeSessions, *, fallback: bool, vocab_size: int) -> None:
        self._scheduler = scheduler
        self._sessions = sessions
        self._fallback = fallback
        self._vocab_size = vocab_size
        self._unopened: dict[int, TransferParams] = {}
        self._next: int | None = None
        self._settling: dict[int, _Reserved] = {}
        self._open: set[int] = set()
        self._waiting_since: dict[int, float] = {}
        self._distributions = Distributions()
        self._arrived: list[KVArrived] = []

    def admitting(self, columns: RequestColumns) -> None:
        """See ``Role.admitting``."""

    def admitted(self, columns: RequestColumns) -> None:
        """See ``Role.admitted``. The prefill server hears of those that were refused: it would wait for their pages."""
        held = set(self._scheduler.held())
        for index, extras in columns.extras.items():
            key, params = int(columns.key[index]), extras.transfer
            if params is None or key in self._unopened or key in self._settling or key in self._open:
                continue
            if key in held:
                self._unopened[key] = params
                self._next = None
            else:
                self._sessions.refuse(params.rid, params, "the decode server refused the request")

    def abort(self, keys: list[int] | None) -> int:
        """See ``Role.abort``: the scheduler has all of them."""
        del keys
        return 0

    def turn(self, now: float) -> None:
        """See ``Role.turn``."""
        for event in self._sessions.events():
            match event:
                case KVArrived():
                    self._arrived.append(event)
                case KVFailed():
                    self._failed(event, now)
                case KVQuiesced(key=key):
                    self._scheduler.release_hold(key)
                case PrefillLost():
                    self._prefill_lost(event, now)
                case _:
                    pass
        for key in self._scheduler.take_ended():
            params = self._unopened.pop(key, None)
            reserved = self._settling.pop(key, None)
            if reserved is not None:
                params = reserved.params
                self._scheduler.release_hold(key)  # nobody was told of the pages
            if params is not None:
                self._sessions.refuse(params.rid, params, "the request ended on the decode server")
            elif key in self._open:
                self._open.discard(key)
                self._sessions.abort(key)
        if self._arrived and not self._scheduler.is_paused:
            self._join(now)
        self._reserve(now)
        self._open_settled()

    def outgoing(self, columns: OutputColumns) -> OutputColumns:
        """See ``Role.outgoing``."""
        return columns

    def take_outputs(self) -> list[OutputColumns]:
        """See ``Role.take_outputs``: the scheduler reports all of them."""
        return []

    def stats(self) -> SessionStats:
        """See ``Role.stats``."""
        stats = self._sessions.stats()
        distributions = add(stats.distributions, self._distributions.copy())
        unopened = len(self._unopened) + len(self._settling)
        return msgspec.structs.replace(stats, unopened=unopened, distributions=distributions)

    def fileno(self) -> int:
        """See ``Role.fileno``."""
        return self._sessions.fileno()

    def close(self, grace_s: float) -> None:
        """See ``Role.close``."""
        self._sessions.close(grace_s)

    def _reserve(self, now: float) -> None:
        """Open sessions in the order of the scheduler's policy, as far as pages can be spared."""
        for key in self._unopened.keys() - self._waiting_since.keys():
            self._waiting_since[key] = now
        for key in self._waiting_since.keys() - self._unopened.keys():
            del self._waiting_since[key]
        # To put thousands in order takes longer than a step: whoever found no pages stays first until others come.
        if self._next in self._unopened and not self._reserve_for(self._next, now):
            return
        for key in self._scheduler.without_pages() if self._unopened else ():
            if not self._reserve_for(key, now):
                self._next = key
                return

    def _reserve_for(self, key: int, now: float) -> bool:
        pages = self._scheduler.reserve_incoming(key)
        if pages is None:
            return False
        since = self._waiting_since.pop(key)
        self._settling[key] = _Reserved(self._unopened.pop(key), pages, self._scheduler.stale_step, since)
        self._distributions.observe("kv_transfer_alloc_ms", (now - since) * 1e3)
        return True

    def _open_settled(self) -> None:
        """Tell peers of pages once no plan is under way that was made when they belonged to somebody else."""
        for key, reserved in list(self._settling.items()):
            if self._scheduler.has_run(reserved.stale_step):
                del self._settling[key]
                self._open.add(key)
                params, length = reserved.params, self._scheduler.prompt_length(key)
                self._sessions.open(key, params.rid, params, reserved.pages, length, 0)

    def _join(self, now: float) -> None:
        """Prompts that are here go on. During a pause they do not: a first token would follow the pause."""
        arrived, self._arrived = self._arrived, []
        for event in arrived:
            if event.key not in self._open:
                continue  # it was given up meanwhile, and its pages come back when the peer is quiet
            self._open.discard(event.key)
            first = event.first
            if wrong := self._unknown_token(first):
                self._scheduler.fail_request(event.key, FinishCode.ERROR, wrong, now)
                self._scheduler.release_hold(event.key)
                continue
            code, records = FinishCode(first.finish_code), logprob_record(event.key, first)
            self._scheduler.join(event.key, first.token, code, first.matched, first.cached_tokens, records, now)

    def _unknown_token(self, first: FirstToken) -> str:
        """What is wrong with tokens that another model has chosen, perhaps; "" for nothing."""
        pairs = (*first.top_logprobs, *first.token_ids_logprobs)
        largest = max(first.token, *(token for _, token in pairs), -1)
        if largest < self._vocab_size:
            return ""
        return (
            f"the prefill server hands over token {largest}, but the vocabulary here has {self._vocab_size}; both must "
            f"serve the same model"
        )

    def _prefill_lost(self, event: PrefillLost, now: float) -> None:
        """Those that wait for pages hear it too. What they wait for was asked of a process that is gone."""
        lost = [
            key
            for key, params in self._unopened.items()
            if (params.host, params.port) == (event.host, event.port)
            and self._waiting_since.get(key, math.inf) <= event.until
        ]
        for key in lost:
            del self._unopened[key]
            if self._fallback:
                self._scheduler.release_held(key, lent=False)
            else:
                self._scheduler.fail_request(key, FinishCode.ERROR, event.message, now)
        for key, reserved in self._settling.items():
            params = reserved.params
            is_lost = (params.host, params.port) == (event.host, event.port) and reserved.since <= event.until
            if is_lost and not self._fallback:
                self._scheduler.fail_request(key, FinishCode.ERROR, event.message, now)
        if lost:
            logger.warning(
                "%s; it was to send the prompts of %d requests that wait for pages", event.message, len(lost)
            )

    def _failed(self, event: KVFailed, now: float) -> None:
        if event.key in self._open:
            self._open.discard(event.key)
            if self._fallback and event.reason in _PEER_REASONS:
                self._scheduler.release_held(event.key, lent=False)
            else:
                self._scheduler.fail_request(event.key, code_of(event.status), event.message, now)
        if event.quiesced:
            self._scheduler.release_hold(event.key)
