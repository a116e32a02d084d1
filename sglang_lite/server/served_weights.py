"""What the front knows of the weights that are served: where they come from and what they are called."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_lite.models.stored_values import Stamp


@dataclass(slots=True, frozen=True)
class ServedWeights:
    """The weights of an engine.

    Attributes:
        path: directory of the checkpoint.
        version: name that operators give them; every answer carries it.
        stamp: of the files when they were loaded.
    """

    path: str
    version: str
    stamp: Stamp
