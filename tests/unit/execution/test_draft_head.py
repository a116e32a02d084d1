"""Guesses by draft heads: the tokens of decoding one by one, whatever a head says, and it says what it should."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as reference

from sglang_lite import Engine
from sglang_lite.configuration.loading import load_config
from sglang_lite.execution.draft_head import HeadDrafter
from sglang_lite.scheduler.plan import StepPlan
from sglang_lite.startup import prepare
from sglang_lite.types import StartupError
from tests.support.tiny_checkpoints import CASES, save_checkpoint
from tests.support.tiny_heads import AGREEING_VOCABULARY, add_prediction_layer, save_counting_model, save_eagle_head
from tests.unit.execution.test_speculation import GREEDY, PROMPTS, SAMPLINGS, start, tokens

PREDICTING = ("deepseek_v3", "glm4_moe", "glm4_moe_lite")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directories = {name: tmp_path_factory.mktemp(name) for name in (*PREDICTING, "qwen3", "llama")}
    for name, directory in directories.items():
        save_checkpoint(CASES[name], directory)
        if name in PREDICTING:
            add_prediction_layer(directory, CASES[name].options["num_hidden_layers"])
    directories["eagle"] = tmp_path_factory.mktemp("eagle")
    save_eagle_head(directories["eagle"])
    return directories


def predicting(target: Path, **options: Any) -> Engine:
    return start(target, speculative_algorithm="NEXTN", **options)


@pytest.mark.parametrize(
    ("target", "options"),
    [
        ("deepseek_v3", {"page_size": 1, "max_total_tokens": 160, "speculative_num_steps": 2}),
        ("deepseek_v3", {"page_size": 16, "speculative_num_steps": 6, "chunked_prefill_size": 16}),
        ("glm4_moe", {}),
        ("glm4_moe", {"max_total_tokens": 160, "chunked_prefill_size": 8}),
        ("glm4_moe_lite", {"speculative_num_draft_tokens": 2}),
    ],
    ids=str,
)
def test_the_output_is_that_of_decoding_one_by_one(
    models: dict[str, Path], target: str, options: dict[str, Any]
) -> None:
    plain = {name: value for name, value in options.items() if not name.startswith("speculative")}
    with start(models[target], **plain) as one, predicting(models[target], **options) as several:
        for name in ("stop tokens", "seeded", "bias"):
            assert tokens(several, SAMPLINGS[name]) == tokens(one, SAMPLINGS[name]), name
        mixed = [SAMPLINGS[name] for name in ("penalties", "greedy", "least tokens", "cold", "to the limit")]
        assert tokens(several, mixed) == tokens(one, mixed)
        assert tokens(several, GREEDY, return_logprob=True) == tokens(one, GREEDY, return_logprob=True)
        assert several._core._scheduler.stats().drafted_tokens > 10


@pytest.mark.parametrize("target", ["qwen3", "llama", "deepseek_v3"])
def test_an_eagle_head_changes_no_output(models: dict[str, Path], target: str) -> None:
    options = {"speculative_algorithm": "EAGLE", "speculative_draft_model_path": str(models["eagle"])}
    with start(models[target]) as one, start(models[target], **options) as several:
        for name in ("greedy", "seeded"):
            assert tokens(several, SAMPLINGS[name]) == tokens(one, SAMPLINGS[name]), name
        assert several._core._scheduler.stats().drafted_tokens > 10


@pytest.mark.parametrize("reads_hidden", [True, False])
@pytest.mark.parametrize(
    "options", [{}, {"page_size": 16, "chunked_prefill_size": 16}, {"page_size": 1, "max_total_tokens": 140}], ids=str
)
def test_a_head_that_knows_is_always_right(tmp_path: Path, reads_hidden: bool, options: dict[str, Any]) -> None:
    """The hidden states reach it across chunks, pages of the prefix cache, preemption and rejected guesses' slots."""
    save_counting_model(tmp_path, reads_hidden=reads_hidden)
    prompts = [[*range(first, first + length)] for first, length in ((3, 1), (4, 9), (4, 33), (20, 12))]
    sampling = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
    with predicting(tmp_path, speculative_num_steps=3, **options) as engine:
        for _ in range(2):  # the second time most of the prompts is cached
            results = engine.generate(input_ids=prompts, sampling_params=sampling)
            for prompt, result in zip(prompts, results, strict=True):
                expected = [(prompt[-1] + 1 + step) % AGREEING_VOCABULARY for step in range(24)]
                assert result["output_ids"] == expected
        stats = engine._core._scheduler.stats()
    # A prompt that is cached to its last token has no hidden state before it; the guess made there may be wrong.
    assert stats.accepted_tokens >= stats.drafted_tokens - (4 * 3 if reads_hidden else 0)
    assert stats.drafted_tokens > 60
    if "max_total_tokens" not in options:  # one token a step would take 48, and preemption takes more
        assert stats.steps < 40


