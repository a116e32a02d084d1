"""Which low-rank adapters a server takes: from the options and the adapters named at the start. Free of torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sglang_lite.config import ServerConfig
from sglang_lite.models.adapter_config import read_adapter_config
from sglang_lite.models.family import Shapes
from sglang_lite.types import StartupError

ALL_MODULES = "all"
"""Value of ``--lora-target-modules`` that stands for every projection."""

MAX_NAME_LENGTH = 256
"""Characters of an adapter's name."""

_FLAG = "--lora-paths"

_MOST_MERGED = 3
"""Projections in one layer at most (query, key, value): its matrices have the ranks of all."""

_MERGED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Names of merged projections -> the projections of the checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedAdapter:
    """An adapter by the name that requests use."""

    name: str
    path: str
    pinned: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSettings:
    """Room for adapters.

    Attributes:
        num_slots: adapters that can be loaded at a time; a batch may mix all of them.
        max_rank: the largest rank.
        target_modules: last parts of the names of the projections that may be adapted; None for all.
        adapters: loaded at the start, into the first slots in this order.
    """

    num_slots: int
    max_rank: int
    target_modules: frozenset[str] | None
    adapters: tuple[NamedAdapter, ...]


def is_adapter_name(name: str) -> bool:
    """Whether an adapter may be called so: a colon separates the model's name from an adapter's."""
    return 1 <= len(name) <= MAX_NAME_LENGTH and ":" not in name


def adapter_settings(config: ServerConfig) -> AdapterSettings | None:
    """What the options ask for; None without ``--enable-lora`` and ``--lora-paths``.

    Raises:
        StartupError: options that do not fit together, or an adapter that cannot be read.
    """
    if not config.enable_lora and not config.lora_paths:
        return None
    adapters = parse_adapters(config.lora_paths or [])
    num_slots = config.max_loaded_loras or config.max_loras_per_batch
    if num_slots < config.max_loras_per_batch:
        raise StartupError(
            f"--max-loaded-loras {num_slots} must not be smaller than --max-loras-per-batch "
            f"{config.max_loras_per_batch}"
        )
    if len(adapters) > num_slots:
        raise StartupError(
            f"{_FLAG} names {len(adapters)} adapters, but only {num_slots} can be loaded at a time; "
            f"raise --max-loaded-loras (or --max-loras-per-batch)"
        )
    found = [read_adapter_config(Path(adapter.path)) for adapter in adapters]
    max_rank = config.max_lora_rank or max((adapter.max_rank for adapter in found), default=None)
    targets = _targets(config.lora_target_modules)
    if targets is None:
        named = [adapter.target_modules for adapter in found]
        if any(modules is None for modules in named):
            raise StartupError(
                f"{_FLAG}: an adapter does not list its target_modules; name them with --lora-target-modules"
            )
        targets = frozenset[str]().union(*(modules for modules in named if modules is not None)) or None
    if max_rank is None or targets is None:
        raise StartupError(
            "--enable-lora without --lora-paths needs --max-lora-rank and --lora-target-modules: "
            "there is no adapter to take them from"
        )
    for adapter, config_of in zip(adapters, found, strict=True):
        if config_of.max_rank > max_rank:
            raise StartupError(
                f"{_FLAG}: adapter {adapter.name!r} has rank {config_of.max_rank}, over --max-lora-rank {max_rank}"
            )
    everything = ALL_MODULES in targets
    return AdapterSettings(
        num_slots=num_slots,
        max_rank=max_rank,
        target_modules=None if everything else targets,
        adapters=adapters,
    )


def adapter_bytes(settings: AdapterSettings, shapes: Shapes, item_bytes: int) -> int:
    """Memory of the slots of a model with these tensors, at most."""
    elements = 0
    for name, shape in shapes.items():
        module = name.removesuffix(".weight").rpartition(".")[2]
        is_adapted = len(shape) == 2 and ".experts." not in name and "embed_tokens" not in name
        if is_adapted and (settings.target_modules is None or module in settings.target_modules):
            out, inputs = shape
            elements += inputs + _MOST_MERGED * out
    return settings.num_slots * settings.max_rank * elements * item_bytes


def parse_adapters(items: Sequence[str]) -> tuple[NamedAdapter, ...]:
    """The items of ``--lora-paths``: ``PATH``, ``NAME=PATH``, or a JSON object with lora_name and lora_path.

    Raises:
        StartupError: an item is none of these, or a name comes twice.
    """
    adapters: list[NamedAdapter] = []
    for item in items:
        adapter = _parse(item.strip())
        if any(other.name == adapter.name for other in adapters):
            raise StartupError(f"{_FLAG}: the name {adapter.name!r} comes twice")
        adapters.append(adapter)
    return tuple(adapters)


def _parse(item: str) -> NamedAdapter:
    if not item.startswith("{"):
        name, separator, path = item.partition("=")
        adapter = NamedAdapter(name=name, path=path) if separator else NamedAdapter(name=item, path=item)
    else:
        try:
            value = json.loads(item)
        except ValueError as error:
            raise StartupError(f"{_FLAG}: {item!r} is not a JSON object: {error}") from error
        name, path, pinned = (value.get(key) for key in ("lora_name", "lora_path", "pinned"))
        if not isinstance(name, str) or not isinstance(path, str) or not isinstance(pinned, bool | None):
            raise StartupError(
                f"{_FLAG}: {item!r} must hold the texts lora_name and lora_path and may hold pinned (true or false)"
            )
        adapter = NamedAdapter(name=name, path=path, pinned=bool(pinned))
    if not adapter.name or not adapter.path:
        raise StartupError(f"{_FLAG}: {item!r} must be PATH, NAME=PATH, or a JSON object with lora_name and lora_path")
    if not is_adapter_name(adapter.name):
        raise StartupError(
            f"{_FLAG}: the name {adapter.name!r} must have 1 to {MAX_NAME_LENGTH} characters and no ':'; "
            f"give another one as NAME=PATH"
        )
    return adapter


def _targets(names: Sequence[str] | None) -> frozenset[str] | None:
    """The projections that ``--lora-target-modules`` names; None when it names none."""
    if not names:
        return None
    return frozenset(part for name in names for part in _MERGED.get(name, (name,)))
