"""The workers behind the router: what is known of each, and which of them a request may go to. No I/O."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any
from urllib.parse import urlsplit

from sglang_lite.router.breaker import Breaker, BreakerLimits
from sglang_lite.router.errors import ALL_REST, RouterError
from sglang_lite.router.shared_loads import LoadCell

ROLES = ("regular", "prefill", "decode")
_LAYOUT = ("dtype", "page_size", "num_layers", "kv_heads", "head_dim", "kv_tensors_per_token")
_SCHEMES = ("http", "https", "grpc", "grpcs")
MAX_WORKERS = 4096
INSTANCE = "instance"
"""Label with which a worker says which process it is: another one at the same address takes its place."""


def normalize_url(url: str) -> str:
    """A worker's address without a slash at the end; protocol and host, whose case says nothing, in small letters.

    Raises:
        ValueError: no address of a host, or one of a protocol whose library is not installed.
    """
    parts = urlsplit(url.strip().rstrip("/"))
    if parts.username is not None:
        place = parts.netloc.rpartition("@")[2]
        raise ValueError(f"worker at {place!r}: its address must hold no user and password; give a key instead")
    parts = parts._replace(netloc=parts.netloc.lower())
    text, _ = parts.geturl(), parts.port  # the port is checked where it is read
    if not text.isascii() or not text.isprintable() or " " in text:
        raise ValueError(f"worker {url[:200]!r}: must hold printable ASCII only")
    if parts.scheme not in _SCHEMES or not parts.hostname or parts.port == 0 or parts.query or parts.fragment:
        raise ValueError(f"worker {url!r}: must be http[s]://HOST[:PORT] or grpc[s]://HOST:PORT")
    if parts.scheme in ("grpc", "grpcs"):
        if parts.port is None or parts.path:
            raise ValueError(f"worker {url!r}: must be {parts.scheme}://HOST:PORT")
        if find_spec("grpc") is None:
            raise ValueError(f"worker {url!r}: gRPC needs a library: pip install 'sglang-lite[grpc]'")
    return text


@dataclass(slots=True, eq=False)
class Worker:
    """One worker. ``index`` is its bit in sets of workers; a later worker may get it again.

    ``role``, ``bootstrap_port``, ``models`` and ``layout`` (of its KV pages) are the worker's own word once it is
    ``registered``.

    With ``--dp-aware`` a server has ``ranks``, which are the workers that requests go to; the server itself is what is
    added, watched and removed.
    """

    url: str
    index: int
    breaker: Breaker
    role: str = "regular"
    bootstrap_port: int | None = None
    api_key: str | None = None
    models: tuple[str, ...] = ()
    layout: tuple[Any, ...] | None = None
    registered: bool = False
    healthy: bool = False
    lost: bool = False
    running: int = 0
    cell: LoadCell | None = None
    failed_checks: int = 0
    passed_checks: int = 0
    labels: dict[str, str] = field(default_factory=dict)
    rank: int | None = None
    ranks: list[Worker] = field(default_factory=list)
    host: str = field(init=False)

    def __post_init__(self) -> None:
        self.host = urlsplit(self.url).hostname or ""

    @property
    def load(self) -> int:
        """Requests that it has of this router, of all its processes."""
        return self.running if self.cell is None else self.cell.total

    def count(self, change: int) -> None:
        """It has ``change`` more requests."""
        self.running += change
        if self.cell is not None:
            self.cell.add(change)

    @property
    def comes_by_itself(self) -> bool:
        """Whether it, or the fleet that it belongs to, tells the router of it again when it is there."""
        return INSTANCE in self.labels

    @property
    def is_grpc(self) -> bool:
        """Whether it speaks gRPC."""
        return self.url.startswith("grpc")

    @property
    def name(self) -> str:
        """What tells it from all others; ``url`` is where it is reached."""
        return self.url if self.rank is None else f"{self.url}@{self.rank}"

    def take_info(self, info: dict[str, Any]) -> None:
        """Learn from the body of ``/server_info``."""
        names = (info.get("served_model_name"), info.get("model_path"))
        self.models = tuple(dict.fromkeys(name for name in names if isinstance(name, str) and name))
        mode = info.get("disaggregation_mode")
        if mode in ("prefill", "decode"):
            self.role = mode
        elif mode in ("null", None):
            self.role = "regular" if "disaggregation_mode" in info else self.role
        port = info.get("disaggregation_bootstrap_port")
        if isinstance(port, int) and 0 < port < 65536:
            self.bootstrap_port = port
        cache = info.get("kv_cache")
        self.layout = tuple(cache.get(name) for name in _LAYOUT) if isinstance(cache, dict) else None
        self.registered = True
        self.healthy = True
        if self.lost:
            self.lost = False
            self.breaker.reset()
        self.failed_checks = 0

    def note_check(self, passed: bool, failures: int, successes: int) -> None:
        """One health check; it takes several in a row to change sides."""
        if passed:
            self.failed_checks = 0
            self.passed_checks += 1
            if self.passed_checks >= successes:
                self.healthy = True
        else:
            self.passed_checks = 0
            self.failed_checks += 1
            if self.failed_checks >= failures:
                self.healthy = False
        for rank in self.ranks:
            rank.healthy = self.healthy


def compatible(prefill: Worker, decode: Worker) -> bool:
    """Whether KV pages of one fit into the other; unknown layouts are trusted."""
    return prefill.layout is None or decode.layout is None or prefill.layout == decode.layout


class Registry:
    """All workers by address."""

    def __init__(self, limits: BreakerLimits, on_remove: Callable[[Worker], None]) -> None:
        self._limits = limits
        self._on_remove = on_remove
        self._free: list[int] = []
        self._used = 0
        self.workers: dict[str, Worker] = {}
        self.known_models: set[str] = set()
        self.cell_of: Callable[[str], LoadCell] | None = None

    def add(self, url: str, *, role: str = "regular", port: int | None = None, api_key: str | None = None) -> Worker:
        """A new worker, not registered yet.

        Raises:
            ValueError: a wrong address or role, one that is there already, or too many.
        """
        url = normalize_url(url)
        if url in self.workers:
            raise ValueError(f"worker {url!r} is given twice")
        if role not in ROLES:
            raise ValueError(f"worker_type {role!r}: must be one of {', '.join(ROLES)}")
        if self._used - len(self._free) >= MAX_WORKERS:
            raise ValueError(f"there are {MAX_WORKERS} workers already")
        worker = Worker(url, self._index(), Breaker(self._limits), role, port, api_key)
        worker.cell = None if self.cell_of is None else self.cell_of(worker.name)
        self.workers[url] = worker
        return worker

    def split(self, server: Worker, count: int) -> None:
        """Make ``count`` ranks of a registered server; for 1 it stays as it is.

        Raises:
            ValueError: there would be too many workers.
        """
        for rank in server.ranks:
            self._drop(rank)
        server.ranks = []
        if count < 2:
            return
        if self._used - len(self._free) + count > MAX_WORKERS:
            raise ValueError(f"{count} ranks are too many: there may be {MAX_WORKERS} workers")
        for number in range(count):
            rank = Worker(server.url, self._index(), Breaker(self._limits), server.role, server.bootstrap_port)
            rank.rank, rank.api_key, rank.models, rank.layout = number, server.api_key, server.models, server.layout
            rank.registered, rank.healthy, rank.labels = True, server.healthy, server.labels
            rank.cell = None if self.cell_of is None else self.cell_of(rank.name)
            server.ranks.append(rank)

    def remove(self, url: str) -> Worker | None:
        """Take a worker out; requests that it has go on."""
        worker = self.workers.pop(url.strip().rstrip("/"), None)
        if worker is not None:
            for one in (worker, *worker.ranks):
                self._drop(one)
        return worker

    def targets(self) -> list[Worker]:
        """What requests go to: ranks, and workers without any."""
        return [target for worker in self.workers.values() for target in worker.ranks or [worker]]

    def _index(self) -> int:
        if self._free:
            return self._free.pop()
        self._used += 1
        return self._used - 1

    def _drop(self, worker: Worker) -> None:
        self._free.append(worker.index)
        self._on_remove(worker)

    def registered(self) -> list[Worker]:
        """Workers that have introduced themselves."""
        return [worker for worker in self.workers.values() if worker.registered]

    def of_model(self, model: str | None) -> list[Worker]:
        """Registered workers that serve ``model`` (``name:adapter`` is the adapter of ``name``); None means any.

        Raises:
            RouterError: no_healthy_workers without any worker at all, model_not_found when others are served.
        """
        present = self.registered()
        if not present:
            raise RouterError(
                "no_healthy_workers",
                "The router knows no worker that has introduced itself yet; try again later, and see /workers.",
            )
        if model is None:
            return present
        found = [worker for worker in present if model in worker.models]
        if not found and ":" in model:
            base = model.partition(":")[0]
            found = [worker for worker in present if base in worker.models]
        if not found and model in self.known_models:
            raise RouterError(
                "no_healthy_workers",
                f"No worker of the model {model[:200]!r} is there now; try again later, and see /workers.",
            )
        if not found:
            raise RouterError(
                "model_not_found", f"The model {model[:200]!r} is not served here; /v1/models lists those that are."
            )
        return found


_ROLES_OF = {"no_prefill_workers_available": "prefill ", "no_decode_workers_available": "decode "}


def usable(workers: list[Worker], now: float, none_code: str) -> list[Worker]:
    """Those that are healthy and whose breaker lets a request through.

    Raises:
        RouterError: ``none_code`` when none is healthy, breaker_open when only breakers stand in the way.
    """
    healthy = [worker for worker in workers if worker.healthy]
    ready = [worker for worker in healthy if worker.breaker.allows(now)]
    if ready:
        return ready
    # A worker that was gone at the last look may be back, and a port that is closed costs no time.
    lost = [worker for worker in workers if worker.lost]
    for worker in lost:
        worker.breaker.reset()
    if lost:
        return lost
    if not healthy:
        role = _ROLES_OF.get(none_code, "")
        raise RouterError(none_code, f"None of the {len(workers)} {role}workers is healthy; try again later.")
    raise RouterError("breaker_open", ALL_REST)
