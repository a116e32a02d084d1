"""Tokenization off the event loop: texts that arrive together are encoded together in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from sglang_lite.frontend.tokenizer import Tokenizer
from sglang_lite.types import RequestError

INLINE_CHARACTERS = 512
"""Texts up to this length are encoded at once: that takes less time than waking a thread."""

THREADS = 2


@dataclass(slots=True, frozen=True)
class _Job:
    text: str
    add_special_tokens: bool
    result: asyncio.Future[list[int]]


class TokenizationPool:
    """Encodes prompts of one event loop."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._loop = asyncio.get_running_loop()
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="tokenize")
        self._waiting: list[_Job] = []

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of ``text``.

        Raises:
            RequestError: the text cannot be encoded.
        """
        if len(text) <= INLINE_CHARACTERS:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        job = _Job(text, add_special_tokens, self._loop.create_future())
        if not self._waiting:
            self._loop.call_soon(self._start_batch)
        self._waiting.append(job)
        return await job.result

    def close(self) -> None:
        """Drop what waits and let the threads end."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _start_batch(self) -> None:
        jobs, self._waiting = self._waiting, []
        for add_special_tokens in (True, False):
            batch = [job for job in jobs if job.add_special_tokens is add_special_tokens]
            if batch:
                self._threads.submit(self._encode_batch, batch)

    def _encode_batch(self, jobs: Sequence[_Job]) -> None:
        """Runs in a thread. A text that cannot be encoded must not spoil its neighbours."""
        results: list[list[int] | Exception]
        try:
            results = list(self._encode_texts(jobs))
        except Exception:  # one of them is at fault: find out which by encoding each alone
            results = [self._encode_one(job) for job in jobs]
        self._loop.call_soon_threadsafe(_resolve, jobs, results)

    def _encode_texts(self, jobs: Sequence[_Job]) -> list[list[int]]:
        texts = [job.text for job in jobs]
        return self._tokenizer.encode_batch(texts, add_special_tokens=jobs[0].add_special_tokens)

    def _encode_one(self, job: _Job) -> list[int] | Exception:
        try:
            return self._tokenizer.encode(job.text, add_special_tokens=job.add_special_tokens)
        except RequestError as error:
            return error
        except Exception as error:  # the tokenizer library raises plain Exception
            return RequestError(f"the text cannot be tokenized: {error}", field="text")


def _resolve(jobs: Sequence[_Job], results: Sequence[list[int] | Exception]) -> None:
    for job, result in zip(jobs, results, strict=True):
        if job.result.done():
            continue
        if isinstance(result, Exception):
            job.result.set_exception(result)
        else:
            job.result.set_result(result)
