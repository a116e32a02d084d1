"""Mixture of experts and low-rank adapters."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from sglang_lite.adapters.lora import NO_ADAPTER
from sglang_lite.adapters.moe import (
    SILU,
    ActivationKind,
    AlignedTokens,
    ExpertActivation,
    GroupScore,
    Routing,
    Scoring,
)
from sglang_lite.adapters.verification.case import Case, Source, Subject, Tensors, Tolerance

ROUTINGS = {
    "softmax": (Routing(Scoring.SOFTMAX, 4, renormalize=True), False),
    "softmax, scaled": (Routing(Scoring.SOFTMAX, 6, scaling=2.5), False),
    "softmax, best groups": (Routing(Scoring.SOFTMAX, 4, num_groups=4, kept_groups=2), False),
    "sigmoid, bias": (Routing(Scoring.SIGMOID, 4, renormalize=True), True),
    "sigmoid, bias, best groups": (
        Routing(
            Scoring.SIGMOID,
            4,
            renormalize=True,
            num_groups=8,
            kept_groups=4,
            group_score=GroupScore.TOP_2_SUM,
            scaling=2.5,
            epsilon=1e-20,
        ),
        True,
    ),
    "top-k, then softmax": (Routing(Scoring.TOP_K_SOFTMAX, 4), False),
}
"""Rules of routing, and whether a correction bias goes with them."""

ACTIVATIONS = {
    "silu": SILU,
    "gelu": ExpertActivation(ActivationKind.GELU_TANH),
    "clamped, interleaved": ExpertActivation(ActivationKind.CLAMPED_SWIGLU, interleaved=True),
}


def expert_cases(source: Source) -> Iterator[Case]:
    """Routing, grouping, the experts themselves, and adapted products."""
    yield from _routing(source)
    yield _alignment(source)
    yield _grouped_product(source)
    yield from _experts(source)
    yield _adapters(source)


def _routing(source: Source) -> Iterator[Case]:
    tokens, experts = source.extent(1, 9, 64), 64
    for name, (routing, has_bias) in ROUTINGS.items():
        # Logits in float32: in half precision two of them are often equal, and ties may go either way.
        inputs = {"logits": source.normal(tokens, experts, dtype=torch.float32)}
        if has_bias:
            inputs["bias"] = source.normal(experts, scale=0.2, dtype=torch.float32)

        def route(subject: Subject, given: Tensors, routing: Routing = routing) -> tuple[Tensor, ...]:
            ids, weights = subject.operations.moe.route(given["logits"], routing, given.get("bias"))
            order = ids.sort(-1).indices
            return ids.gather(-1, order), weights.gather(-1, order)

        yield Case("MoEOperations.route", f"[{tokens}, {experts}], {name}", inputs, route, Tolerance(1e-5, 1e-4))


def _alignment(source: Source) -> Case:
    tokens, experts, per_token, block = source.extent(1, 30), 16, 4, 32
    ids = torch.stack([source.permutation(experts)[:per_token] for _ in range(tokens)]).to(torch.int32)
    ids[source.uniform(tokens, per_token) < 0.1] = -1

    def align(subject: Subject, given: Tensors) -> tuple[Tensor, ...]:
        aligned = subject.operations.moe.align(given["ids"], experts, block)
        return _expert_of_pairs(aligned, tokens * per_token, block)

    return Case("MoEOperations.align", f"[{tokens}, {per_token}] of {experts}, blocks of {block}", {"ids": ids}, align)


def _expert_of_pairs(aligned: AlignedTokens, num_pairs: int, block: int) -> tuple[Tensor, ...]:
    """What does not depend on the order within an expert: the expert of each pair, the blocks in use, their number."""
    used = int(aligned.num_padded)
    blocks = aligned.block_experts[: used // block]
    pairs = aligned.sorted_pairs[:used].long()
    owners = blocks.repeat_interleave(block)
    found = torch.full((num_pairs,), -2, dtype=torch.int32, device=owners.device)
    real = pairs < num_pairs
    found[pairs[real]] = owners[real].to(torch.int32)
    return found, blocks, aligned.num_padded


def _grouped_product(source: Source) -> Case:
    experts, width, out = 6, 128, 192
    sizes = source.integers(0, 20, experts)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)]).to(torch.int32)
    rows = int(offsets[-1])

    def product(subject: Subject, given: Tensors) -> tuple[Tensor, ...]:
        return (subject.operations.moe.grouped_gemm(given["x"], given["weight"], given["offsets"]),)

    inputs = {
        "x": source.normal(rows, width),
        "weight": source.normal(experts, out, width, scale=width**-0.5),
        "offsets": offsets,
    }
    shape = f"[{rows}, {width}] x [{experts}, {out}, {width}]"
    return Case("MoEOperations.grouped_gemm", shape, inputs, product, source.within(8, 4))


def _experts(source: Source) -> Iterator[Case]:
    tokens, experts, per_token, hidden, intermediate = source.extent(1, 17), 8, 3, 256, 128
    for name, activation in ACTIVATIONS.items():
        inputs = {
            "x": source.normal(tokens, hidden),
            "ids": torch.stack([source.permutation(experts)[:per_token] for _ in range(tokens)]).to(torch.int32),
            "weights": source.uniform(tokens, per_token),
            "w13": source.normal(experts, 2 * intermediate, hidden, scale=hidden**-0.5),
            "w2": source.normal(experts, hidden, intermediate, scale=intermediate**-0.5),
        }
        if activation.kind is ActivationKind.CLAMPED_SWIGLU:
            inputs["w13_bias"] = source.normal(experts, 2 * intermediate)
            inputs["w2_bias"] = source.normal(experts, hidden)

        def fused(subject: Subject, given: Tensors, activation: ExpertActivation = activation) -> tuple[Tensor, ...]:
            out = subject.operations.moe.fused_experts(
                given["x"],
                given["ids"],
                given["weights"],
                given["w13"],
                given["w2"],
                activation=activation,
                w13_bias=given.get("w13_bias"),
                w2_bias=given.get("w2_bias"),
            )
            return (out,)

        shape = f"[{tokens}, {hidden}], {per_token} of {experts} experts of {intermediate}, {name}"
        tolerance = source.within(24, 8)
        also = ("MoEOperations.pack_experts",)
        yield Case("MoEOperations.fused_experts", shape, inputs, fused, tolerance, also=also)


def _adapters(source: Source) -> Case:
    tokens, slots, rank, width, out = source.extent(1, 12), 3, 16, 128, 192
    token_slots = source.integers(NO_ADAPTER, slots, tokens, dtype=torch.int32)
    token_slots[0] = 0

    def add(subject: Subject, given: Tensors) -> tuple[Tensor, ...]:
        lora = subject.operations.lora
        batch = lora.plan(token_slots.numpy())
        if batch is None:
            raise ValueError("a batch with an adapter was taken for one without")
        lora.add_product(given["output"], given["x"], given["a"], given["b"], batch)
        return (given["output"],)

    inputs = {
        "output": source.normal(tokens, out),
        "x": source.normal(tokens, width),
        "a": source.normal(slots, rank, width, scale=width**-0.5),
        "b": source.normal(slots, rank, out, scale=rank**-0.5),
    }
    shape = f"[{tokens}, {width}] -> {out}, {slots} adapters of rank {rank}"
    tolerance = source.within(16, 4)
    return Case("AdapterOperations.add_product", shape, inputs, add, tolerance, also=("AdapterOperations.plan",))
