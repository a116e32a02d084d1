"""Heads of a delta-rule layer, free of torch so that a configuration can be read without it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaShape:
    """Extents of a delta-rule layer; consecutive value heads share a key head.

    Attributes:
        num_key_heads, num_value_heads: Hk and Hv; Hk divides Hv.
        key_dim, value_dim: dk and dv, elements of one head.
        conv_kernel: taps of the convolution in front.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int

    @property
    def key_width(self) -> int:
        """Elements of all key heads."""
        return self.num_key_heads * self.key_dim

    @property
    def value_width(self) -> int:
        """Elements of all value heads."""
        return self.num_value_heads * self.value_dim

    @property
    def conv_channels(self) -> int:
        """Channels of the convolution: query, key and value."""
        return 2 * self.key_width + self.value_width

    def share(self, parts: int) -> DeltaShape:
        """The shape of one of ``parts`` equal parts; they must divide the key heads."""
        return replace(self, num_key_heads=self.num_key_heads // parts, num_value_heads=self.num_value_heads // parts)

    def channel_spans(self, index: int, parts: int) -> list[tuple[int, int]]:
        """(start, stop) of the channels of query, key and value that belong to part ``index`` of ``parts``."""
        spans, start = [], 0
        for width in (self.key_width, self.key_width, self.value_width):
            part = width // parts
            spans.append((start + index * part, start + (index + 1) * part))
            start += width
        return spans

    def split_heads(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[T, conv_channels] -> query and key [T, Hk, dk], value [T, Hv, dv], views."""
        query, key, value = mixed.split_with_sizes([self.key_width, self.key_width, self.value_width], -1)
        return (
            query.view(-1, self.num_key_heads, self.key_dim),
            key.view(-1, self.num_key_heads, self.key_dim),
            value.view(-1, self.num_value_heads, self.value_dim),
        )
