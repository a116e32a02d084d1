"""An engine for the HTTP routes whose core runs in the event loop of the test: no process, no sockets."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from sglang_lite import startup
from sglang_lite.config import ServerConfig
from sglang_lite.engine.batching import Submission, build_columns
from sglang_lite.engine.build import build_core_parts
from sglang_lite.engine.core import EngineCore
from sglang_lite.engine.limits import prepare_prompt
from sglang_lite.engine.local import LocalTransport
from sglang_lite.frontend import tokenizer as text
from sglang_lite.frontend.output import OutputProcessor
from sglang_lite.frontend.request import GenerateRequest, GenerationOutput
from sglang_lite.models.description import read_description
from sglang_lite.types import OutputColumns
from tests.support.fake_engine import FakeEngine

FIRST_CHARACTER = 0x4E00
"""Character of token 0; that of token i is i behind it, so that a text says exactly which tokens it is."""


def write_character_tokenizer(directory: Path, vocab_size: int) -> None:
    """A tokenizer of one character a token, none of them special."""
    vocabulary = {chr(FIRST_CHARACTER + token): token for token in range(vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=chr(FIRST_CHARACTER)))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(directory / "tokenizer.json"))


def tokens_of(generated: str) -> list[int]:
    """The tokens of a text of that tokenizer."""
    return [ord(character) - FIRST_CHARACTER for character in generated]


class InProcessEngine(FakeEngine):
    """Serves a real model; several requests at a time run in one batch."""

    def __init__(self, directory: Path, **options: Any) -> None:
        super().__init__()
        self.config = startup.prepare(ServerConfig(**{"model_path": str(directory), "device": "cpu", **options}))
        self.description = read_description(directory)
        self.tokenizer = text.Tokenizer.load(self.config.effective_tokenizer_path)
        parts = build_core_parts(self.config, lambda message, fraction: None)
        self.info = parts.info
        self._executor = parts.executor
        self._processor = OutputProcessor(self.tokenizer)
        self._transport = LocalTransport(self._take_output, lambda event: None)
        self._core = EngineCore(parts.scheduler, parts.executor, self._transport, depth=parts.depth)
        self._keys = itertools.count(1)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerationOutput, None]:
        token_ids = request.known_ids
        if token_ids is None:
            token_ids = self.tokenizer.encode(request.text or "", add_special_tokens=False)
        prompt = prepare_prompt(request, token_ids, self.info, allow_auto_truncate=False)
        state = self._processor.add(next(self._keys), request, len(prompt.token_ids), time.time())
        self._transport.put(build_columns([Submission(state.key, request, prompt)]))
        while state.finish_reason is None:
            await asyncio.sleep(0)  # requests that arrive together are planned together
            self._core.step(0.0)
        yield self._processor.snapshot(state)
        self._processor.remove(state.key)

    def close(self) -> None:
        """End the executor's thread."""
        self._executor.close()

    def _take_output(self, columns: OutputColumns) -> None:
        self._processor.process(columns, time.time())
