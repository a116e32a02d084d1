"""ModelDescription and its parts: everything known of a model before its weights are read. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from sglang_lite.layers.rope_parameters import RopeParameters
from sglang_lite.models.quantization import QuantizationDescription


@dataclass(frozen=True, slots=True, kw_only=True)
class KVDescription:
    """What a token leaves in the KV pool.

    Attributes:
        num_layers: layers that own keys and values; the layer index of the pool counts only these.
        num_kv_heads: heads of a key or value (1 for a latent row that all heads share).
        key_width, value_width: elements of one head's key and value.
        num_tensors: 2 for keys and values, 1 when the value is a part of the key's row.
        total_heads: heads of the whole model, where this describes one rank's share of it; 0 where it is whole.
    """

    num_layers: int
    num_kv_heads: int
    key_width: int
    value_width: int
    num_tensors: int = 2
    total_heads: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentDescription:
    """State that a sequence carries beside its KV, of a fixed size for each layer.

    Attributes:
        num_layers: layers with such state.
        conv_channels, conv_kernel: the causal convolution keeps its last ``conv_kernel - 1`` inputs.
        num_heads, key_dim, value_dim: the state is [num_heads, key_dim, value_dim] in float32.
    """

    num_layers: int
    conv_channels: int
    conv_kernel: int
    num_heads: int
    key_dim: int
    value_dim: int

    @property
    def tail_elements(self) -> int:
        """Elements of a sequence's convolution tail in one layer."""
        return self.conv_channels * (self.conv_kernel - 1)

    @property
    def state_elements(self) -> int:
        """Elements of a sequence's state in one layer."""
        return self.num_heads * self.key_dim * self.value_dim

    def row_bytes(self, activation_bytes: int) -> int:
        """Bytes of one sequence over all layers: the tail in the type of the activations, the state in float32."""
        return self.num_layers * (self.tail_elements * activation_bytes + self.state_elements * 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDescription:
    """A decoder as config.json and generation_config.json describe it.

    Attributes:
        architecture: the entry of ``architectures`` that is served.
        model_type: ``model_type`` of config.json.
        num_layers, num_heads, num_kv_heads, head_dim, hidden_size, intermediate_size, vocab_size: extents.
        context_length: positions the model is made for, scaling included.
        rms_norm_eps: epsilon of every norm.
        rope: rotary parameters.
        tie_word_embeddings: the output projection is the embedding matrix.
        qkv_bias, output_bias, mlp_bias: which projections carry a bias.
        query_key_norm: q and k are normalised per head.
        sliding_windows: per layer, the keys a query sees (itself included), or None for all.
        eos_token_ids: ids that end generation, of both files, in order and without repetition.
        bos_token_id, pad_token_id: None where the config names none.
        dtype: element type of the published weights ("bfloat16", ...), None when not stated.
        kv: what a token leaves in the KV pool.
        recurrent: state beside the KV, None without any.
        quantization: how the checkpoint stores its matrices, None for plain floating-point weights.
        is_wrapped: the decoder is the text part (``text_config``) of a larger model.
        selected_keys: most keys that a query attends to, chosen by an index (sparse attention); None without a choice.
            A device that cannot choose serves contexts up to this length, where nothing is left out.
        labels: names of the classes of a model with a score head; empty for models that generate.
        details: what only the family's own code reads, a frozen dataclass of the family.
        generation_defaults: sampling defaults of generation_config.json.
    """

    architecture: str
    model_type: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    context_length: int
    rms_norm_eps: float
    rope: RopeParameters
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    query_key_norm: bool
    sliding_windows: tuple[int | None, ...]
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    pad_token_id: int | None
    dtype: str | None
    kv: KVDescription
    recurrent: RecurrentDescription | None = None
    quantization: QuantizationDescription | None = None
    is_wrapped: bool = False
    selected_keys: int | None = None
    labels: tuple[str, ...] = ()
    details: object | None = None
    generation_defaults: Mapping[str, float] = field(default_factory=dict)

    @property
    def sliding_window(self) -> int | None:
        """The widest window when every layer has one, else None: how far back a token can still matter."""
        windows = [window for window in self.sliding_windows if window is not None]
        return max(windows) if windows and len(windows) == self.num_layers else None
