"""One exposition text out of those of several processes that serve the same engine."""

from __future__ import annotations

from collections.abc import Sequence

_SHARED_LABELS = ('tp_rank="', 'component="scheduler"')
"""Samples of the one engine core, which every process reports alike: they are taken once."""


def merge_metrics(texts: Sequence[bytes]) -> bytes:
    """Add up the samples of equal name and labels, except those of the engine core; format 0.0.4 in and out.

    Args:
        texts: one of every process; families and samples keep the order in which they first appear.
    """
    families: dict[str, tuple[list[str], dict[str, float]]] = {}
    for text in texts:
        family: tuple[list[str], dict[str, float]] | None = None
        first = False
        for line in text.decode().splitlines():
            if line.startswith("# HELP "):
                name = line.split(" ", 3)[2]
                first = name not in families
                family = families.setdefault(name, ([], {}))
            if family is None or not line:
                continue
            if line.startswith("#"):
                if first:
                    family[0].append(line)
                continue
            key, _, value = line.rpartition(" ")
            _add(family[1], key, float(value))
    lines = []
    for header, samples in families.values():
        lines += [*header, *(f"{key} {value!r}" for key, value in samples.items())]
    return "\n".join([*lines, ""]).encode()


def _add(samples: dict[str, float], key: str, value: float) -> None:
    if key not in samples:
        samples[key] = value
    elif not any(label in key for label in _SHARED_LABELS):
        samples[key] += value
