"""Whatever a step is made of, latent attention on the host gives what the plain form gives."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_lite.adapters.cpu import latent_attention, latent_plan
from tests.unit.adapters.test_cpu_latent import World

pasts = st.integers(0, 40)


@settings(max_examples=60, deadline=None)
@given(
    page_size=st.sampled_from([1, 3, 4, 16]),
    latent=st.sampled_from([4, 16, 48]),
    index=st.sampled_from([0, 8]),
    top_k=st.integers(1, 45),
    decode=st.lists(st.integers(1, 40), max_size=6),
    chunks=st.lists(st.tuples(pasts, st.integers(1, 12)), max_size=3),
    tile_bytes=st.sampled_from([1, 3000, 1 << 20]),
    mask_elements=st.sampled_from([1, 100, 1 << 20]),
    expanded_elements=st.sampled_from([1, 5000, 1 << 20]),
)
def test_any_step_equals_the_plain_form(
    page_size: int,
    latent: int,
    index: int,
    top_k: int,
    decode: list[int],
    chunks: list[tuple[int, int]],
    tile_bytes: int,
    mask_elements: int,
    expanded_elements: int,
) -> None:
    if not decode and not chunks:
        return
    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        patch.setattr(latent_plan, "TILE_BYTES", tile_bytes)
        patch.setattr(latent_attention, "_MASK_ELEMENTS", mask_elements)
        patch.setattr(latent_attention, "_EXPANDED_ELEMENTS", expanded_elements)
        world = World(page_size, latent=latent, index=index, top_k=top_k, num_pages=1024)
        world.check(world.step(decode, chunks), tolerance=2e-5)
