"""Where the ranks of a replica run: which node, and which device there. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_lite.config import ServerConfig
from sglang_lite.types import StartupError


@dataclass(frozen=True, slots=True)
class Placement:
    """The ranks of one node.

    Attributes:
        size: ranks of the whole replica.
        nodes: machines they are spread over, evenly and in order.
        node: this one, from 0; rank 0 runs on node 0.
        first_device, device_step: ordinals of the devices of a node's ranks.
    """

    size: int
    nodes: int = 1
    node: int = 0
    first_device: int = 0
    device_step: int = 1

    @property
    def ranks_per_node(self) -> int:
        """``nodes`` divides ``size``, which the start-up checks."""
        return self.size // self.nodes

    @property
    def local_ranks(self) -> range:
        """The ranks that run on this node."""
        return range(self.node * self.ranks_per_node, (self.node + 1) * self.ranks_per_node)

    def is_local(self, rank: int) -> bool:
        """Whether a rank runs on this node."""
        return rank in self.local_ranks

    def device_of(self, rank: int) -> int:
        """Device ordinal of a rank, on its own node."""
        return self.first_device + rank % self.ranks_per_node * self.device_step


def placement_of(config: ServerConfig) -> Placement:
    """The placement that a configuration asks for."""
    return Placement(
        size=config.tp_size,
        nodes=config.nnodes,
        node=config.node_rank,
        first_device=config.base_gpu_id,
        device_step=config.gpu_id_step,
    )


def split_address(address: str | None) -> tuple[str, int]:
    """Host and port of ``--dist-init-addr``.

    Raises:
        StartupError: it is missing or not host:port.
    """
    host, _, port = (address or "").rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise StartupError(
            f"--dist-init-addr {address}: several nodes need host:port of rank 0, the same on every node "
            f"(for example 10.0.0.1:20000)"
        )
    return host.strip("[]"), int(port)
