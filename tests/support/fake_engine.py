"""An engine that emits scripted snapshots, for tests of routes alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from types import SimpleNamespace
from typing import Any

from sglang_lite.config import ServerConfig
from sglang_lite.engine.adapter_registry import AdapterRegistry
from sglang_lite.engine.info import EngineInfo, KvCacheInfo, LoadSnapshot
from sglang_lite.engine.shared_claims import SharedClaims
from sglang_lite.frontend.request import FinishReason, GenerateRequest, GenerationOutput
from sglang_lite.types import ProfileOptions, RequestError

Script = Callable[[GenerateRequest], list[GenerationOutput | Exception]]

INFO = EngineInfo(
    context_length=64,
    vocab_size=260,
    eos_token_ids=(258,),
    num_pages=8,
    page_size=4,
    max_total_tokens=32,
    max_req_input_len=32,
    max_running_requests=4,
    kv_cache=KvCacheInfo(
        dtype="float32",
        page_size=4,
        num_layers=1,
        kv_heads=1,
        head_dim=2,
        kv_tensors_per_token=2,
        bytes_per_token=16,
        page_size_bytes=64,
    ),
    model_type="qwen3",
    architectures=("Qwen3ForCausalLM",),
    dtype="float32",
    device="cpu",
    startup_seconds={"load": 0.5},
)


def snapshot(request: GenerateRequest, text: str, finish: FinishReason | None = None) -> GenerationOutput:
    """A snapshot in which every character is a token."""
    return GenerationOutput(
        request_id=request.request_id,
        text=text,
        output_ids=[ord(character) for character in text],
        finish_reason=finish,
        prompt_tokens=3,
        completion_tokens=len(text),
        cached_tokens=1,
    )


def hello(request: GenerateRequest) -> list[GenerationOutput | Exception]:
    """Two snapshots: ``h``, then ``hi`` with the end."""
    end = snapshot(request, "hi", FinishReason("length", length=2))
    return [snapshot(request, "h"), end] if request.stream else [end]


class FakeEngine:
    """Plays ``script(request)``: yields snapshots, raises exceptions.

    Attributes:
        started, closed: ids of the requests that began, and that were left before their end.
        step: when set, every snapshot waits for it.
    """

    def __init__(self, script: Script = hello, **options: Any) -> None:
        self.config = ServerConfig(
            **{"model_path": "/models/fake", "served_model_name": "fake", "device": "cpu", **options}
        )
        self.description: Any = SimpleNamespace(bos_token_id=None, pad_token_id=None, generation_defaults={}, labels=())
        self.tokenizer: Any = None
        self.info = INFO
        self.is_alive = True
        self.failure: str | None = None
        self.answers = True
        self.adapters = AdapterRegistry(None)
        self.front = 0
        self.claims: SharedClaims | None = None
        self.load = LoadSnapshot(num_pages=8, page_size=4, free_pages=8, max_running_requests=4)
        self.stats = self.load
        self.script = script
        self.started: list[str] = []
        self.closed: list[str] = []
        self.aborted: list[str] = []
        self.gate: asyncio.Event | None = None

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerationOutput, None]:
        self.started.append(request.request_id)
        ended = False
        try:
            for item in self.script(request):
                if self.gate is not None:
                    await self.gate.wait()
                if isinstance(item, Exception):
                    raise item
                ended = item.finish_reason is not None
                yield item
        finally:
            if not ended:
                self.closed.append(request.request_id)

    def abort(self, request_id: str, *, exact: bool = False) -> bool:
        self.aborted.append(request_id)
        return request_id == "known"

    async def abort_all(self) -> int:
        if self.gate is not None:
            self.gate.set()
        return 7

    async def flush_cache(self, timeout: float = 0.0) -> bool:
        return timeout > 0

    async def loads(self) -> LoadSnapshot:
        if not self.is_alive:
            raise RequestError("the engine is gone", status=503)
        return self.load

    async def replica_loads(self) -> list[tuple[int, LoadSnapshot]]:
        return [(0, await self.loads())]

    def look(self) -> bool:
        return self.answers

    async def pause(self, mode: str = "abort") -> None:
        self.aborted.append(f"pause {mode}")

    async def update_weights(self, path: str) -> None:
        self.aborted.append(f"weights {path}")

    async def release_memory(self, tags: tuple[str, ...]) -> None:
        self.aborted.append(f"release {','.join(tags)}")

    async def resume_memory(self, tags: tuple[str, ...]) -> None:
        self.aborted.append(f"resume {','.join(tags)}")

    def change_stream_interval(self, tokens: int) -> None:
        self.aborted.append(f"interval {tokens}")

    async def start_profile(self, options: ProfileOptions) -> None:
        self.aborted.append(f"profile {options.output_dir}")

    async def stop_profile(self) -> str:
        raise RequestError("profiling is not running", status=412)

    async def resume(self) -> None:
        self.aborted.append("resume")
