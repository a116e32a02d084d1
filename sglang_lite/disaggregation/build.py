"""The session worker of a rank as the configuration of its server says, and the address that peers reach it at."""

from __future__ import annotations

import os
import socket

from sglang_lite.config import ServerConfig
from sglang_lite.configuration import values
from sglang_lite.disaggregation.decode_sessions import DecodeWorker
from sglang_lite.disaggregation.options import SessionOptions
from sglang_lite.disaggregation.pool_memory import PoolMemory
from sglang_lite.disaggregation.prefill_sessions import PrefillWorker
from sglang_lite.disaggregation.ranked_sessions import RankChannel, RankedDecodeSessions, RankedPrefillSessions
from sglang_lite.disaggregation.worker import Place
from sglang_lite.transfer.base import TransferError
from sglang_lite.transfer.factory import open_transport
from sglang_lite.types import StartupError

HOST_VARIABLE = "SGLANG_HOST_IP"
"""Environment variable with the address that peers reach this machine at, where ``--host`` does not say it."""

_ANY_HOST = ("", "0.0.0.0", "::")


def open_worker(config: ServerConfig, memory: PoolMemory | None, rank: int = 0) -> PrefillWorker | DecodeWorker:
    """Open the transport of a tensor-parallel rank and make its worker, which is not started.

    Args:
        memory: its pool; None where that cannot be transferred.

    Raises:
        StartupError: the pool cannot be transferred, or the transport or a port cannot be had.
    """
    if memory is None:
        raise StartupError(
            f"--disaggregation-mode {config.disaggregation_mode}: the KV pool of this model on --device "
            f"{config.device} cannot be transferred; leave the option out"
        )
    ports = config.disaggregation_zmq_ports
    numbers = None if ports is None else values.ports_of(ports)
    # The ranks of another node have an address of their own.
    host = advertised_host(config.host if config.node_rank == 0 else "")
    engine_port = config.disaggregation_mooncake_rpc_port
    try:
        options = session_options(config)
        place = Place(
            host,
            None if numbers is None else (numbers[0], numbers[-1]),
            tp_rank=rank,
            tp_size=config.tp_size,
            dp_rank=config.replica,
            dp_size=config.dp_size,
            kv_replicated=memory.heads is None,
        )
        transport = open_transport(
            config.disaggregation_transfer_backend,
            host=host,
            devices=config.disaggregation_ib_device or "",
            port=engine_port + config.replica * config.tp_size + rank if engine_port else 0,
        )
        if config.disaggregation_mode == "decode":
            return DecodeWorker(place, memory, transport, options)
        server = host if config.node_rank == 0 else (config.dist_init_addr or "").rpartition(":")[0].strip("[]")
        bootstrap = (server, config.disaggregation_bootstrap_port)
        balance = config.load_balance_method
        return PrefillWorker(place, memory, transport, options, bootstrap, config.port or None, balance)
    except (OSError, TransferError, ValueError) as error:
        raise StartupError(f"--disaggregation-mode {config.disaggregation_mode}: {error}") from error


def start_prefill(worker: PrefillWorker, ranks: RankChannel | None) -> PrefillWorker | RankedPrefillSessions:
    """The sessions of a prefill server's core, started.

    Args:
        worker: of rank 0.
        ranks: the way to the others; None without any.
    """
    sessions = worker if ranks is None else RankedPrefillSessions(worker, ranks)
    sessions.start()
    return sessions


def start_decode(worker: DecodeWorker, ranks: RankChannel | None) -> DecodeWorker | RankedDecodeSessions:
    """The sessions of a decode server's core, started; see ``start_prefill``."""
    sessions = worker if ranks is None else RankedDecodeSessions(worker, ranks)
    sessions.start()
    return sessions


def session_options(config: ServerConfig) -> SessionOptions:
    """How long sessions wait, from the environment, and whether they check bytes.

    Raises:
        ValueError: a variable has a wrong value.
    """
    return SessionOptions.from_environment(os.environ, verify_checksums=config.disaggregation_verify_checksums)


def advertised_host(host: str) -> str:
    """The address that peers reach this server at: ``--host``, or the machine's own where that is any address."""
    named = os.environ.get(HOST_VARIABLE, "").strip()
    if named:
        return named
    if host not in _ANY_HOST:
        return host
    family = socket.AF_INET6 if host == "::" else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            # Connecting a datagram socket sends nothing; it only asks the routing table for the way out.
            probe.connect(("2001:db8::1" if family == socket.AF_INET6 else "192.0.2.1", 9))
            return str(probe.getsockname()[0])
        except OSError:
            return "::1" if family == socket.AF_INET6 else "127.0.0.1"
