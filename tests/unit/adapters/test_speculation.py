"""Verification of drafts on the host and over the wheels' doubles."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from sglang_lite.adapters.base import OperationInputError
from sglang_lite.adapters.cpu.speculation import CpuSpeculation
from sglang_lite.adapters.cuda.selection import Selection
from sglang_lite.adapters.cuda.speculation import CudaSpeculation
from sglang_lite.adapters.cuda.wheels import load_wheels
from sglang_lite.adapters.dispatch import Target
from sglang_lite.adapters.speculation import ChainDraft, SpeculationOperations, TreeSelection
from tests.support.kernel_doubles.families import installed_families


def subject(name: str) -> Iterator[SpeculationOperations]:
    if name == "host":
        yield CpuSpeculation()
        return
    with installed_families(name):
        yield CudaSpeculation(load_wheels(), Selection(Target(90, name, has_flashinfer=True)))


@pytest.fixture(params=["host", "sglang-kernel", "sgl-kernel"])
def chains(request: pytest.FixtureRequest) -> Iterator[SpeculationOperations]:
    yield from subject(request.param)


@pytest.fixture(params=["host", "sgl-kernel"])
def trees(request: pytest.FixtureRequest) -> Iterator[SpeculationOperations]:
    yield from subject(request.param)


def one_hot(tokens: Tensor, width: int) -> Tensor:
    return torch.nn.functional.one_hot(tokens.long(), width).float()


class TestChain:
    def test_what_the_model_is_sure_of_decides(self, chains: SpeculationOperations) -> None:
        drafted = torch.tensor([[3, 1, 4], [3, 1, 4], [3, 1, 4]], dtype=torch.int32)
        says = torch.tensor([[3, 1, 4, 5], [3, 2, 4, 5], [0, 1, 4, 5]])
        draft = ChainDraft(drafted, one_hot(drafted, 6), one_hot(says, 6))
        expected = [[3, 1, 4, 5], [3, 2, -1, -1], [0, -1, -1, -1]]
        assert chains.verify_chain(draft, seed=1, offset=0).tolist() == expected

    def test_tokens_are_distributed_as_the_models(self, chains: SpeculationOperations) -> None:
        rows = 4000
        generator = torch.Generator().manual_seed(3)
        draft_row, target_row = torch.tensor([0.6, 0.3, 0.1, 0.0]), torch.tensor([0.2, 0.3, 0.1, 0.4])
        tokens = torch.multinomial(draft_row, rows * 2, replacement=True, generator=generator).view(rows, 2).int()
        draft = ChainDraft(tokens, draft_row.expand(rows, 2, 4), target_row.expand(rows, 3, 4))
        drawn = chains.verify_chain(draft, seed=7, offset=3)
        for place in range(3):
            reached = drawn[:, place][drawn[:, place] >= 0]
            shares = torch.bincount(reached.long(), minlength=4) / len(reached)
            # Four standard deviations of a share of 0.4 among the rows that got that far.
            assert float((shares - target_row).abs().max()) < 4 * (0.24 / len(reached)) ** 0.5
        accepted = float(torch.minimum(draft_row, target_row).sum())
        assert float((drawn[:, 1] >= 0).float().mean()) == pytest.approx(accepted, abs=0.04)

    def test_the_same_seed_and_offset_draw_the_same(self, chains: SpeculationOperations) -> None:
        tokens = torch.zeros(50, 2, dtype=torch.int32)
        draft = ChainDraft(tokens, torch.full((50, 2, 4), 0.25), torch.full((50, 3, 4), 0.25))
        first = chains.verify_chain(draft, seed=5, offset=8)
        assert torch.equal(first, chains.verify_chain(draft, seed=5, offset=8))
        assert not torch.equal(first, chains.verify_chain(draft, seed=5, offset=9))
        assert not torch.equal(first, chains.verify_chain(draft, seed=6, offset=8))

    def test_shapes_that_do_not_fit_are_named(self, chains: SpeculationOperations) -> None:
        tokens = torch.zeros(2, 3, dtype=torch.int32)
        with pytest.raises(OperationInputError, match=r"target_probabilities must be torch.float32 \[2, 4, 5\]"):
            chains.verify_chain(ChainDraft(tokens, torch.zeros(2, 3, 5), torch.zeros(2, 3, 5)), seed=0, offset=0)


def selection() -> TreeSelection:
    """Two branches a level, three levels.

    Row 0 keeps 0 and 1 (children of the root), 2 and 3 (children of 0), 6 (child of 2); row 1 keeps a chain and one
    leaf: 0, 1, 4 (child of 1), 8 and 9 (children of 4).
    """
    return TreeSelection(
        parents=torch.tensor([[-1, 0, 1, 2, 4], [-1, 0, 1, 2, 4]]),
        selected=torch.tensor([[0, 1, 2, 3, 6], [0, 1, 4, 8, 9]]),
        top_k=2,
        depth=3,
    )


class TestTree:
    def test_layout(self, trees: SpeculationOperations) -> None:
        tree = trees.build_tree(selection(), torch.tensor([10, 20]))
        seen = [[node.nonzero().flatten().tolist() for node in row] for row in tree.mask]
        assert seen[0] == [[0], [0, 1], [0, 2], [0, 1, 3], [0, 1, 4], [0, 1, 3, 5]]
        assert seen[1] == [[0], [0, 1], [0, 2], [0, 2, 3], [0, 2, 3, 4], [0, 2, 3, 5]]
        assert tree.positions.tolist() == [[10, 11, 11, 12, 12, 13], [20, 21, 21, 22, 23, 23]]
        assert tree.next_token.tolist() == [[1, 3, -1, 5, -1, -1], [1, -1, 3, 4, -1, -1]]
        assert tree.next_sibling.tolist() == [[-1, 2, -1, 4, -1, -1], [-1, 2, -1, -1, 5, -1]]

    def test_the_path_that_the_model_agrees_with(self, trees: SpeculationOperations) -> None:
        tree = trees.build_tree(selection(), torch.tensor([10, 20]))
        tokens = torch.tensor([[50, 51, 52, 53, 54, 55], [60, 61, 62, 63, 64, 65]])
        says = torch.tensor([[51, 54, 0, 0, 99, 0], [62, 0, 63, 65, 0, 7]])
        found = trees.verify_tree(tree, tokens, says, max_path=4)
        assert found.nodes.tolist() == [[0, 1, 4, -1], [0, 2, 3, 5]]
        assert found.num_accepted.tolist() == [2, 3]
        assert found.tokens.tolist() == [[51, 54, 99, -1], [62, 63, 65, 7]]

    def test_nothing_agreed_with(self, trees: SpeculationOperations) -> None:
        tree = trees.build_tree(selection(), torch.tensor([10, 20]))
        tokens = torch.tensor([[50, 51, 52, 53, 54, 55], [60, 61, 62, 63, 64, 65]])
        found = trees.verify_tree(tree, tokens, torch.full((2, 6), 9), max_path=4)
        assert found.nodes.tolist() == [[0, -1, -1, -1]] * 2
        assert found.tokens.tolist() == [[9, -1, -1, -1]] * 2

    def test_a_path_is_as_long_as_it_may_be(self, trees: SpeculationOperations) -> None:
        tree = trees.build_tree(selection(), torch.tensor([10, 20]))
        tokens = torch.tensor([[50, 51, 52, 53, 54, 55]] * 2)
        found = trees.verify_tree(tree, tokens, torch.tensor([[51, 53, 0, 55, 0, 0]] * 2), max_path=2)
        assert found.nodes[0].tolist() == [0, 1] and found.tokens[0].tolist() == [51, 53]

    def test_selections_of_another_size_are_refused(self, trees: SpeculationOperations) -> None:
        wrong = TreeSelection(torch.zeros(2, 4, dtype=torch.int64), selection().selected, 2, 3)
        with pytest.raises(OperationInputError, match=r"parents must be int64 \[2, 5\]"):
            trees.build_tree(wrong, torch.tensor([10, 20]))


def test_a_child_without_its_parent_is_refused() -> None:
    orphan = TreeSelection(torch.tensor([[-1, 0, 1, 2, 4]]), torch.tensor([[0, 4]]), 2, 3)
    with pytest.raises(OperationInputError, match="candidate 4 without candidate 1"):
        CpuSpeculation().build_tree(orphan, torch.tensor([0]))


def test_the_newer_line_has_no_trees() -> None:
    with installed_families("sglang-kernel"):
        ops = CudaSpeculation(load_wheels(), Selection(Target(90, "sglang-kernel", has_flashinfer=True)))
        with pytest.raises(OperationInputError, match="use chains of drafts"):
            ops.build_tree(selection(), torch.tensor([10, 20]))
