"""How much of an accelerator's memory the KV pool gets, and which decode batches are captured."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_lite.config import ServerConfig
from sglang_lite.execution.decode_graphs import default_batch_sizes
from sglang_lite.execution.device import DeviceMemory
from sglang_lite.execution.memory import pages_asked_for
from sglang_lite.types import StartupError

_MIB = 1 << 20
_GIB = 1 << 30

_DEFAULTS = ((20, 2048, 8), (35, 4096, 48), (60, 4096, 32), (90, 8192, 256), (160, 8192, 256))
"""Device memory below (GiB) -> tokens of a prefill chunk, largest captured decode batch."""

_LARGEST_DEFAULTS = (16384, 512)

LARGE_DEVICE = 60 * _GIB
LARGE_RESERVE = 10 * _GIB
"""A device larger than the first keeps at least the second for activations."""

SCRATCH_PAGES = 1
"""Pages that the runner allocates beside the pool."""


@dataclass(frozen=True, slots=True)
class DeviceDefaults:
    """What is chosen by the size of a device when the options leave it open."""

    chunk_tokens: int
    largest_graph: int


def device_defaults(total_bytes: int) -> DeviceDefaults:
    """SGLang's rule."""
    for below, chunk, largest in _DEFAULTS:
        if total_bytes < below * _GIB:
            return DeviceDefaults(chunk, largest)
    return DeviceDefaults(*_LARGEST_DEFAULTS)


def graph_batch_sizes(config: ServerConfig, total_bytes: int, num_rows: int) -> tuple[int, ...]:
    """Decode batches to capture: those of ``--cuda-graph-bs``, else up to ``--cuda-graph-max-bs``, none when disabled.

    Raises:
        StartupError: a batch size below 1.
    """
    if config.disable_cuda_graph or config.disable_decode_cuda_graph:
        return ()
    if config.cuda_graph_bs_decode:
        sizes = sorted({int(size) for size in config.cuda_graph_bs_decode})
        if sizes[0] < 1:
            raise StartupError(f"--cuda-graph-bs-decode {sizes[0]}: a decode batch has at least 1 row")
        return tuple(size for size in sizes if size <= num_rows) or (num_rows,)
    largest = config.cuda_graph_max_bs_decode or device_defaults(total_bytes).largest_graph
    return default_batch_sizes(min(largest, num_rows))


def static_fraction(config: ServerConfig, total_bytes: int, largest_graph: int) -> float:
    """Share of the device for weights and KV: ``--mem-fraction-static``, else what activations and graphs leave over.

    Args:
        largest_graph: rows of the largest captured decode batch, 0 without graphs.
    """
    if config.mem_fraction_static is not None:
        return config.mem_fraction_static
    chunk = config.chunked_prefill_size or 0
    chunk_tokens = chunk if chunk > 0 else device_defaults(total_bytes).chunk_tokens
    reserved = 512 * _MIB + int(1.5 * max(chunk_tokens, 2048)) * _MIB + config.tp_size * _GIB // 8
    reserved += 2 * largest_graph * _MIB
    if total_bytes > LARGE_DEVICE:
        reserved = max(reserved, LARGE_RESERVE)
    return max(0.1, (total_bytes - reserved) / total_bytes)


def kv_bytes(memory: DeviceMemory, fraction: float) -> int:
    """Bytes for states and KV, from what is free once the weights are loaded: the rest of the share that is not used.

    Args:
        memory: after loading; what other processes use counts as used.
    """
    return max(0, memory.free - int(memory.total * (1.0 - fraction)))


def plan_pages(config: ServerConfig, page_bytes: int, budget_bytes: int, memory: DeviceMemory, fraction: float) -> int:
    """Pages of the pool: from the options that name token slots, else from memory.

    Args:
        page_bytes: of one page over all layers.
        budget_bytes: from ``kv_bytes``, less what states take.

    Raises:
        StartupError: not even one page fits, or those asked for do not.
    """
    asked = pages_asked_for(config)
    if asked is not None:
        flag, num_pages = asked
        needed = (num_pages + SCRATCH_PAGES) * page_bytes
        if needed > memory.free:
            raise StartupError(
                f"{flag} asks for {num_pages * config.page_size} token slots, which take {needed / _GIB:.1f} GiB; the "
                f"device has {memory.free / _GIB:.1f} GiB free beside the weights"
            )
        return num_pages
    num_pages = budget_bytes // page_bytes - SCRATCH_PAGES
    if num_pages < 1:
        raise StartupError(
            f"the device has {memory.total / _GIB:.1f} GiB, of which {memory.free / _GIB:.1f} GiB are free beside the "
            f"weights; with a static share of {fraction:.3f} that leaves no page of {config.page_size} tokens "
            f"({page_bytes} bytes). Raise --mem-fraction-static, or spread the model with --tp-size"
        )
    return num_pages
