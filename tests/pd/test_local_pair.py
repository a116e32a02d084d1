"""Prefill and decode engines of a real model in one process, with real sessions over sockets between them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_lite import startup
from sglang_lite.config import ServerConfig
from sglang_lite.disaggregation.bootstrap_server import bootstrap_site
from sglang_lite.disaggregation.decode_sessions import DecodeWorker
from sglang_lite.disaggregation.prefill_sessions import PrefillWorker
from sglang_lite.engine.build import build_core_parts
from sglang_lite.engine.core import EngineCore
from sglang_lite.engine.decode_role import DecodeRole
from sglang_lite.engine.local import LocalTransport
from sglang_lite.engine.messages import Shutdown
from sglang_lite.engine.parts import CoreParts
from sglang_lite.engine.prefill_role import PrefillRole
from sglang_lite.engine.roles import Role
from sglang_lite.transfer.factory import open_transport
from sglang_lite.types import OutputColumns, RequestExtras, RequestFlags, TransferParams
from tests.support.scheduler_driver import request_columns
from tests.support.session_pair import FAST, HERE, SiteThread
from tests.support.tiny_checkpoints import CASES, save_checkpoint

SECONDS = 20.0


class Engine:
    """A core in a thread."""

    def __init__(self, parts: CoreParts, role: Role | None) -> None:
        self.parts = parts
        self.tokens: dict[int, list[int]] = {}
        self.logprobs: dict[int, list[float]] = {}
        self.ends: dict[int, int] = {}
        self._news = threading.Condition()
        self._transport = LocalTransport(self._take, lambda event: None)
        self._role = role
        self._core = EngineCore(parts.scheduler, parts.executor, self._transport, depth=parts.depth, role=role)
        self._running = True
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while self._running:
            # Sessions cannot wake this transport.
            self._core.step(0.0 if self._core.busy else 0.002)

    def _take(self, columns: OutputColumns) -> None:
        with self._news:
            for record in columns.logprobs:
                if not record.prompt:
                    self.logprobs.setdefault(record.key, []).extend(record.logprobs.tolist())
            for key, token, code in zip(
                columns.key.tolist(), columns.token.tolist(), columns.finish.tolist(), strict=True
            ):
                if token >= 0:
                    self.tokens.setdefault(key, []).append(token)
                if code:
                    self.ends[key] = code
            self._news.notify_all()

    def submit(self, key: int, prompt: list[int], count: int, transfer: TransferParams | None) -> None:
        extras = {} if transfer is None else {0: RequestExtras(transfer=transfer)}
        flags = int(RequestFlags.RETURN_LOGPROB | RequestFlags.IGNORE_EOS)
        self._transport.put(request_columns([key], [prompt], extras=extras, max_new_tokens=count, flags=flags))

    def wait(self, key: int) -> list[int]:
        with self._news:
            assert self._news.wait_for(lambda: key in self.ends, SECONDS), self.tokens
        return self.tokens.get(key, [])

    def wait_for_pages(self) -> None:
        """Until nobody owns any."""
        until = time.monotonic() + SECONDS
        while True:
            stats = self.parts.scheduler.stats()
            if stats.free_pages + stats.cached_pages == stats.num_pages:
                return
            assert time.monotonic() < until, stats
            time.sleep(0.01)

    def close(self) -> None:
        self._transport.put(Shutdown())
        self._running = False
        self._thread.join(SECONDS)
        if self._role is not None:
            self._role.close(1.0)
        self.parts.executor.close()


@pytest.fixture(scope="module", params=["tcp", "mooncake"])
def engines(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Engine, Engine, Engine, int]]:
    directory: Path = tmp_path_factory.mktemp("model")
    save_checkpoint(CASES["qwen3"], directory)
    config = startup.prepare(
        ServerConfig(
            model_path=str(directory),
            device="cpu",
            skip_tokenizer_init=True,
            max_total_tokens=1024,
            max_running_requests=4,
            chunked_prefill_size=32,
        )
    )
    site = SiteThread(bootstrap_site("127.0.0.1", 0))
    port = site.site.port
    parts = [build_core_parts(config, lambda message, fraction: None) for _ in range(3)]
    memory = parts[0].memory, parts[1].memory
    assert memory[0] is not None
    assert memory[1] is not None
    prefill = PrefillWorker(HERE, memory[0], open_transport(request.param, host="127.0.0.1"), FAST, ("127.0.0.1", port))
    decode = DecodeWorker(HERE, memory[1], open_transport(request.param, host="127.0.0.1"), FAST)
    prefill.start()
    decode.start()
    made = [
        Engine(parts[0], PrefillRole(parts[0].scheduler, prefill)),
        Engine(parts[1], DecodeRole(parts[1].scheduler, decode, fallback=False)),
        Engine(parts[2], None),
    ]
    yield made[0], made[1], made[2], port
    for engine in made:
        engine.close()
    site.close()


def test_same_tokens_and_scores(engines: tuple[Engine, Engine, Engine, int]) -> None:
    """Prompts of less than a page, of whole pages and of many chunks, all at once."""
    prefill, decode, whole, port = engines
    prompts = {key: [(7 * key + 3 * at) % 50 + 1 for at in range(length)] for key, length in enumerate((5, 32, 150), 1)}
    for key, prompt in prompts.items():
        params = TransferParams("127.0.0.1", port, key, rid=f"r{key}")
        decode.submit(key, prompt, 20, params)
        prefill.submit(key, prompt, 20, params)
        whole.submit(key, prompt, 20, None)
    for key in prompts:
        expected = whole.wait(key)
        assert decode.wait(key) == expected
        assert prefill.wait(key) == expected[:1]
        assert decode.logprobs[key] == pytest.approx(whole.logprobs[key], abs=1e-4)
    prefill.wait_for_pages()
    decode.wait_for_pages()


def test_a_room_in_use(engines: tuple[Engine, Engine, Engine, int]) -> None:
    """The second request of a room is refused, and the first one goes on."""
    prefill, decode, whole, port = engines
    params = TransferParams("127.0.0.1", port, 77, rid="r77")
    prompt = list(range(1, 40))
    decode.submit(11, prompt, 8, params)
    decode.submit(12, prompt, 8, params)
    assert decode.wait(12) == []
    prefill.submit(11, prompt, 8, params)
    whole.submit(11, prompt, 8, None)
    assert decode.wait(11) == whole.wait(11)
    decode.wait_for_pages()
