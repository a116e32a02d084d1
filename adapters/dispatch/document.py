"""The dispatch table as Markdown: ``python -m sglang_lite.adapters.dispatch.document > docs/kernels.md``."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from sglang_lite.adapters.dispatch import TABLE, Operation, Package, Provider
from sglang_lite.adapters.kernel_lines import CUDA12, CUDA13, FLASHINFER, FLASHINFER_VERSION, LINES

_INSTALL = "\n".join(
    f"| `pip install 'sglang-lite[{line.extra}]'` | {line.distribution} {line.version} | {line.torch} | {line.cuda} "
    f"| {FLASHINFER} {FLASHINFER_VERSION} |"
    for line in LINES
)

_HEAD = f"""\
# Operations, providers, devices

Generated from `adapters/dispatch`; do not edit. `python -m sglang_lite.adapters.dispatch.document > docs/kernels.md`
writes it anew, and a test compares.

Two lines of kernel wheels are supported, one an environment:

| install | kernel wheel | torch it needs | CUDA | beside it |
|---|---|---|---|---|
{_INSTALL}

Install them without `constraints.txt`: it pins the torch release that the CPU tests use, and each kernel wheel pins
its own. `sglang-lite check-env` says what is installed, what does not fit together and which rows below apply.

How to read the tables: providers stand in the order of preference; the first one whose line, SM versions and element
types fit is used, and when none fits the start is refused with the reasons. `torch` stands where the wheels have no
kernel or do not reach. An SM version is the compute capability without its dot. The rows follow from the signatures of
the wheels, the device code in their libraries and their own checks; `sglang-lite check-env --verify` is what runs them.
"""

_TITLES = {
    "norm": "Norms",
    "activation": "Gated activations",
    "rotary": "Rotary embedding",
    "linear": "Matrix products",
    "embedding": "Embedding",
    "lora": "Low-rank adapters",
    "kv": "KV pool",
    "attention": "Attention over keys and values",
    "latent": "Latent attention",
    "moe": "Mixture of experts",
    "quantize": "Quantizers",
    "dequantize": "Dequantizers",
    "sampling": "Sampling",
    "grammar": "Grammars",
    "speculation": "Speculation",
    "recurrent": "Recurrent layers",
    "collective": "Collectives",
}


def markdown() -> str:
    """The whole document."""
    parts = [_HEAD]
    families = sorted(TABLE.values(), key=lambda operation: list(_TITLES).index(_family(operation)))
    for family, operations in itertools.groupby(families, _family):
        rows = [row for operation in operations for row in _rows(operation)]
        header = "| operation | provider | {} | {} | types | call, limits |\n|---|---|---|---|---|---|".format(
            f"SM, {CUDA13.distribution} {CUDA13.version}", f"SM, {CUDA12.distribution} {CUDA12.version}"
        )
        parts.append("\n".join([f"## {_TITLES[family]}\n", header, *rows, ""]))
    return "\n".join(parts)


def _family(operation: Operation) -> str:
    return operation.name.partition(".")[0]


def _rows(operation: Operation) -> Iterator[str]:
    for index, provider in enumerate(operation.providers):
        what = f"`{operation.name}`: {operation.summary}" if index == 0 else ""
        lines = [str(provider.lines.get(line.distribution, "none")) for line in (CUDA13, CUDA12)]
        yield _row(what, provider.label, *lines, ", ".join(provider.dtypes), _how(provider))
    if operation.otherwise:
        yield _row("", "otherwise", "", "", "", operation.otherwise)


def _how(provider: Provider) -> str:
    functions = [f"`{call.path}`" for call in provider.calls if not call.path.endswith((".plan", ".run"))]
    calls = ", ".join(function.replace(".__init__", "") for function in functions)
    if provider.package is Package.TORCH:
        return provider.limits or "torch"
    return "; ".join(filter(None, (calls, provider.limits)))


def _row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    print(markdown(), end="")
