"""The layer of latent attention: absorbed equals plain attention over expanded heads, with and without rotation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from sglang_lite.adapters.base import AttentionBatch, KVGeometry, Operations, PackedLinear
from sglang_lite.adapters.cpu import CpuOperations
from sglang_lite.layers.key_indexer import Indexer, IndexerShape, RememberingIndexer, SharedIndexer
from sglang_lite.layers.latent_attention import CompressedQuery, DirectQuery, LatentAttention, LatentShape
from tests.support.reference_operations import ReferenceOperations

HIDDEN, HEADS, RANK, LATENT, NOPE, ROPE, VALUE, INDEX = 24, 3, 10, 16, 12, 4, 8, 6
TOKENS, EPS = 11, 1e-6


def weights(seed: int = 0) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    shapes = {
        "query": (HEADS * (NOPE + ROPE), HIDDEN),
        "query_down": (RANK, HIDDEN),
        "query_up": (HEADS * (NOPE + ROPE), RANK),
        "latent_down": (LATENT + ROPE, HIDDEN),
        "latent_up": (HEADS * (NOPE + VALUE), LATENT),
        "output": (HIDDEN, HEADS * VALUE),
    }
    made = {name: torch.randn(shape) * shape[1] ** -0.5 for name, shape in shapes.items()}
    return made | {"query_norm": torch.rand(RANK) + 0.5, "latent_norm": torch.rand(LATENT) + 0.5}


def build(ops: Operations, w: dict[str, Tensor], *, compressed: bool, **options: Any) -> LatentAttention:
    def packed(*names: str) -> PackedLinear:
        return ops.pack_linear(torch.cat([w[name] for name in names]), None)

    queries: DirectQuery | CompressedQuery = DirectQuery(packed("query"), packed("latent_down"))
    if compressed:
        queries = CompressedQuery(ops, packed("query_down", "latent_down"), w["query_norm"], packed("query_up"), EPS)
    indexer = options.pop("indexer", None)
    shape = LatentShape(
        num_heads=HEADS, latent_dim=LATENT, nope_dim=NOPE, rope_dim=ROPE, scale=(NOPE + ROPE) ** -0.5, **options
    )
    projection = ops.latent.pack_projection(w["latent_up"], HEADS, NOPE)
    return LatentAttention(
        ops,
        shape,
        0,
        queries,
        projection,
        packed("output"),
        latent_norm=w["latent_norm"],
        norm_eps=EPS,
        indexer=indexer,
    )


def angles(num_tokens: int = TOKENS, start: int = 0) -> tuple[Tensor, Tensor]:
    table = torch.outer(torch.arange(start, start + num_tokens).float(), torch.tensor([1.0, 0.3]))
    return table.cos(), table.sin()


def run(ops: Operations, layer: LatentAttention, x: Tensor, cuts: list[int], index: int = 0) -> Tensor:
    """[T, hidden] -> [T, hidden], the sequence fed in pieces that end at ``cuts``."""
    geometry = KVGeometry(8, 4, 1, 1, LATENT + ROPE + index, torch.float32, num_tensors=1, latent_width=LATENT)
    pool = torch.full(geometry.pool_shape, float("nan"))
    pages = torch.tensor([[5, 2, 7, 0]])
    outputs, start = [], 0
    for stop in cuts:
        positions = torch.arange(start, stop)
        slots = pages[0, positions // 4] * 4 + positions % 4
        is_decode = int(stop - start == 1 and start > 0)
        plan = ops.plan_attention(AttentionBatch(is_decode, [stop - start], [stop], slots, pages), geometry)
        outputs.append(layer(x[start:stop], *angles(stop - start, start), pool, plan))
        start = stop
    return torch.cat(outputs)


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight


def turn(x: Tensor, interleaved: bool) -> Tensor:
    """[T, N, ROPE] rotated, written out by pairs."""
    cos, sin = (part[:, None] for part in angles(x.shape[0]))
    halves = ROPE // 2
    first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :halves], x[..., halves:])
    turned = first * cos - second * sin, second * cos + first * sin
    return torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)


def plain(w: dict[str, Tensor], x: Tensor, *, compressed: bool, rotates: bool, interleaved: bool) -> Tensor:
    """Every head's keys and values from the latents, then ordinary causal attention."""
    query = rms(x @ w["query_down"].T, w["query_norm"]) @ w["query_up"].T if compressed else x @ w["query"].T
    query = query.view(-1, HEADS, NOPE + ROPE)
    latent, key_rope = (x @ w["latent_down"].T).split([LATENT, ROPE], -1)
    heads = (rms(latent, w["latent_norm"]) @ w["latent_up"].T).view(-1, HEADS, NOPE + VALUE)
    query_rope, key_rope = query[..., NOPE:], key_rope[:, None]
    if rotates:
        query_rope, key_rope = turn(query_rope, interleaved), turn(key_rope, interleaved)
    keys = torch.cat([heads[..., :NOPE], key_rope.expand(-1, HEADS, -1)], -1)
    query = torch.cat([query[..., :NOPE], query_rope], -1)
    by_head = (part.transpose(0, 1)[None] for part in (query, keys, heads[..., NOPE:]))
    mixed = torch.nn.functional.scaled_dot_product_attention(*by_head, is_causal=True)
    return mixed[0].transpose(0, 1).flatten(1) @ w["output"].T


