"""A process that receives: one transport with one region, told what to do by lines of JSON.

Started as ``python -m tests.support.transfer_peer NAME BYTES``. It writes a line when it is ready and one for each line
that it reads: ``describe``, ``bytes`` (a checksum of the region), ``zero``, ``reregister``, ``notes`` (waits for as
many), ``close``.
"""

from __future__ import annotations

import binascii
import json
import os
import signal
import subprocess
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sglang_lite.transfer.base import KVTransport
from sglang_lite.transfer.factory import open_transport

ROOT = Path(__file__).resolve().parents[2]
MARK = "transfer-peer "
"""In front of every answer: engines write to the standard output too."""


class PeerProcess:
    """The process, for its parent. A context manager that ends it.

    Args:
        name: of the transport.
        num_bytes: of its region, zeros at first.
    """

    def __init__(self, name: str, num_bytes: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.transfer_peer", name, str(num_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        self._read()

    def __enter__(self) -> PeerProcess:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.kill()

    def ask(self, what: str, number: int = 0) -> Any:
        """Its answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([what, number]) + "\n")
        self.process.stdin.flush()
        return self._read()

    def describe(self) -> bytes:
        """See ``base.KVTransport.describe``."""
        return binascii.unhexlify(self.ask("describe"))

    def stop(self) -> None:
        """No instruction of it runs until ``resume``; returns once that is so."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)

    def resume(self) -> None:
        """After ``stop``."""
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """It is gone at once."""
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None and not stream.closed:
                stream.close()

    def _read(self) -> Any:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(MARK):
                return json.loads(line.removeprefix(MARK))
        raise AssertionError(f"the peer ended with {self.process.wait()}")


def digest(memory: npt.NDArray[np.uint8]) -> int:
    """Checksum of the bytes of an array."""
    return zlib.crc32(memory.data)


class _Receiver:
    def __init__(self, transport: KVTransport, num_bytes: int) -> None:
        self._transport = transport
        self._memory = np.zeros(num_bytes, dtype=np.uint8)
        self._lease = transport.register(self._memory.ctypes.data, num_bytes)

    def describe(self, number: int) -> str:
        return self._transport.describe().hex()

    def bytes(self, number: int) -> int:
        return digest(self._memory)

    def zero(self, number: int) -> None:
        self._memory[:] = 0

    def reregister(self, number: int) -> None:
        self._lease.close()
        self._lease = self._transport.register(self._memory.ctypes.data, self._memory.nbytes)

    def notes(self, number: int) -> list[tuple[str, str, int]]:
        """Sender, text, and the checksum of the region when it came."""
        found: list[tuple[str, str, int]] = []
        until = time.monotonic() + 10.0
        while len(found) < number and time.monotonic() < until:
            found += [(sender, note.decode(), digest(self._memory)) for sender, note in self._transport.notifications()]
            time.sleep(0.0005)
        return found

    def close(self, number: int) -> None:
        self._transport.close(1.0)


def _answer(value: object) -> None:
    print(MARK + json.dumps(value), flush=True)


def main() -> None:
    """Receive until the standard input ends."""
    receiver = _Receiver(open_transport(sys.argv[1], host="127.0.0.1"), int(sys.argv[2]))
    _answer("ready")
    for line in sys.stdin:
        what, number = json.loads(line)
        _answer(getattr(receiver, what)(number))


if __name__ == "__main__":
    main()
