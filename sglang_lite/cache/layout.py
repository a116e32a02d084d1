"""Where the bytes of a token stand in a page-major KV pool.

The pool is one allocation, ordered page, layer, tensor, token: all layers of one page are one span, which a transfer
can register and send as a whole. Slot ``s`` of the pool is token ``s % page_size`` of page ``s // page_size``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from sglang_lite.types import Int64Array

KEY: Final = 0
VALUE: Final = 1

_DTYPE_BYTES: Final = {
    "auto": 2,
    "bfloat16": 2,
    "bf16": 2,
    "float16": 2,
    "half": 2,
    "float32": 4,
    "float": 4,
    "fp8_e5m2": 1,
    "fp8_e4m3": 1,
}
_PACKED_GROUP: Final = 64


class KVLayoutError(ValueError):
    """Sizes of a KV layout that contradict each other."""


class KVCoordinateError(IndexError):
    """A page, layer, tensor, token or slot outside the pool."""


class KVStorageError(ValueError):
    """A KV allocation whose size is not that of its pages."""


class KVDtypeError(ValueError):
    """A KV dtype without a fixed width, or an unknown one."""


def kv_dtype_bytes(dtype: str) -> int:
    """Bytes of one element of a KV cache dtype, as ``--kv-cache-dtype`` names it; ``auto`` means bfloat16.

    Raises:
        KVDtypeError: the dtype is unknown, or four-bit (its scales depend on the model).
    """
    if dtype.startswith("fp4"):
        raise KVDtypeError(f"KV dtype {dtype!r} needs the model's block scales to be sized; choose bfloat16 or fp8")
    if dtype not in _DTYPE_BYTES:
        raise KVDtypeError(f"KV dtype {dtype!r} is unknown; allowed are {', '.join(sorted(_DTYPE_BYTES))}")
    return _DTYPE_BYTES[dtype]


def packed_latent_token_bytes(nope_dim: int, rope_dim: int) -> int:
    """Bytes of one token of a packed latent row: 8-bit latent, 16-bit rotary part, a scale byte per 64, one more.

    Args:
        nope_dim: latent width, divisible by 64.
        rope_dim: rotary width.
    """
    if nope_dim < 1 or rope_dim < 1 or nope_dim % _PACKED_GROUP:
        raise KVLayoutError(
            f"packed latent row of {nope_dim} + {rope_dim} elements: both must be positive and the first divisible "
            f"by {_PACKED_GROUP}"
        )
    return nope_dim + 2 * rope_dim + nope_dim // _PACKED_GROUP + 1


@dataclass(frozen=True, slots=True)
class KVPageLayout:
    """Offsets in bytes within a pool of pages.

    Attributes:
        page_size: tokens per page.
        num_layers: layers that keep KV.
        tensor_token_bytes: bytes of one token of one layer in each tensor: (key, value), or one number where the
            layer stores a single row. Key and value may differ in width.
    """

    page_size: int
    num_layers: int
    tensor_token_bytes: tuple[int, ...]

    def __post_init__(self) -> None:
        fields = {"page_size": self.page_size, "num_layers": self.num_layers}
        fields |= {f"tensor_token_bytes[{index}]": width for index, width in enumerate(self.tensor_token_bytes)}
        for name, value in fields.items():
            if value < 1:
                raise KVLayoutError(f"KV layout: {name} is {value}; it must be at least 1")
        if len(self.tensor_token_bytes) not in (1, 2):
            raise KVLayoutError(f"KV layout: {len(self.tensor_token_bytes)} tensors per layer; allowed are 1 and 2")

    @classmethod
    def for_heads(
        cls, *, page_size: int, num_layers: int, num_kv_heads: int, head_dim: int, element_bytes: int
    ) -> KVPageLayout:
        """Layout of ordinary attention: a key and a value row of ``num_kv_heads * head_dim`` elements per token."""
        width = num_kv_heads * head_dim * element_bytes
        return cls(page_size, num_layers, (width, width))

    @classmethod
    def for_latent(
        cls, *, page_size: int, num_layers: int, kv_lora_rank: int, rope_dim: int, element_bytes: int
    ) -> KVPageLayout:
        """Layout of latent attention (MLA) kept as a pair: latent and rotary part as key, the latent as value."""
        return cls(page_size, num_layers, ((kv_lora_rank + rope_dim) * element_bytes, kv_lora_rank * element_bytes))

    @classmethod
    def from_totals(
        cls,
        *,
        page_size: int,
        page_bytes: int,
        bytes_per_token: int,
        num_layers: int,
        num_tensors: int = 2,
        pair: tuple[int, int] | None = None,
    ) -> KVPageLayout:
        """Layout from the totals that another server announces, all of which must agree.

        Args:
            page_size: tokens per page.
            page_bytes: bytes of a page over all layers.
            bytes_per_token: bytes of a token over all layers.
            num_layers: layers that keep KV.
            num_tensors: tensors of equal width per layer, unless ``pair`` is given.
            pair: bytes of a token of one layer as (key, value), where they differ.

        Raises:
            KVLayoutError: a field is zero, or two of them contradict each other.
        """
        fields = {
            "page_size": page_size,
            "page_bytes": page_bytes,
            "bytes_per_token": bytes_per_token,
            "num_layers": num_layers,
            "num_tensors": num_tensors,
        }
        for name, value in fields.items():
            if value < 1:
                raise KVLayoutError(f"KV layout: {name} is {value}; it must be at least 1")
        if page_bytes != page_size * bytes_per_token:
            raise KVLayoutError(
                f"KV layout: page_bytes is {page_bytes}, but {page_size} tokens of {bytes_per_token} bytes are "
                f"{page_size * bytes_per_token}"
            )
        layer_bytes, rest = divmod(bytes_per_token, num_layers)
        if rest:
            raise KVLayoutError(f"KV layout: bytes_per_token {bytes_per_token} is no multiple of {num_layers} layers")
        if pair is not None:
            if sum(pair) != layer_bytes:
                raise KVLayoutError(
                    f"KV layout: key and value of {pair[0]} and {pair[1]} bytes do not add up to the {layer_bytes} "
                    "bytes of a token of one layer"
                )
            return cls(page_size, num_layers, pair)
        width, rest = divmod(layer_bytes, num_tensors)
        if rest:
            raise KVLayoutError(f"KV layout: {layer_bytes} bytes per layer are no multiple of {num_tensors} tensors")
        return cls(page_size, num_layers, (width,) * num_tensors)

    @property
    def layer_token_bytes(self) -> int:
        """Bytes of a token in one layer."""
        return sum(self.tensor_token_bytes)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a token over all layers."""
        return self.num_layers * self.layer_token_bytes

    @property
    def layer_page_bytes(self) -> int:
        """Bytes of a page in one layer."""
        return self.page_size * self.layer_token_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of a page over all layers."""
        return self.page_size * self.bytes_per_token

    def tensor_page_bytes(self, tensor: int) -> int:
        """Bytes of a page of one tensor of one layer."""
        self._check("tensor", tensor, len(self.tensor_token_bytes))
        return self.page_size * self.tensor_token_bytes[tensor]

    def offset(self, page: int, layer: int, tensor: int, token: int, *, num_pages: int | None = None) -> int:
        """First byte of one token of one tensor of one layer, counted from the start of the pool.

        Args:
            page: page index; below ``num_pages`` where that is given.
            layer: layer index, among those that keep KV.
            tensor: ``KEY`` or ``VALUE``.
            token: offset within the page.

        Raises:
            KVCoordinateError: an index is out of range.
        """
        self._check("page", page, num_pages)
        self._check("layer", layer, self.num_layers)
        self._check("tensor", tensor, len(self.tensor_token_bytes))
        self._check("token", token, self.page_size)
        tensor_offset = self.page_size * sum(self.tensor_token_bytes[:tensor])
        return (
            page * self.page_bytes
            + layer * self.layer_page_bytes
            + tensor_offset
            + token * self.tensor_token_bytes[tensor]
        )

    def span(self, slot: int, layer: int, tensor: int, *, num_pages: int | None = None) -> tuple[int, int]:
        """Bytes [start, stop) of a slot's row in one tensor of one layer."""
        self._check("slot", slot, None if num_pages is None else num_pages * self.page_size)
        start = self.offset(slot // self.page_size, layer, tensor, slot % self.page_size, num_pages=num_pages)
        return start, start + self.tensor_token_bytes[tensor]

    def page_span(self, page: int, *, num_pages: int | None = None) -> tuple[int, int]:
        """Bytes [start, stop) of a whole page, all layers."""
        self._check("page", page, num_pages)
        return page * self.page_bytes, (page + 1) * self.page_bytes

    def check_slot_mapping(self, slot_mapping: Int64Array, num_pages: int) -> None:
        """Refuse slots outside a pool of ``num_pages`` pages.

        Args:
            slot_mapping: int64[num_tokens], at least one.

        Raises:
            KVCoordinateError: there is no slot, or one is out of range (the error names its place in the batch).
        """
        if not len(slot_mapping):
            raise KVCoordinateError("KV layout: the slot mapping is empty")
        capacity = num_pages * self.page_size
        outside = np.flatnonzero((slot_mapping < 0) | (slot_mapping >= capacity))
        if len(outside):
            index = int(outside[0])
            raise KVCoordinateError(
                f"KV layout: slot {int(slot_mapping[index])} at batch index {index} is outside the pool of "
                f"{capacity} slots"
            )

    def check_storage(self, num_bytes: int, num_pages: int) -> None:
        """Refuse an allocation that is not exactly ``num_pages`` pages large."""
        if num_bytes != num_pages * self.page_bytes:
            raise KVStorageError(
                f"KV layout: the storage has {num_bytes} bytes, but {num_pages} pages of {self.page_bytes} bytes are "
                f"{num_pages * self.page_bytes}"
            )

    @staticmethod
    def _check(name: str, value: int, limit: int | None) -> None:
        if value < 0 or (limit is not None and value >= limit):
            allowed = "at least 0" if limit is None else f"0 to {limit - 1}"
            raise KVCoordinateError(f"KV layout: {name} is {value}; allowed is {allowed}")


def pages_for_slots(num_slots: int, page_size: int) -> int:
    """Pages of a pool of ``num_slots`` slots, which must fill them.

    Raises:
        KVLayoutError: a number is below 1 or the slots do not fill whole pages.
    """
    if num_slots < 1 or page_size < 1 or num_slots % page_size:
        raise KVLayoutError(
            f"a pool of {num_slots} slots in pages of {page_size}: both must be positive and the first a multiple of "
            "the second"
        )
    return num_slots // page_size
