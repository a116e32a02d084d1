"""The part of a model that one rank of a tensor parallel group holds, as a description. Free of torch.

A rank's model is wired like a whole one with fewer heads and a narrower feed-forward block; only the loader knows that
the matrices are parts (``linear_loader``), and that results have to be added up.
"""

from __future__ import annotations

import dataclasses

from sglang_lite.models.hybrid_config import HybridDetails
from sglang_lite.models.model_description import ModelDescription
from sglang_lite.models.moe_config import MoEDescription
from sglang_lite.types import StartupError


def check_expert_parallel(description: ModelDescription, parts: int) -> None:
    """Check that the routed experts of a model can be split into that many parts.

    Raises:
        StartupError: there are no experts, or their number does not divide.
    """
    if parts == 1:
        return
    details = description.details
    moe = details if isinstance(details, MoEDescription) else getattr(details, "moe", None)
    if not isinstance(moe, MoEDescription):
        raise StartupError(
            f"--ep-size {parts}: {description.architecture} has no experts to split; leave the option out"
        )
    if moe.num_experts % parts:
        raise StartupError(
            f"--ep-size {parts} does not divide the {moe.num_experts} experts of {description.architecture}"
        )


def check_tensor_parallel(description: ModelDescription, size: int) -> None:
    """Check that the heads and the feed-forward block of a model can be split.

    Query heads, the key heads of linear attention and the feed-forward width must divide by the size; key/value heads
    too, or, when there are fewer of them than ranks, the size must divide by them (neighbouring ranks then hold the
    same head).

    Raises:
        StartupError: names the extent, its value and the size.
    """
    problems = []
    if description.num_heads % size:
        problems.append(f"num_attention_heads {description.num_heads}")
    heads = description.kv.num_kv_heads
    if description.kv.num_tensors > 1 and heads % size and size % heads:
        problems.append(f"num_key_value_heads {heads}")
    if isinstance(description.details, HybridDetails) and description.details.delta.num_key_heads % size:
        problems.append(f"the {description.details.delta.num_key_heads} key heads of linear attention")
    if description.intermediate_size % size:
        problems.append(f"intermediate_size {description.intermediate_size}")
    if problems:
        raise StartupError(
            f"--tp-size {size} does not divide {', '.join(problems)} of {description.architecture}; "
            f"choose a size that does"
        )


def share_of(description: ModelDescription, size: int) -> ModelDescription:
    """The description of one rank's part; all parts look alike.

    The result's ``kv.total_heads`` still tells the heads of the whole model. What ``details`` says is left as it is:
    a family that splits more than heads and ``intermediate_size`` does so where it is wired.

    Raises:
        StartupError: see ``check_tensor_parallel``.
    """
    if size == 1:
        return description
    check_tensor_parallel(description, size)
    kv = description.kv
    if kv.num_tensors > 1:  # a latent row is every head's, so every rank keeps it
        kv = dataclasses.replace(kv, num_kv_heads=max(1, kv.num_kv_heads // size), total_heads=kv.num_kv_heads)
    recurrent = description.recurrent
    if recurrent is not None:
        recurrent = dataclasses.replace(
            recurrent, conv_channels=recurrent.conv_channels // size, num_heads=recurrent.num_heads // size
        )
    return dataclasses.replace(
        description,
        recurrent=recurrent,
        num_heads=description.num_heads // size,
        num_kv_heads=max(1, description.num_kv_heads // size),
        intermediate_size=description.intermediate_size // size,
        kv=kv,
    )