@pytest.mark.parametrize("ops", [CpuOperations(measure=False), ReferenceOperations()], ids=["cpu", "reference"])
@pytest.mark.parametrize("compressed", [True, False])
@pytest.mark.parametrize(("rotates", "interleaved"), [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("cuts", [[TOKENS], [5, 6, 7, 10, TOKENS]], ids=["one chunk", "chunks and decode"])
def test_equals_plain_attention(
    ops: Operations, compressed: bool, rotates: bool, interleaved: bool, cuts: list[int]
) -> None:
    w, x = weights(), torch.randn(TOKENS, HIDDEN)
    layer = build(ops, w, compressed=compressed, rotates=rotates, is_interleaved=interleaved)
    expected = plain(w, x, compressed=compressed, rotates=rotates, interleaved=interleaved)
    torch.testing.assert_close(run(ops, layer, x, cuts), expected, atol=1e-5, rtol=1e-5)


def make_indexer(ops: Operations, top_k: int) -> Indexer:
    shape = IndexerShape(num_heads=8, head_dim=INDEX, rope_dim=ROPE, top_k=top_k, is_interleaved=False)
    matrices = [torch.randn(rows, width) for rows, width in ((8 * INDEX, RANK), (INDEX, HIDDEN), (8, HIDDEN))]
    query, key, weight = (ops.pack_linear(matrix, None) for matrix in matrices)
    return Indexer(ops, shape, query, key, weight, key_norm_weight=torch.rand(INDEX), key_norm_bias=torch.rand(INDEX))


@pytest.mark.parametrize("cuts", [[TOKENS], [5, 6, 7, 10, TOKENS]], ids=["one chunk", "chunks and decode"])
def test_a_choice_of_more_keys_than_there_are_changes_nothing_and_a_smaller_one_does(cuts: list[int]) -> None:
    ops, w, x = CpuOperations(measure=False), weights(), torch.randn(TOKENS, HIDDEN)
    everything = plain(w, x, compressed=True, rotates=True, interleaved=True)
    wide = build(ops, w, compressed=True, indexer=make_indexer(ops, top_k=TOKENS))
    torch.testing.assert_close(run(ops, wide, x, cuts, INDEX), everything, atol=1e-5, rtol=1e-5)
    narrow = run(ops, build(ops, w, compressed=True, indexer=make_indexer(ops, top_k=4)), x, cuts, INDEX)
    torch.testing.assert_close(narrow[:4], everything[:4], atol=1e-5, rtol=1e-5)
    assert ((narrow[4:] - everything[4:]).abs().amax(-1) > 1e-3).all()


def test_a_layer_without_an_indexer_keeps_the_choice_of_the_one_before() -> None:
    ops = CpuOperations(measure=False)
    owner = RememberingIndexer(make_indexer(ops, top_k=4))
    sharer = SharedIndexer(owner)
    x, compressed = torch.randn(TOKENS, HIDDEN), torch.randn(TOKENS, RANK)
    with pytest.raises(RuntimeError, match="has not run"):
        sharer(x, compressed, *angles())
    key, selection = owner(x, compressed, *angles())
    shared_key, shared = sharer(torch.randn(TOKENS, HIDDEN), torch.randn(TOKENS, RANK), *angles())
    assert shared_key is key and shared is selection
