"""Grammar masks and the verification of drafted tokens."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from sglang_lite.adapters.cpu.speculation import CpuSpeculation
from sglang_lite.adapters.grammar import bitmask_width
from sglang_lite.adapters.speculation import ChainDraft, DraftTree, TreeSelection
from sglang_lite.adapters.verification.case import Case, Source, Subject, Tensors, Tolerance

_CHAINS = 2_000
_TOP_K, _DEPTH = 2, 2


def token_cases(source: Source) -> Iterator[Case]:
    """Of ``adapters.grammar`` and ``adapters.speculation``; only for devices that have them."""
    yield from _masks(source)
    yield _chain(source)
    yield from _trees(source)


def _masks(source: Source) -> Iterator[Case]:
    rows, vocabulary = source.extent(2, 5, 17), source.extent(97, 1024, 1500)
    inputs = {
        "logits": source.normal(rows, vocabulary),
        "bits": source.integers(-(2**31), 2**31, rows, bitmask_width(vocabulary)).to(torch.int32),
        "rows": source.permutation(rows)[: rows // 2].to(torch.int32),
    }

    def all_rows(subject: Subject, given: Tensors) -> tuple[Tensor, ...]:
        return _masked(subject, given, None)

    def some_rows(subject: Subject, given: Tensors) -> tuple[Tensor, ...]:
        return _masked(subject, given, given["rows"])

    yield Case("GrammarOperations.apply_bitmask", f"[{rows}, {vocabulary}]", inputs, all_rows)
    yield Case("GrammarOperations.apply_bitmask", f"{rows // 2} rows of [{rows}, {vocabulary}]", inputs, some_rows)


def _masked(subject: Subject, given: Tensors, rows: Tensor | None) -> tuple[Tensor, ...]:
    if subject.grammar is None:
        raise ValueError("this device has no grammar masks")
    subject.grammar.apply_bitmask(given["logits"], given["bits"], rows)
    return (given["logits"],)


def _chain(source: Source) -> Case:
    """Whatever is drafted, the first token of a step is distributed as the model's own."""
    drafted, target = torch.tensor([0.6, 0.3, 0.1, 0.0]), torch.tensor([0.1, 0.2, 0.3, 0.4])
    shares = source.uniform(_CHAINS, 2)
    tokens = torch.searchsorted(drafted.cumsum(0), shares).clamp(max=3).to(torch.int32)
    inputs = {
        "tokens": tokens,
        "draft": drafted.repeat(_CHAINS, 2, 1),
        "target": target.repeat(_CHAINS, 3, 1),
        "shares": target,
    }

    def first_tokens(subject: Subject, given: Tensors) -> tuple[Tensor, ...]:
        if subject.speculation is None:
            raise ValueError("this device does not verify drafts")
        draft = ChainDraft(given["tokens"], given["draft"], given["target"])
        accepted = subject.speculation.verify_chain(draft, seed=7, offset=0)
        return (accepted[:, 0].long().bincount(minlength=4).float() / _CHAINS,)

    def shares_of(subject: Subject, given: Tensors) -> tuple[Tensor, ...]:
        return (given["shares"],)

    # Six standard deviations of a share of one half.
    allowed = Tolerance(6 * (0.25 / _CHAINS) ** 0.5)
    shape = f"[{_CHAINS}, 2] of 4 tokens"
    return Case("SpeculationOperations.verify_chain", shape, inputs, first_tokens, allowed, expected=shares_of)


def _trees(source: Source) -> Iterator[Case]:
    rows = source.extent(1, 3, 8)
    grandchildren = torch.stack([source.permutation(4)[:2].sort().values + 2 for _ in range(rows)])
    inputs = {
        "parents": torch.tensor([-1, 0, 1]).repeat(rows, 1),
        "selected": torch.cat([torch.tensor([0, 1]).repeat(rows, 1), grandchildren], 1),
        "lengths": source.integers(1, 90, rows),
    }
    shape = f"{rows} trees of {_TOP_K} branches, {_DEPTH} levels"

    def build(subject: Subject, given: Tensors) -> tuple[Tensor, ...]:
        if subject.speculation is None:
            raise ValueError("this device does not lay out trees")
        tree = subject.speculation.build_tree(_selection(given), given["lengths"])
        return tree.mask, tree.positions, tree.next_token, tree.next_sibling

    yield Case("SpeculationOperations.build_tree", shape, inputs, build, kernel="speculation.tree_build")
    tree = CpuSpeculation().build_tree(_selection(inputs), inputs["lengths"])
    laid_out = {
        "mask": tree.mask,
        "positions": tree.positions,
        "next_token": tree.next_token,
        "next_sibling": tree.next_sibling,
        # Few different tokens, so that paths of every length are accepted.
        "tokens": source.integers(0, 2, rows, 5),
        "target": source.integers(0, 2, rows, 5),
    }

    def verify(subject: Subject, given: Tensors) -> tuple[Tensor, ...]:
        if subject.speculation is None:
            raise ValueError("this device does not verify trees")
        made = DraftTree(given["mask"], given["positions"], given["next_token"], given["next_sibling"])
        accepted = subject.speculation.verify_tree(made, given["tokens"], given["target"], _DEPTH + 1)
        return accepted.nodes, accepted.num_accepted, accepted.tokens

    yield Case("SpeculationOperations.verify_tree", shape, laid_out, verify, kernel="speculation.tree_verify")


def _selection(given: Tensors) -> TreeSelection:
    return TreeSelection(given["parents"], given["selected"], _TOP_K, _DEPTH)
