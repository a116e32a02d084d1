"""Which SM versions the libraries of the wheels hold device code for, and constructors that use it.

The versions were read from the fat binaries in the wheels. Code for a version runs on later minor versions of the same
major one; code marked for one architecture (``90a``, ``120a``) runs there only, code marked for a family (``100f``)
on the family.
"""

from __future__ import annotations

from sglang_lite.adapters.dispatch.model import (
    ALL_FLOATS,
    CUDA12_LINE,
    CUDA13_LINE,
    HALF,
    Call,
    Package,
    Provider,
    SmVersions,
)

AMPERE_AND_NEWER = SmVersions(first=80)
HOPPER = SmVersions((90,))
BLACKWELL_AND_NEWER = SmVersions(first=100)
ANY = SmVersions(first=0)

COMMON_OPS = {
    CUDA13_LINE: SmVersions((80, 86, 87, 89, 90, 100, 103, 120)),
    CUDA12_LINE: SmVersions((80, 86, 87, 89, 90, 100, 120)),
}
"""``common_ops``: 80, 89, 90, 90a and 120a in both lines, 100f in 0.4.10 and 100a in 0.3.21."""

FLASH_OPS = {line: SmVersions((80, 86, 87, 89, 90)) for line in (CUDA13_LINE, CUDA12_LINE)}
"""``flash_ops`` (FlashAttention 3): 80, 86 and 90a in both lines."""

DENSE_FLASHMLA = dict.fromkeys((CUDA13_LINE, CUDA12_LINE), HOPPER)
"""Dense FlashMLA decode is compiled for 90a only."""

SPARSE_FLASHMLA = {CUDA13_LINE: SmVersions((90, 100, 103)), CUDA12_LINE: SmVersions((90, 100))}


def flashinfer(
    *calls: Call,
    sms: SmVersions = AMPERE_AND_NEWER,
    dtypes: tuple[str, ...] = HALF,
    name: str = "",
    limits: str = "",
) -> Provider:
    """A provider from FlashInfer, which goes with either line."""
    return Provider(Package.FLASHINFER, calls, {CUDA13_LINE: sms, CUDA12_LINE: sms}, dtypes, name, limits)


def sgl_kernel(
    *calls: Call,
    lines: dict[str, SmVersions] = COMMON_OPS,
    only: str | None = None,
    sms: SmVersions | None = None,
    dtypes: tuple[str, ...] = HALF,
    name: str = "",
    limits: str = "",
) -> Provider:
    """A provider from ``sgl_kernel``.

    Args:
        lines: SM versions by line.
        only: the one line that has it.
        sms: SM versions where they are fewer than those of the library.
    """
    names = lines if only is None else (only,)
    return Provider(Package.SGL_KERNEL, calls, {line: sms or lines[line] for line in names}, dtypes, name, limits)


def torch(limits: str = "", dtypes: tuple[str, ...] = ALL_FLOATS) -> Provider:
    """Torch's own operations, stated where no wheel has a kernel or the wheels' kernels do not reach."""
    return Provider(Package.TORCH, (), {CUDA13_LINE: ANY, CUDA12_LINE: ANY}, dtypes, limits=limits)


def call(path: str, arguments: str) -> Call:
    """``arguments``: parameter names, separated by blanks."""
    return Call(path, tuple(arguments.split()))
