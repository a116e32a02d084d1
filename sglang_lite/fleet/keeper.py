"""Runs one command and ends it together with whoever started it.

``python -m sglang_lite.fleet.keeper SECONDS -- COMMAND...``: the command and its children run in a process group of
their own. A line ``drain`` on standard input asks it to end, ``kill`` ends the whole group at once. The end of the
input means that the owner is gone: the command is asked to end, and after SECONDS the group is killed. Whatever the
command leaves of its group is killed when it ends. The exit code is the command's, 128 + N for a signal.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1


def run(command: Sequence[str], seconds: float) -> int:
    """Run ``command`` to its end; returns the exit code for this process."""
    set_parent_death_signal = ctypes.CDLL(None, use_errno=True).prctl
    keeper = os.getpid()

    def follow_keeper() -> None:
        # A keeper that is killed cannot look after anything: the kernel tells the command instead.
        set_parent_death_signal(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != keeper:  # it was killed before the kernel was asked
            os.kill(os.getpid(), signal.SIGTERM)

    # This process has one thread so far, which makes code between fork and exec safe.
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0, preexec_fn=follow_keeper)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: process.terminate())
    threading.Thread(target=_obey, args=(process, seconds), daemon=True).start()
    code = process.wait()
    _kill_group(process.pid)
    return code if code >= 0 else 128 - code


def _obey(process: subprocess.Popen[bytes], seconds: float) -> None:
    for line in sys.stdin:
        match line.strip():
            case "drain":
                process.terminate()
            case "kill":
                _kill_group(process.pid)
    process.terminate()
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        _kill_group(process.pid)


def _kill_group(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def main(words: Sequence[str]) -> int:
    """Words after the module name."""
    if len(words) < 3 or words[1] != "--":
        print("usage: keeper SECONDS -- COMMAND...", file=sys.stderr)
        return 2
    return run(words[2:], float(words[0]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
