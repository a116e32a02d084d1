"""What a rank's process is told when it starts, and where the ranks of a replica find each other."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import msgspec
from torch._C._distributed_c10d import FileStore, Store, TCPStore

from sglang_lite.config import ServerConfig
from sglang_lite.execution.placement import split_address
from sglang_lite.execution.torch_group import JOIN_SECONDS
from sglang_lite.types import StartupError

RANK_COMMAND = (sys.executable, "-m", "sglang_lite.execution.rank_process")

END_SECONDS = 5.0
"""How long a rank may take to end when it is told to."""

_COMMON_OPTIONS = (
    "context_length",
    "device",
    "dtype",
    "ep_size",
    "json_model_override_args",
    "kv_cache_dtype",
    "max_running_requests",
    "nnodes",
    "page_size",
    "tp_size",
)
"""Options that all ranks must have alike."""


class RankLaunch(msgspec.Struct, frozen=True, kw_only=True):
    """One line of JSON on the standard input of a rank's process, which then stays open as long as its parent lives.

    Attributes:
        config: the server configuration as JSON.
        rank: of the process in the replica.
        directory: private directory of the node's sockets, removed by whoever ends last.
    """

    config: str
    rank: int
    directory: str


def start_rank(launch: RankLaunch) -> subprocess.Popen[bytes]:
    """Start the process of a rank on this machine."""
    process = subprocess.Popen(RANK_COMMAND, stdin=subprocess.PIPE)
    if process.stdin is not None:
        try:
            process.stdin.write(msgspec.json.encode(launch) + b"\n")
            process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended already; whoever watches it learns that from its exit
    return process


def end_rank(process: subprocess.Popen[bytes], *, grace: float) -> None:
    """Wait for a rank, and end it when it does not by itself: the end of its input says so to it."""
    try:
        process.wait(grace)
    except subprocess.TimeoutExpired:
        if process.stdin is not None:
            process.stdin.close()
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    if process.stdin is not None:
        process.stdin.close()


def open_store(config: ServerConfig, directory: str, *, is_leader: bool) -> Store:
    """Where the ranks meet: a file in ``directory``, or with several nodes a server at ``--dist-init-addr`` on rank 0.

    Raises:
        StartupError: the address cannot be bound or reached.
    """
    if config.nnodes == 1:
        return FileStore(os.path.join(directory, "store"), config.tp_size)
    host, port = split_address(config.dist_init_addr)
    try:
        return TCPStore(
            host,
            port,
            is_master=is_leader,
            wait_for_workers=False,
            timeout=timedelta(seconds=JOIN_SECONDS),
        )
    except (RuntimeError, ValueError) as error:
        what = "bind" if is_leader else "reach rank 0 at"
        raise StartupError(f"--dist-init-addr {config.dist_init_addr}: cannot {what} this address: {error}") from error


def fingerprint(config: ServerConfig) -> str:
    """Equal on two ranks only when they serve the same model with the same options."""
    options = config.model_dump(mode="json", include=set(_COMMON_OPTIONS))
    digest = hashlib.sha256(json.dumps(options, sort_keys=True).encode())
    digest.update((Path(config.model_path or "") / "config.json").read_bytes())
    return digest.hexdigest()
