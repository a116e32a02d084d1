"""Norms, activations, rotary embedding, products and page copies."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from sglang_lite.adapters.verification.case import Case, Source, Subject, Tensors

_EPSILON = 1e-5


def dense_cases(source: Source) -> Iterator[Case]:
    """Everything a dense layer does besides attention."""
    yield from _norms(source)
    yield from _activations(source)
    yield from _rotary(source)
    yield from _products(source)
    yield _copied_pages(source)


def _norms(source: Source) -> Iterator[Case]:
    tokens, width = source.extent(1, 7, 64), source.extent(256, 1024, 2048)
    tolerance = source.within(2, 2)
    inputs = {
        "x": source.normal(tokens, width),
        "residual": source.normal(tokens, width),
        "weight": source.normal(width),
    }

    def norm(subject: Subject, given: Tensors) -> tuple[Tensor, ...]:
        return (subject.operations.rms_norm(given["x"], given["weight"], _EPSILON),)

    def add_norm(subject: Subject, given: Tensors) -> tuple[Tensor, ...]:
        return subject.operations.add_rms_norm(given["x"], given["residual"], given["weight"], _EPSILON)

    yield Case("Operations.rms_norm", f"[{tokens}, {width}]", inputs, norm, tolerance)
    heads = {"x": source.normal(tokens, 6, 128), "weight": source.normal(128)}
    yield Case("Operations.rms_norm", f"[{tokens}, 6, 128]", heads, norm, tolerance)
    sum_rounding = source.within(8, 4)
    yield Case("Operations.add_rms_norm", f"[{tokens}, {width}]", inputs, add_norm, sum_rounding)


def _activations(source: Source) -> Iterator[Case]:
    tokens, width = source.extent(1, 9, 64), source.extent(64, 704, 2048)

    def silu(subject: Subject, given: Tensors) -> tuple[Tensor, ...]:
        return (subject.operations.silu_and_mul(given["gate_up"]),)

    def gelu(subject: Subject, given: Tensors) -> tuple[Tensor, ...]:
        return (subject.operations.gelu_and_mul(given["gate_up"]),)

    for name, call in (("silu_and_mul", silu), ("gelu_and_mul", gelu)):
        inputs = {"gate_up": source.normal(tokens, 2 * width)}
        shape = f"[{tokens}, {2 * width}]"
        yield Case(f"Operations.{name}", shape, inputs, call, source.within(4, 4))


def _rotary(source: Source) -> Iterator[Case]:
    tokens, heads, kv_heads, head_dim = source.extent(1, 5, 33), source.extent(4, 8), source.extent(1, 2), 128

    def neox(subject: Subject, given: Tensors) -> tuple[Tensor, ...]:
        return subject.operations.rotary_neox(given["query"], given["key"], given["cos"], given["sin"])

    def interleaved(subject: Subject, given: Tensors) -> tuple[Tensor, ...]:
        return subject.operations.rotary_interleaved(given["query"], given["key"], given["cos"], given["sin"])

    for name, call, rotary_dim in (
        ("rotary_neox", neox, 128),
        ("rotary_neox", neox, 64),
        ("rotary_interleaved", interleaved, 128),
    ):
        angles = source.uniform(tokens, rotary_dim // 2) * 100
        inputs = {
            "query": source.normal(tokens, heads, head_dim),
            "key": source.normal(tokens, kv_heads, head_dim),
            "cos": angles.cos(),
            "sin": angles.sin(),
        }
        shape = f"[{tokens}, {heads}+{kv_heads}, {head_dim}], {rotary_dim} rotated"
        yield Case(f"Operations.{name}", shape, inputs, call, source.within(4, 2))


def _products(source: Source) -> Iterator[Case]:
    tokens, width, out = source.extent(1, 8, 65), source.extent(256, 512), source.extent(320, 1024)
    vocabulary = 500

    def linear(subject: Subject, given: Tensors) -> tuple[Tensor, ...]:
        packed = subject.operations.pack_linear(given["weight"], given["bias"])
        return (packed(given["x"]),)

    def embedding(subject: Subject, given: Tensors) -> tuple[Tensor, ...]:
        return (subject.operations.embedding(given["ids"], given["weight"]),)

    inputs = {
        "x": source.normal(tokens, width),
        "weight": source.normal(out, width, scale=width**-0.5),
        "bias": source.normal(out),
    }
    shape = f"[{tokens}, {width}] x [{out}, {width}]"
    yield Case("Operations.pack_linear", shape, inputs, linear, source.within(8, 4))
    table = {"ids": source.integers(0, vocabulary, tokens), "weight": source.normal(vocabulary, width)}
    yield Case("Operations.embedding", f"[{tokens}] of [{vocabulary}, {width}]", table, embedding)


def _copied_pages(source: Source) -> Case:
    pages, copied = 12, 5
    order = source.permutation(pages)

    def copy(subject: Subject, given: Tensors) -> tuple[Tensor, ...]:
        subject.operations.copy_pages(given["pool"], given["source"], given["destination"])
        return (given["pool"],)

    inputs = {
        "pool": source.normal(pages, 3, 2, 16, 2, 64),
        "source": order[:copied],
        "destination": order[copied : 2 * copied],
    }
    return Case("Operations.copy_pages", f"{copied} pages of [3, 2, 16, 2, 64]", inputs, copy)
