"""The role of a core under prefill/decode disaggregation: its transport, its sessions and what it asks of them."""

from __future__ import annotations

import os
import socket

from sglang_lite.config import ServerConfig
from sglang_lite.configuration import values
from sglang_lite.disaggregation.decode_sessions import DecodeWorker
from sglang_lite.disaggregation.options import SessionOptions
from sglang_lite.disaggregation.prefill_sessions import PrefillWorker
from sglang_lite.disaggregation.worker import Place
from sglang_lite.engine.decode_role import DecodeRole
from sglang_lite.engine.parts import CoreParts
from sglang_lite.engine.prefill_role import PrefillRole
from sglang_lite.transfer.base import TransferError
from sglang_lite.transfer.factory import open_transport
from sglang_lite.types import StartupError

HOST_VARIABLE = "SGLANG_HOST_IP"
"""Environment variable with the address that peers reach this machine at, where ``--host`` does not say it."""

_ANY_HOST = ("", "0.0.0.0", "::")


def make_role(config: ServerConfig, parts: CoreParts) -> PrefillRole | DecodeRole:
    """Open the transport, start the sessions and make the role; ``Role.close`` ends all of it.

    Raises:
        StartupError: the pool cannot be transferred, or the transport or a port cannot be had.
    """
    memory = parts.memory
    if memory is None:
        raise StartupError(
            f"--disaggregation-mode {config.disaggregation_mode}: the KV pool of this model on --device "
            f"{config.device} cannot be transferred; leave the option out"
        )
    host, backend = advertised_host(config.host), config.disaggregation_transfer_backend
    ports = config.disaggregation_zmq_ports
    numbers = None if ports is None else values.ports_of(ports)
    try:
        options = session_options(config)
        place = Place(host, None if numbers is None else (numbers[0], numbers[-1]))
        transport = open_transport(
            backend,
            host=host,
            devices=config.disaggregation_ib_device or "",
            port=config.disaggregation_mooncake_rpc_port,
        )
        worker: PrefillWorker | DecodeWorker
        if config.disaggregation_mode == "prefill":
            bootstrap = (host, config.disaggregation_bootstrap_port)
            balance = config.load_balance_method
            worker = PrefillWorker(place, memory, transport, options, bootstrap, config.port or None, balance)
        else:
            worker = DecodeWorker(place, memory, transport, options)
    except (OSError, TransferError, ValueError) as error:
        raise StartupError(f"--disaggregation-mode {config.disaggregation_mode}: {error}") from error
    worker.start()
    if isinstance(worker, PrefillWorker):
        return PrefillRole(parts.scheduler, worker)
    return DecodeRole(parts.scheduler, worker, fallback=config.disaggregation_fallback == "local")


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
