"""The engine core process: ``python -m sglang_lite.engine.process``, started by ``launcher.CoreProcess``.

Standard input carries one ``LaunchMessage`` and then stays open for as long as the front lives: its end means that
the front is gone, whatever killed it, and the core leaves at once.
"""

from __future__ import annotations

import gc
import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
import time

import msgspec
import zmq

from sglang_lite.config import ServerConfig
from sglang_lite.configuration.kv_events import KVEventsConfig
from sglang_lite.engine import watchdog
from sglang_lite.engine.core import EngineCore
from sglang_lite.engine.frames import encode_control
from sglang_lite.engine.kv_publisher import KVEventPublisher
from sglang_lite.engine.launch import LaunchMessage
from sglang_lite.engine.messages import Failure, Progress, Ready
from sglang_lite.engine.parts import Build, CoreParts
from sglang_lite.engine.roles import Role
from sglang_lite.engine.transport import ZmqTransport
from sglang_lite.types import StartupError

logger = logging.getLogger(__name__)

EXIT_STARTUP_FAILURE = 1
EXIT_FAULT = 70
EXIT_ORPHANED = 75

FAREWELL_SECONDS = 2.0
"""How long the last message of a core may take to leave."""

TRANSFER_GRACE_SECONDS = 1.5
"""How long the transfers of a core that ends may take to stop."""


def main(build: Build) -> int:
    """Run a core until the front ends it. Returns the exit code of the process.

    Args:
        build: how scheduler and executor come to be; tests and benchmarks put a null executor here.
    """
    # A terminal or a service manager signals the whole group. The front drains first and then tells the core.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format="[%(asctime)s] %(levelname)s %(name)s: %(message)s")
    launch = msgspec.json.decode(_read_line(sys.stdin.fileno()), type=LaunchMessage)
    # What this process makes for a while lies where the front removes it, however the process ends.
    tempfile.tempdir = launch.directory
    threading.Thread(target=_leave_with_front, args=(launch.directory,), name="front-watch", daemon=True).start()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    transport = ZmqTransport(context, launch.ingress, launch.egress)
    try:
        return _serve(launch, transport, build)
    finally:
        transport.close(linger=FAREWELL_SECONDS)
        context.term()


def _serve(launch: LaunchMessage, transport: ZmqTransport, build: Build) -> int:
    started = time.monotonic()
    try:
        config = ServerConfig.from_json(launch.config)
        logging.getLogger().setLevel(config.log_level.upper())
        parts = build(config, lambda message, fraction: transport.send(Progress(message, fraction)))
        events = KVEventsConfig.parse(config.kv_events_config)
        publisher = None if events is None else KVEventPublisher(events)
        role = _make_role(config, parts) if config.is_disaggregated else None
    except StartupError as error:
        transport.send(Failure(str(error), startup=True))
        return EXIT_STARTUP_FAILURE
    except Exception as error:  # whatever it is, the person who waits for the start must learn of it
        logger.exception("the engine core could not be built")
        transport.send(Failure(f"internal error while starting: {type(error).__name__}: {error}", startup=True))
        return EXIT_FAULT
    # What exists now stays: collections during serving need not look at it, and so stay short.
    gc.collect()
    gc.freeze()
    info = parts.info
    seconds = {**info.startup_seconds, "total": time.monotonic() - started}
    transport.send(Ready(msgspec.structs.replace(info, process_id=os.getpid(), startup_seconds=seconds)))
    parts.watch(lambda reason: _end_with(f"engine core failed: {reason}", launch.egress))
    try:
        core = EngineCore(
            parts.scheduler,
            parts.executor,
            transport,
            depth=parts.depth,
            grammars=parts.grammars,
            kv_events=publisher,
            role=role,
        )
        if role is not None:
            transport.watch(role.fileno())
        watchdog.watch(lambda: core.turn_started, config.watchdog_timeout)
        core.run()
    except Exception as error:  # a fault of the engine: nobody may be left waiting for an answer
        logger.exception("the engine core failed")
        transport.send(Failure(f"engine core failed: {type(error).__name__}: {error}", startup=False))
        return EXIT_FAULT
    finally:
        if publisher is not None:
            publisher.close()
        if role is not None:
            # Peers hear of it, batches are freed and the pool is unregistered while its memory is still there.
            role.close(TRANSFER_GRACE_SECONDS)
    parts.executor.close()
    return 0


def _make_role(config: ServerConfig, parts: CoreParts) -> Role:
    # Imported where it is used: it brings an HTTP client, which other cores do without.
    from sglang_lite.engine.disaggregated import make_role

    return make_role(config, parts)


def _end_with(message: str, egress: tuple[str, ...]) -> None:
    """Tell the fronts why and end this process. For any thread: the loop may sleep, or wait for what is lost."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    for endpoint in egress:
        socket = context.socket(zmq.PUSH)
        socket.connect(endpoint)
        socket.send_multipart(encode_control(Failure(message, startup=False)))
        socket.close(int(FAREWELL_SECONDS * 1000))
    context.term()
    os._exit(EXIT_FAULT)


def _read_line(descriptor: int) -> bytes:
    """The bytes up to the first newline. Reads the descriptor itself, so that nothing stays in a buffer."""
    received = bytearray()
    while not received.endswith(b"\n"):
        chunk = os.read(descriptor, 65536)
        if not chunk:
            break
        received += chunk
    return bytes(received)


def _leave_with_front(directory: str) -> None:
    """Wait for the end of standard input, then end this process whatever it is doing."""
    while os.read(sys.stdin.fileno(), 4096):
        pass
    shutil.rmtree(directory, ignore_errors=True)
    os._exit(EXIT_ORPHANED)


if __name__ == "__main__":
    from sglang_lite.engine.build import build_core_parts

    sys.exit(main(build_core_parts))
