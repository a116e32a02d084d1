"""What models with recurrent layers rule out, and how many requests their states leave room for. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_lite.config import ServerConfig
from sglang_lite.models.model_description import ModelDescription, RecurrentDescription
from sglang_lite.types import StartupError

STATE_SHARE = 0.5
"""Most of the memory beside the weights that states get when ``--max-running-requests`` leaves their number open."""


@dataclass(frozen=True, slots=True)
class RowBudget:
    """Rows of the request table, and the memory of their states.

    Attributes:
        num_rows: requests that run at a time.
        row_bytes: state of one of them; 0 without recurrent layers.
    """

    num_rows: int
    row_bytes: int

    @property
    def state_bytes(self) -> int:
        """Memory of all states."""
        return self.num_rows * self.row_bytes


def check_recurrent_options(config: ServerConfig, description: ModelDescription) -> None:
    """Refuse what a state that belongs to a request cannot take part in.

    Raises:
        StartupError: names the option and the reason.
    """
    if description.recurrent is None:
        return
    if config.is_disaggregated:
        raise StartupError(
            f"--disaggregation-mode {config.disaggregation_mode}: {description.architecture} has recurrent layers, and "
            f"recurrent state registration and transfer are missing; KV-only transfer is insufficient. Serve prefill "
            f"and decode in one server (--disaggregation-mode null)"
        )


def without_prefix_cache(config: ServerConfig, description: ModelDescription) -> ServerConfig:
    """The configuration with the prefix cache off for a model with recurrent layers.

    Pages hold the KV of a prefix, but going on from it takes the states behind it as well, which nothing keeps.
    """
    if description.recurrent is None or config.disable_radix_cache:
        return config
    return config.resolved(disable_radix_cache=True)


def plan_rows(
    config: ServerConfig,
    recurrent: RecurrentDescription | None,
    *,
    activation_bytes: int,
    available_bytes: int,
    default_rows: int,
) -> RowBudget:
    """Rows of the request table: ``--max-running-requests``, else the default as far as there is memory for states.

    Args:
        activation_bytes: of one element of the activations.
        available_bytes: memory beside the weights, for states and KV.
        default_rows: when the option is not set.

    Raises:
        StartupError: the states asked for, or those of a single request, do not fit.
    """
    asked = config.max_running_requests
    if recurrent is None:
        return RowBudget(asked or default_rows, 0)
    row_bytes = recurrent.row_bytes(activation_bytes)
    most = int(available_bytes * STATE_SHARE) // row_bytes
    if asked is not None and asked * row_bytes <= available_bytes:
        return RowBudget(asked, row_bytes)
    if asked is not None or most < 1:
        raise StartupError(
            f"the recurrent state of one request takes {row_bytes / 2**20:.1f} MiB; the {available_bytes / 2**20:.0f} "
            f"MiB of memory beside the weights do not hold that of {asked or 1} (--max-running-requests). Free memory, "
            f"or lower --max-running-requests to at most {max(most, 1)}"
        )
    return RowBudget(min(default_rows, most), row_bytes)