def test_guesses_are_those_of_the_layer_over_the_whole_sequence(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against transformers' decoder layer with the head's weights, over every sequence from its start."""
    made: list[tuple[int, list[int]]] = []
    fill = HeadDrafter.fill

    def recording(self: HeadDrafter, plan: StepPlan) -> StepPlan:
        filled = fill(self, plan)
        if plan.draft_lens is not None and plan.draft_lens.any():
            assert len(plan.rows) == 1
            made.append((int(plan.positions[0]), filled.input_ids[1:].tolist()))
        return filled

    monkeypatch.setattr(HeadDrafter, "fill", recording)
    prompt = PROMPTS[4]
    with predicting(models["deepseek_v3"], chunked_prefill_size=16, disable_radix_cache=True) as engine:
        result = engine.generate(
            input_ids=prompt, sampling_params={"temperature": 0, "max_new_tokens": 30, "ignore_eos": True}
        )
    sequence = [*prompt, *result["output_ids"]]
    assert len(made) > 8
    head = _ReferenceHead(models["deepseek_v3"])
    for position, guesses in made:
        assert head.guesses(sequence[: position + 1], len(guesses)) == guesses


class _ReferenceHead:
    """The prediction layer out of transformers' parts: entry j is made of token j and the hidden state before it."""

    def __init__(self, directory: Path) -> None:
        from safetensors.torch import load_file

        values = load_file(directory / "model.safetensors")
        config = DeepseekV3Config(**json.loads((directory / "config.json").read_text()))
        config._attn_implementation = "eager"
        self.model = DeepseekV3ForCausalLM.from_pretrained(directory, attn_implementation="eager").eval().float()
        prefix = f"model.layers.{config.num_hidden_layers}."
        part = {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}
        self.layer = reference.DeepseekV3DecoderLayer(config, config.num_hidden_layers - 1).eval().float()
        own = self.layer.state_dict().keys()
        self.layer.load_state_dict(_fused(part, own), strict=True)
        self.part, self.eps = part, config.rms_norm_eps

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.part[f"{name}.weight"]

    @torch.no_grad()
    def guesses(self, sequence: list[int], count: int) -> list[int]:
        hidden = self.model.model(torch.tensor([sequence])).last_hidden_state[0]
        previous = torch.cat([torch.zeros_like(hidden[:1]), hidden[:-1]])
        tokens = list(sequence)
        for _ in range(count):
            embedded = self.model.model.embed_tokens(torch.tensor(tokens))
            x = torch.cat([self._norm(embedded, "enorm"), self._norm(previous, "hnorm")], dim=-1)
            x = (x @ self.part["eh_proj.weight"].T)[None]
            positions = torch.arange(len(tokens))[None]
            mask = torch.full((len(tokens), len(tokens)), float("-inf")).triu(1)[None, None]
            rotary = self.model.model.rotary_emb(x, positions)
            x = self.layer(x, attention_mask=mask, position_ids=positions, position_embeddings=rotary)
            x = self._norm(x[0] if x.dim() == 3 else x, "shared_head.norm")
            previous = torch.cat([previous, x[-1:]])
            tokens.append(int(self.model.lm_head(x[-1]).argmax()))
        return tokens[len(sequence) :]


def _fused(part: dict[str, torch.Tensor], names: Any) -> dict[str, torch.Tensor]:
    """Experts as this version of transformers keeps them: one tensor for all of them."""
    state = {name: value for name, value in part.items() if name in names}
    count = 1 + max(int(name.split(".")[2]) for name in part if name.startswith("mlp.experts."))
    for name in names:
        if name == "mlp.experts.gate_up_proj":
            state[name] = torch.stack(
                [
                    torch.cat([part[f"mlp.experts.{expert}.{kind}_proj.weight"] for kind in ("gate", "up")])
                    for expert in range(count)
                ]
            )
        elif name == "mlp.experts.down_proj":
            state[name] = torch.stack([part[f"mlp.experts.{expert}.down_proj.weight"] for expert in range(count)])
    return state


def test_what_cannot_be_used_is_refused(models: dict[str, Path], tmp_path: Path) -> None:
    def refused(model: Path, match: str, **options: Any) -> None:
        with pytest.raises(StartupError, match=match):
            prepare(
                load_config(["--device", "cpu", "--model-path", str(model), "--skip-tokenizer-init", *_words(options)])
            )

    refused(models["qwen3"], "layer of Qwen3ForCausalLM is not built", speculative_algorithm="NEXTN")
    bare = tmp_path / "bare"
    save_checkpoint(CASES["deepseek_v3"], bare)
    refused(bare, "has no multi-token prediction layer", speculative_algorithm="EAGLE")
    narrow = tmp_path / "narrow"
    save_eagle_head(narrow, hidden_size=32)
    eagle = {"speculative_algorithm": "EAGLE", "speculative_draft_model_path": narrow}
    refused(models["qwen3"], "hidden states of 32 elements", **eagle)
    eagle["speculative_draft_model_path"] = models["qwen3"]
    refused(models["llama"], "an EAGLE head is a Llama decoder of one layer", **eagle)
    refused(models["llama"], "--speculative-algorithm EAGLE3 is not supported", speculative_algorithm="EAGLE3")
    refused(models["deepseek_v3"], "NEXTN with --tp-size 2", speculative_algorithm="NEXTN", tp_size=2)


def _words(options: dict[str, Any]) -> list[str]:
    return [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
