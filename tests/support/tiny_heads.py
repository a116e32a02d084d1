"""Draft heads on tiny checkpoints: random ones, and a model with a head that always agrees with it."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.support.tiny_checkpoints import CASES, COMMON, TinyCase, save_checkpoint

AGREEING_VOCABULARY = 48
"""Tokens of the model that counts: one coordinate of the hidden state each."""


def add_prediction_layer(directory: Path, num_layers: int, seed: int = 3) -> dict[str, torch.Tensor]:
    """Put a multi-token prediction layer behind the last layer of a saved model: a copy of that layer's shapes, with
    values of its own. Returns its tensors, under the names of the checkpoint."""
    file = directory / "model.safetensors"
    tensors = load_file(file)
    generator = torch.Generator().manual_seed(seed)
    last, prefix = f"model.layers.{num_layers - 1}.", f"model.layers.{num_layers}."
    hidden = tensors["model.norm.weight"].shape[0]

    def random(shape: torch.Size | tuple[int, ...]) -> torch.Tensor:
        values = torch.randn(shape, generator=generator)
        return values * 0.2 if len(shape) > 1 else 1 + 0.1 * values

    head = {
        prefix + name.removeprefix(last): random(tensor.shape)
        for name, tensor in tensors.items()
        if name.startswith(last)
    }
    head |= {f"{prefix}{name}.weight": random((hidden,)) for name in ("enorm", "hnorm", "shared_head.norm")}
    head[f"{prefix}eh_proj.weight"] = random((hidden, 2 * hidden))
    # Published checkpoints repeat the two matrices of the vocabulary here.
    head[f"{prefix}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    head[f"{prefix}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file({**tensors, **head}, file)
    return head


def save_eagle_head(directory: Path, *, hidden_size: int = COMMON["hidden_size"], bias: bool = True) -> None:
    """An EAGLE head: one Llama layer without an input norm, and a joining matrix."""
    case = TinyCase("Llama", {"num_hidden_layers": 1, "hidden_size": hidden_size})
    save_checkpoint(case, directory)
    file = directory / "model.safetensors"
    tensors = {
        name.removeprefix("model."): tensor
        for name, tensor in load_file(file).items()
        if name.startswith("model.layers.0.") and "input_layernorm" not in name
    }
    tensors["fc.weight"] = 0.2 * torch.randn(hidden_size, 2 * hidden_size)
    if bias:
        tensors["fc.bias"] = 0.1 * torch.randn(hidden_size)
    save_file(tensors, file)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "architectures": ["LlamaForCausalLMEagle"]}))


def save_counting_model(directory: Path, *, reads_hidden: bool) -> None:
    """A DeepSeek model that answers token t with ``succ(t)``, and a prediction layer that knows it.

    Args:
        reads_hidden: the head looks at the hidden states alone, so that it is right only where it gets the right ones;
            else at the newest token alone.
    """
    save_checkpoint(
        TinyCase("DeepseekV3", {**CASES["deepseek_v3"].options, "vocab_size": AGREEING_VOCABULARY}), directory
    )
    add_prediction_layer(directory, CASES["deepseek_v3"].options["num_hidden_layers"])
    file = directory / "model.safetensors"
    tensors = load_file(file)
    hidden = COMMON["hidden_size"]
    embedding = torch.eye(AGREEING_VOCABULARY, hidden)
    successor = torch.roll(torch.arange(AGREEING_VOCABULARY), -1)
    output = torch.zeros(AGREEING_VOCABULARY, hidden)
    output[successor] = embedding
    step = torch.zeros(hidden, hidden)
    step[successor, torch.arange(AGREEING_VOCABULARY)] = 1.0  # the coordinate of t -> that of succ(t)
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] = torch.zeros_like(tensor)
        elif "norm" in name and tensor.dim() == 1:
            tensors[name] = torch.ones_like(tensor)
        elif name.endswith("embed_tokens.weight"):
            tensors[name] = embedding.clone()
        elif name.endswith(("lm_head.weight", "shared_head.head.weight")):
            tensors[name] = output.clone()
        elif name.endswith("eh_proj.weight"):
            nothing = torch.zeros(hidden, hidden)
            parts = [nothing, step] if reads_hidden else [torch.eye(hidden), nothing]
            tensors[name] = torch.cat(parts, dim=1)
    save_file(tensors, file)
