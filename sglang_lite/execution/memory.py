"""How many pages the KV pool gets."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sglang_lite.config import ServerConfig
from sglang_lite.types import StartupError

DEFAULT_MEMORY_SHARE = 0.5
"""Share of the memory available after loading the weights that the KV pool may use (``--mem-fraction-static``)."""

MAX_SLOTS_FROM_MEMORY = 1 << 20
"""A pool sized from memory has at most this many slots; ``--max-total-tokens`` asks for more."""

WORKSPACE_SHARE = 0.3
"""Part of the memory for KV that decode attention may use for its copies of running sequences (host only)."""


@dataclass(frozen=True, slots=True)
class KVBudget:
    """Size of the pool.

    Attributes:
        num_pages: pages of the pool.
        workspace_bytes: memory that attention may use beside the pool.
    """

    num_pages: int
    workspace_bytes: int


def plan_kv_budget(
    config: ServerConfig,
    bytes_per_token: int,
    available_bytes: int,
    context_length: int,
    *,
    workspace_share: float = WORKSPACE_SHARE,
) -> KVBudget:
    """Pages of the pool: from ``--max-total-tokens``, else from ``--num-reserved-decode-tokens`` where that counts
    (a prefill/decode mode, or set by hand on CPU), else from the memory that is left.

    Args:
        bytes_per_token: of one token over all layers.
        available_bytes: memory that may be used beside the weights.
        context_length: of the model, for the message when the memory does not hold one page.
        workspace_share: part of the memory for KV that is left to attention; 0 for latent rows, which it never copies.

    Raises:
        StartupError: a size of zero, or slots that do not fill whole pages.
    """
    page_size = config.page_size
    if page_size < 1:
        raise StartupError(f"--page-size {page_size}: a page holds at least 1 token; 16 is the default")
    share = config.mem_fraction_static or DEFAULT_MEMORY_SHARE
    budget = int(available_bytes * share)
    workspace = int(budget * workspace_share)
    asked = _slots_asked_for(config)
    if asked is not None:
        flag, slots = asked
        return KVBudget(_checked_pages(flag, slots, page_size), workspace)
    num_pages = min((budget - workspace) // (bytes_per_token * page_size), MAX_SLOTS_FROM_MEMORY // page_size)
    if num_pages < 1:
        raise StartupError(
            f"{available_bytes / 2**20:.0f} MiB of memory are available and --mem-fraction-static is {share}: that "
            f"does not hold one page of {page_size} tokens ({bytes_per_token * page_size} bytes; the model's context "
            f"is {context_length} tokens). Free memory, raise --mem-fraction-static or set --max-total-tokens."
        )
    return KVBudget(num_pages, workspace)


def _slots_asked_for(config: ServerConfig) -> tuple[str, int] | None:
    if config.max_total_tokens is not None:
        return "--max-total-tokens", config.max_total_tokens
    if config.is_disaggregated or (config.device == "cpu" and config.num_reserved_decode_tokens is not None):
        return "--num-reserved-decode-tokens", config.reserved_slots
    return None


def _checked_pages(flag: str, slots: int, page_size: int) -> int:
    if slots < 1:
        raise StartupError(f"{flag} {slots}: the pool needs at least one page of {page_size} tokens")
    if slots % page_size:
        raise StartupError(
            f"{flag} {slots} is not a multiple of --page-size {page_size}; the nearest that are: "
            f"{slots // page_size * page_size} and {(slots // page_size + 1) * page_size}"
        )
    return slots // page_size


def available_memory(proc: Path = Path("/proc"), cgroup_root: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that this process may still use: what the machine has available, within its control group's limit."""
    available = _machine_available(proc / "meminfo")
    for directory in _control_groups(proc / "self" / "cgroup", cgroup_root):
        limit = _read_number(directory / "memory.max") or _read_number(directory / "memory.limit_in_bytes")
        used = _read_number(directory / "memory.current") or _read_number(directory / "memory.usage_in_bytes")
        if limit is not None:
            # Memory that only caches files is given back under pressure.
            reclaimable = _inactive_file(directory / "memory.stat")
            available = min(available, limit - (used or 0) + reclaimable)
    return max(0, available)


def _machine_available(meminfo: Path) -> int:
    for line in meminfo.read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    raise StartupError(f"{meminfo} has no MemAvailable line; set --max-total-tokens")


def _control_groups(membership: Path, root: Path) -> list[Path]:
    """Directories of this process's group and its parents (version 2), or of the memory controller (version 1)."""
    directories = [root, root / "memory"]
    if membership.exists():
        for line in membership.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            base = root if controllers == "" else root / "memory"
            if controllers == "" or "memory" in controllers.split(","):
                parts = [part for part in path.split("/") if part not in ("", "..")]
                directories += [base.joinpath(*parts[:depth]) for depth in range(1, len(parts) + 1)]
    return [directory for directory in directories if directory.is_dir()]


def _read_number(path: Path) -> int | None:
    """The number in a file; None when there is no such file or it says ``max``."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _inactive_file(path: Path) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("inactive_file ")), 0)
