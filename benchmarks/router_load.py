"""Clients of the routers that ``benchmarks.router`` compares: what each does in a second of processor time."""

from __future__ import annotations

import asyncio
import random
import string
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import aiohttp
import msgspec

from benchmarks.router_fleet import RouterProcess

_WARM_UP = 100


@dataclass(frozen=True, slots=True)
class Cost:
    """What a router did.

    Attributes:
        units: requests or tokens.
        processor: seconds of processor time of all its processes.
        wall: seconds.
    """

    units: int
    processor: float
    wall: float

    @property
    def per_core(self) -> float:
        """Units a second of processor time."""
        return self.units / self.processor

    @property
    def per_second(self) -> float:
        """Units a second."""
        return self.units / self.wall


def unary_body(number: int, characters: int) -> bytes:
    """A request whose prompt begins like a tenth of all others."""
    text = f"{number % 10}" * characters + f" {number}"
    return msgspec.json.encode({"text": text, "sampling_params": {"max_new_tokens": 1}})


async def unary(router: RouterProcess, requests: int, clients: int, characters: int) -> Cost:
    """Whole answers."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def one(number: int) -> None:
            async with session.post(
                router.url + "/generate", data=unary_body(number, characters), headers=_JSON
            ) as got:
                assert got.status == 200, await got.read()
                await got.read()

        await spread(_WARM_UP, clients, one)
        return await _cost(router, requests, lambda: spread(requests, clients, one))


async def streamed(router: RouterProcess, streams: int, tokens: int) -> Cost:
    """Streams that run at once, a token a tick each."""
    body = msgspec.json.encode({"text": "x", "stream": True, "sampling_params": {"max_new_tokens": tokens}})
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def one(number: int) -> None:
            async with session.post(router.url + "/generate", data=body, headers=_JSON) as got:
                assert got.status == 200
                data = await got.read()
                assert data.count(b"\n\n") == tokens + 1

        await spread(streams, streams, one)
        return await _cost(router, streams * tokens, lambda: spread(streams, streams, one))


def conversations(seed: int, groups: int, users: int, turns: int) -> list[list[str]]:
    """Prompts of ``groups * users`` conversations: a beginning that a group shares, and turns that grow."""
    generator = random.Random(seed)

    def text(characters: int) -> str:
        return "".join(generator.choices(string.ascii_letters + " ", k=characters))

    found = []
    for _ in range(groups):
        beginning = text(4096)
        for _ in range(users):
            prompt, prompts = beginning, []
            for _ in range(turns):
                prompt += text(512)
                prompts.append(prompt)
            found.append(prompts)
    generator.shuffle(found)
    return found


async def hit_rate(router: RouterProcess, urls: Sequence[str], talks: Sequence[Sequence[str]], clients: int) -> float:
    """Share of all prompt characters that the workers' caches held."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        before = await _counts(session, urls)

        async def one(number: int) -> None:
            for prompt in talks[number]:
                body = msgspec.json.encode({"text": prompt, "sampling_params": {"max_new_tokens": 1}})
                async with session.post(router.url + "/generate", data=body, headers=_JSON) as got:
                    assert got.status == 200
                    await got.read()

        await spread(len(talks), clients, one)
        after = await _counts(session, urls)
        return (after[1] - before[1]) / (after[0] - before[0])


async def _counts(session: aiohttp.ClientSession, urls: Sequence[str]) -> tuple[int, int]:
    asked = found = 0
    for url in urls:
        async with session.get(url + "/health") as got:
            counts = await got.json()
            asked, found = asked + counts["asked"], found + counts["found"]
    return asked, found


async def spread(count: int, clients: int, one: Callable[[int], Awaitable[None]]) -> None:
    """``one`` for every number below ``count``, by ``clients`` at once."""
    numbers = iter(range(count))

    async def client() -> None:
        for number in numbers:
            await one(number)

    await asyncio.gather(*(client() for _ in range(min(clients, count))))


async def _cost(router: RouterProcess, units: int, work: Callable[[], Awaitable[None]]) -> Cost:
    loop = asyncio.get_running_loop()
    processor, started = router.processor_seconds(), loop.time()
    await work()
    return Cost(units, router.processor_seconds() - processor, loop.time() - started)


_JSON = {"content-type": "application/json"}
