"""Draft heads: one decoder layer that guesses from the served model's hidden states. Free of torch.

A head reads, for each token, its embedding and the hidden state of the token before it, joins the two with one matrix
and runs one decoder layer of its own. Embedding and output matrix are the served model's. Two kinds are known: the
multi-token prediction layer that some checkpoints carry behind their last layer (NEXTN), and EAGLE heads, which come in
a directory of their own.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from sglang_lite.models.checkpoint import Checkpoint
from sglang_lite.models.config_files import read_model_config
from sglang_lite.models.dense_names import EMBEDDING, FINAL_NORM, LM_HEAD, Shapes, layer_prefix
from sglang_lite.models.description import describe
from sglang_lite.models.families import FAMILIES
from sglang_lite.models.model_description import ModelDescription
from sglang_lite.models.quantized_storage import CheckpointLayout, find_layout
from sglang_lite.types import StartupError

EAGLE_ARCHITECTURE = "LlamaForCausalLMEagle"

PREFIX = layer_prefix(0)
"""Of a head's tensors, once they are renamed: a head is a decoder of one layer."""

EMBEDDING_NORM = f"{PREFIX}enorm.weight"
HIDDEN_NORM = f"{PREFIX}hnorm.weight"
JOIN = f"{PREFIX}eh_proj.weight"
JOIN_BIAS = f"{PREFIX}eh_proj.bias"
INPUT_NORM = f"{PREFIX}input_layernorm.weight"
OUTPUT_NORM = f"{PREFIX}shared_head.norm.weight"

_ELSEWHERE = "elsewhere."


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftHeadDescription:
    """A head before its weights are read.

    Attributes:
        directory: of the checkpoint.
        decoder: a decoder of one layer that looks like the head's.
        prefixes: of the head's tensors in the checkpoint, and what stands in their place in the names above.
        is_normed: both inputs, the layer's input and the result pass through a norm (a multi-token prediction layer);
            else none of them does (EAGLE).
        has_bias: the joining matrix has one.
    """

    directory: Path
    decoder: ModelDescription
    prefixes: tuple[tuple[str, str], ...]
    is_normed: bool
    has_bias: bool = False

    def checkpoint(self) -> Checkpoint:
        """The head's tensors under the names above; those of other layers lie elsewhere."""
        family = FAMILIES[self.decoder.architecture]
        return Checkpoint.open(self.directory).renamed(lambda name: self._rename(family.canonical_name(name)))

    def tensors(self) -> Shapes:
        """name -> shape of what the head reads, as if nothing were quantized."""
        shapes = dict(FAMILIES[self.decoder.architecture].expected_tensors(self.decoder))
        for name in (EMBEDDING, FINAL_NORM, LM_HEAD):
            shapes.pop(name, None)
        hidden = self.decoder.hidden_size
        shapes[JOIN] = (hidden, 2 * hidden)
        if self.has_bias:
            shapes[JOIN_BIAS] = (hidden,)
        if self.is_normed:
            shapes |= dict.fromkeys((EMBEDDING_NORM, HIDDEN_NORM, OUTPUT_NORM), (hidden,))
        else:
            del shapes[INPUT_NORM]
        return shapes

    def layout(self, checkpoint: Checkpoint) -> CheckpointLayout:
        """How the checkpoint stores it.

        Raises:
            StartupError: a tensor is missing or has another shape.
        """
        layout = find_layout(self.tensors(), checkpoint, self.decoder.quantization)
        checkpoint.require(layout.required)
        return layout

    def _rename(self, name: str) -> str:
        for prefix, replacement in self.prefixes:
            if name.startswith(prefix):
                return replacement + name.removeprefix(prefix)
        return _ELSEWHERE + name


def next_token_head(directory: Path | str, target: ModelDescription) -> DraftHeadDescription:
    """The multi-token prediction layer in the checkpoint of the served model.

    Raises:
        StartupError: the family has none that is built, or the checkpoint does not hold it.
    """
    family = FAMILIES[target.architecture]
    if family.prediction_layer is None:
        having = sorted(name for name, other in FAMILIES.items() if other.prediction_layer is not None)
        raise StartupError(
            f"the multi-token prediction layer of {target.architecture} is not built; those of {', '.join(having)} are"
        )
    prefix = layer_prefix(target.num_layers)
    head = DraftHeadDescription(
        directory=Path(directory),
        decoder=family.prediction_layer(target),
        prefixes=((prefix, PREFIX),),
        is_normed=True,
    )
    checkpoint = head.checkpoint()
    if JOIN not in checkpoint.tensors:
        raise StartupError(
            f"{directory} has no multi-token prediction layer: no tensor {prefix}eh_proj.weight; it is often left out "
            f"of converted checkpoints. Guess with NGRAM or STANDALONE instead"
        )
    head.layout(checkpoint)
    return head


def eagle_head(directory: Path | str, target: ModelDescription) -> DraftHeadDescription:
    """An EAGLE head in a directory of its own.

    Raises:
        StartupError: it is none, or not one for the served model.
    """
    directory = Path(directory)
    config = read_model_config(directory)
    if EAGLE_ARCHITECTURE in (config.get("architectures") or []):
        config = {**config, "architectures": ["LlamaForCausalLM"]}
    decoder = describe(config, source=str(directory / "config.json"))
    if decoder.architecture != "LlamaForCausalLM" or decoder.num_layers != 1:
        raise StartupError(
            f"an EAGLE head is a Llama decoder of one layer; {directory} describes {decoder.num_layers} of "
            f"{decoder.architecture}"
        )
    if decoder.hidden_size != target.hidden_size:
        raise StartupError(
            f"the head in {directory} reads hidden states of {decoder.hidden_size} elements, where the served model's "
            f"have {target.hidden_size}; take the head that was trained for it"
        )
    prefixes = (
        ("model.layers.0.", PREFIX),
        ("layers.0.", PREFIX),
        ("model.fc.", f"{PREFIX}eh_proj."),
        ("fc.", f"{PREFIX}eh_proj."),
    )
    head = DraftHeadDescription(directory=directory, decoder=decoder, prefixes=prefixes, is_normed=False)
    checkpoint = head.checkpoint()
    head = dataclasses.replace(head, has_bias=JOIN_BIAS in checkpoint.tensors)
    head.layout(checkpoint)
    return head
