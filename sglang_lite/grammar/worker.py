"""The compiler process: ``python -m sglang_lite.grammar.worker``, started by ``grammar.process``.

A grammar comes from a client and goes through a library of native code, with no bound on time or memory. Here it can
take down this process and nothing else. It leaves when its standard input ends.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from pathlib import Path
from typing import BinaryIO

from sglang_lite.grammar.backends import make_backend
from sglang_lite.grammar.base import GrammarBackend, GrammarError, Vocabulary
from sglang_lite.grammar.cost import check_cost
from sglang_lite.grammar.limits import NO_MEMORY
from sglang_lite.grammar.messages import LENGTH, Answer, Compile, Setup, decode_request, encode


def main() -> None:
    """Answer until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal's whole group; whoever started this ends it
    source = sys.stdin.buffer
    # What the libraries print must not come between the answers.
    target = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    backend: GrammarBackend | None = None
    vocabulary: Vocabulary | None = None
    while (body := _read(source)) is not None:
        message = decode_request(body)
        if isinstance(message, Setup):
            try:
                vocabulary = Vocabulary(message.tokens, message.size, message.end_ids, message.markers)
                backend = make_backend(message.backend, vocabulary)
            except ImportError as error:
                answer = Answer(error=str(error), loaded=False)
            else:
                _limit_memory(message.memory_bytes)
                answer = Answer()
        else:
            answer = _compile(backend, vocabulary, message)
        target.write(encode(answer))
        target.flush()


def _compile(backend: GrammarBackend | None, vocabulary: Vocabulary | None, message: Compile) -> Answer:
    if backend is None or vocabulary is None:
        return Answer(error="no library was set up", loaded=False)
    try:
        compiled = backend.compile(message.grammar)
        check_cost(backend.load(compiled).matcher(), vocabulary, seed=len(message.grammar.text))
        return Answer(compiled=compiled)
    except GrammarError as error:
        if "bad_alloc" not in str(error):
            return Answer(error=str(error))
        return Answer(error=NO_MEMORY)
    except Exception as error:  # whatever a library raises for a grammar that it does not understand
        if isinstance(error, MemoryError) or "bad_alloc" in str(error):
            return Answer(error=NO_MEMORY)
        return Answer(error=f"{type(error).__name__}: {error}"[:1000])


def _limit_memory(extra: int) -> None:
    """Allow ``extra`` bytes of address space beside what is in use now."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    limit = pages * resource.getpagesize() + extra
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _read(source: BinaryIO) -> bytes | None:
    header = source.read(LENGTH.size)
    if len(header) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(header)
    body = source.read(length)
    return body if len(body) == length else None


if __name__ == "__main__":
    main()
