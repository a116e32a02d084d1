"""Reading PEFT adapters: what is accepted, and what is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sglang_lite.config import ServerConfig
from sglang_lite.models.adapter_checkpoint import read_adapter
from sglang_lite.models.adapter_config import read_adapter_config
from sglang_lite.models.adapter_settings import adapter_bytes, adapter_settings, parse_adapters
from sglang_lite.types import StartupError

PREFIX = "model.layers.0.self_attn."
SHAPES = {f"{PREFIX}q_proj.weight": (6, 4), f"{PREFIX}v_proj.weight": (5, 4)}


def write(directory: Path, tensors: dict[str, Tensor] | None = None, **config: Any) -> Path:
    directory.mkdir(exist_ok=True)
    document = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"], **config}
    (directory / "adapter_config.json").write_text(json.dumps(document))
    given = {
        f"base_model.model.{PREFIX}q_proj.lora_A.weight": torch.ones(2, 4),
        f"base_model.model.{PREFIX}q_proj.lora_B.weight": torch.ones(6, 2),
        f"base_model.model.{PREFIX}v_proj.lora_A.weight": torch.ones(2, 4),
        f"base_model.model.{PREFIX}v_proj.lora_B.weight": torch.ones(5, 2),
    }
    save_file(given if tensors is None else tensors, directory / "adapter_model.safetensors")
    return directory


def read(directory: Path, *, max_rank: int = 8, names: Callable[[str], str] = str) -> dict[str, Any]:
    return read_adapter(directory, SHAPES, max_rank=max_rank, canonical_name=names, dtype=torch.float32)


def change(directory: Path, edit: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = load_file(directory / "adapter_model.safetensors")
    edit(tensors)
    save_file(tensors, directory / "adapter_model.safetensors")


class TestMatrices:
    @pytest.mark.parametrize(
        ("config", "scaling"),
        [
            ({}, 2.0),
            ({"use_rslora": True, "lora_alpha": 2 * 2**0.5}, 2.0),
            ({"lora_alpha": 0.5}, 0.25),
            ({"alpha_pattern": {"q_proj": 10}}, 5.0),
            ({"alpha_pattern": {r"layers\.[0-3]\.self_attn\.q_proj": 10}}, 5.0),
            ({"alpha_pattern": {"proj": 10}}, 2.0),
        ],
    )
    def test_scaling(self, tmp_path: Path, config: dict[str, Any], scaling: float) -> None:
        weights = read(write(tmp_path / "a", **config))
        pair = weights[f"{PREFIX}q_proj.weight"]
        assert torch.equal(pair.a, torch.ones(2, 4))
        torch.testing.assert_close(pair.b, torch.full((6, 2), scaling))

    def test_names(self, tmp_path: Path) -> None:
        """Without PEFT's wrapper, with an adapter's name inside, and in the spelling of a wrapped model."""
        tensors = {
            f"language_model.{PREFIX}q_proj.lora_A.default.weight": torch.ones(2, 4, dtype=torch.bfloat16),
            f"language_model.{PREFIX}q_proj.lora_B.default.weight": torch.ones(6, 2, dtype=torch.bfloat16),
        }
        weights = read(write(tmp_path / "a", tensors), names=lambda name: name.removeprefix("language_model."))
        assert weights.keys() == {f"{PREFIX}q_proj.weight"}
        assert weights[f"{PREFIX}q_proj.weight"].a.dtype == torch.float32

    def test_a_rank_of_its_own(self, tmp_path: Path) -> None:
        directory = write(tmp_path / "a", rank_pattern={"v_proj": 3})
        change(
            directory,
            lambda tensors: tensors.update(
                {
                    f"base_model.model.{PREFIX}v_proj.lora_A.weight": torch.ones(3, 4),
                    f"base_model.model.{PREFIX}v_proj.lora_B.weight": torch.ones(5, 3),
                }
            ),
        )
        pair = read(directory)[f"{PREFIX}v_proj.weight"]
        assert pair.a.shape == (3, 4)
        torch.testing.assert_close(pair.b, torch.full((5, 3), 4 / 3))
        assert read_adapter_config(directory).max_rank == 3


class TestRefusals:
    @pytest.mark.parametrize(
        ("config", "message"),
        [
            ({"peft_type": "IA3"}, "'peft_type' must be 'LORA', got 'IA3'"),
            ({"r": 0}, "'r' must be a positive integer, got 0"),
            ({"lora_alpha": None}, "'lora_alpha' must be a positive number"),
            ({"bias": "all"}, "'bias' must be 'none', got 'all'"),
            ({"use_dora": True}, "'use_dora' must be absent or empty: weight-decomposed adapters"),
            ({"modules_to_save": ["lm_head"]}, "'modules_to_save' must be absent or empty: whole modules"),
            ({"rank_pattern": {"(": 3}}, r"'rank_pattern' holds the invalid regular expression '\('"),
            ({"rank_pattern": {"q_proj": "x"}}, "'rank_pattern.q_proj' must be a positive integer"),
            ({"rank_pattern": {"v_proj": 9}}, "rank 9, over the limit of 8.*--max-lora-rank 9"),
        ],
    )
    def test_configuration(self, tmp_path: Path, config: dict[str, Any], message: str) -> None:
        with pytest.raises(StartupError, match=message):
            read(write(tmp_path / "a", **config))

    def test_missing_files(self, tmp_path: Path) -> None:
        with pytest.raises(StartupError, match=r"there is no adapter_config.json in"):
            read(tmp_path)
        directory = write(tmp_path / "a")
        (directory / "adapter_model.safetensors").rename(directory / "adapter_model.bin")
        with pytest.raises(StartupError, match=r"no adapter_model.safetensors in .*found adapter_model.bin"):
            read(directory)

    @pytest.mark.parametrize(
        ("edit", "message"),
        [
            (lambda tensors: tensors.pop(f"base_model.model.{PREFIX}q_proj.lora_B.weight"), "q_proj.lora_B.weight"),
            (
                lambda tensors: tensors.update({f"base_model.model.{PREFIX}q_proj.lora_A.weight": torch.ones(2, 5)}),
                r"q_proj.lora_A.weight shape \[2, 5\] does not match expected \[2, 4\]",
            ),
            (
                lambda tensors: tensors.update({f"base_model.model.{PREFIX}q_proj.lora_B.weight": torch.ones(6, 3)}),
                r"q_proj.lora_B.weight shape \[6, 3\] does not match expected \[6, 2\]",
            ),
            (
                lambda tensors: tensors.update(
                    {f"base_model.model.{PREFIX}q_proj.lora_B.weight": torch.ones(6, 2, dtype=torch.int32)}
                ),
                "q_proj.lora_B.weight has dtype I32",
            ),
            (
                lambda tensors: tensors[f"base_model.model.{PREFIX}v_proj.lora_A.weight"][0, :1].fill_(float("inf")),
                "v_proj.lora_A.weight .* not finite",
            ),
            (
                lambda tensors: tensors.update({"base_model.model.embed_tokens.lora_embedding_A": torch.ones(2, 4)}),
                "embed_tokens.lora_embedding_A .* is not a lora_A or lora_B matrix",
            ),
            (
                lambda tensors: tensors.update(
                    {
                        "base_model.model.lm_head.lora_A.weight": torch.ones(2, 4),
                        "base_model.model.lm_head.lora_B.weight": torch.ones(9, 2),
                    }
                ),
                "adapts lm_head, which the server does not adapt",
            ),
            (lambda tensors: tensors.clear(), "holds no low-rank matrices"),
        ],
    )
    def test_tensors(self, tmp_path: Path, edit: Callable[[dict[str, Tensor]], Any], message: str) -> None:
        directory = write(tmp_path / "a")
        change(directory, edit)
        with pytest.raises(StartupError, match=message):
            read(directory)


class TestSettings:
    def config(self, **options: Any) -> ServerConfig:
        return ServerConfig(model_path="m", device="cpu", **options)

    def test_none(self) -> None:
        assert adapter_settings(self.config()) is None

    def test_taken_from_the_adapters(self, tmp_path: Path) -> None:
        one = write(tmp_path / "one", r=2, target_modules=["q_proj"])
        two = write(tmp_path / "two", r=5, target_modules=["model.layers.0.mlp.up_proj"])
        settings = adapter_settings(self.config(lora_paths=[str(one), f"two={two}"], max_loras_per_batch=3))
        assert settings is not None
        assert (settings.num_slots, settings.max_rank) == (3, 5)
        assert settings.target_modules == {"q_proj", "up_proj"}
        assert [(adapter.name, adapter.path) for adapter in settings.adapters] == [
            (str(one), str(one)),
            ("two", str(two)),
        ]

    def test_given(self) -> None:
        options = {"max_lora_rank": 16, "lora_target_modules": ["qkv_proj", "o_proj"], "max_loaded_loras": 12}
        settings = adapter_settings(self.config(enable_lora=True, **options))
        assert settings is not None
        assert (settings.num_slots, settings.max_rank) == (12, 16)
        assert settings.target_modules == {"q_proj", "k_proj", "v_proj", "o_proj"}
        everything = adapter_settings(self.config(enable_lora=True, max_lora_rank=1, lora_target_modules=["all"]))
        assert everything is not None
        assert everything.target_modules is None

    def test_memory_bounds_what_the_slots_take(self) -> None:
        settings = adapter_settings(self.config(enable_lora=True, max_lora_rank=2, lora_target_modules=["q_proj"]))
        assert settings is not None
        assert adapter_bytes(settings, SHAPES, 4) == 8 * 2 * (4 + 3 * 6) * 4

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"enable_lora": True}, "needs --max-lora-rank and --lora-target-modules"),
            ({"enable_lora": True, "max_lora_rank": 4}, "needs --max-lora-rank and --lora-target-modules"),
            (
                {"enable_lora": True, "max_loaded_loras": 4},
                "--max-loaded-loras 4 must not be smaller than --max-loras-per-batch 8",
            ),
            ({"lora_paths": ["a=/x", "a=/y"]}, "the name 'a' comes twice"),
            ({"lora_paths": ["a=/x", "b=/y"], "max_loras_per_batch": 1}, "names 2 adapters, but only 1"),
            ({"lora_paths": ["=/x"]}, "must be PATH, NAME=PATH"),
            ({"lora_paths": ['{"lora_name": "a"}']}, "lora_name and lora_path"),
            ({"lora_paths": ['{"lora_name']}, "is not a JSON object"),
            ({"lora_paths": ["/nowhere"]}, "no adapter_config.json in /nowhere"),
        ],
    )
    def test_refusals(self, options: dict[str, Any], message: str) -> None:
        with pytest.raises(StartupError, match=message):
            adapter_settings(self.config(**options))

    def test_the_rank_of_a_named_adapter_must_fit(self, tmp_path: Path) -> None:
        one = write(tmp_path / "one", r=6)
        with pytest.raises(StartupError, match="has rank 6, over --max-lora-rank 4"):
            adapter_settings(self.config(lora_paths=[str(one)], max_lora_rank=4))

    def test_target_modules_that_are_no_list(self, tmp_path: Path) -> None:
        one = write(tmp_path / "one", target_modules="all-linear")
        with pytest.raises(StartupError, match="name them with --lora-target-modules"):
            adapter_settings(self.config(lora_paths=[str(one)]))

    def test_json_items(self) -> None:
        [adapter] = parse_adapters(['{"lora_name": "a", "lora_path": "/x=y", "pinned": true}'])
        assert (adapter.name, adapter.path, adapter.pinned) == ("a", "/x=y", True)

    @pytest.mark.parametrize(
        ("item", "message"),
        [
            ("/adapters/sql:v2", "no ':'; give another one as NAME=PATH"),
            ("base:sql=/adapters/sql", "no ':'"),
            ('{"lora_name": "a:b", "lora_path": "/a"}', "no ':'"),
            ("/" * 257, "must have 1 to 256 characters"),
        ],
    )
    def test_names_that_no_request_could_use(self, item: str, message: str) -> None:
        with pytest.raises(StartupError, match=message):
            parse_adapters([item])
