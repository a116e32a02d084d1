"""What workers ask bootstrap servers, and how prefill ranks register."""

from __future__ import annotations

import asyncio
import logging
import random
from typing import Annotated

import aiohttp
import msgspec

from sglang_lite.disaggregation.bootstrap_server import INSTANCE_HEADER
from sglang_lite.disaggregation.topology import Rank

logger = logging.getLogger(__name__)

ATTEMPTS = 5
_ATTEMPT_SECONDS = 5.0
_LONGEST_WAIT = 30.0
_HEALTH = aiohttp.ClientTimeout(total=5.0, sock_connect=2.0, sock_read=3.0)
_QUERY = aiohttp.ClientTimeout(total=_ATTEMPT_SECONDS)


_MOST_BYTES = 4 << 20
"""Of an answer: the longest are those about thousands of ranks."""

_Size = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]


_FAILURES = (aiohttp.ClientError, TimeoutError, OSError, UnicodeError)
"""Of a call. The last one: names that no host can have."""


class HandshakeError(Exception):
    """A bootstrap server gives no usable answer."""


class TopologyInfo(msgspec.Struct, frozen=True):
    """The answer about all ranks."""

    attn_tp_size: _Size
    dp_size: _Size
    page_size: int | None = None
    kv_cache_dtype: str | None = None
    kv_layout: str | None = None
    follow_bootstrap_room: bool = True
    attn_cp_size: _Size = 1
    pp_size: _Size = 1
    instances: list[str] = []


class RankAddress(msgspec.Struct, frozen=True):
    """The answer about one rank; ``instance`` says which process it is, if it tells."""

    rank_ip: Annotated[str, msgspec.Meta(min_length=1, max_length=253)]
    rank_port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    instance: str | None = None


class BootstrapClient:
    """Calls to bootstrap servers, on the running loop."""

    def __init__(self) -> None:
        self._session = aiohttp.ClientSession(timeout=_QUERY, trust_env=False)

    async def close(self) -> None:
        """Close connections."""
        await self._session.close()

    async def topology(self, host: str, port: int) -> TopologyInfo:
        """What all ranks have in common. Raises HandshakeError."""
        return msgspec.json.decode(await self._route(host, port, -1, -1, -1, -1), type=TopologyInfo)

    async def rank(self, host: str, port: int, dp: int, tp: int) -> RankAddress:
        """Where one rank listens. Raises HandshakeError."""
        return msgspec.json.decode(await self._route(host, port, dp, 0, tp, 0), type=RankAddress)

    async def dp_rank_of(self, host: str, port: int, room: int) -> int | None:
        """The replica that has a room, or None. Raises HandshakeError, or msgspec.MsgspecError for another form."""
        body = {"bootstrap_rooms": [room]}
        try:
            async with self._session.post(
                _url(host, port, "/query_dp_ranks"), json=body, allow_redirects=False
            ) as response:
                answer = await _read(response)
        except _FAILURES as error:
            raise HandshakeError(f"bootstrap server {host}:{port}: {_why(error)}") from error
        return msgspec.json.decode(answer, type=dict[str, int]).get(str(room))

    async def tell_room(self, host: str, port: int, room: int, dp_rank: int) -> None:
        """Say which replica has a room. Raises HandshakeError."""
        body = {"bootstrap_room": room, "dp_rank": dp_rank}
        try:
            async with self._session.post(_url(host, port, "/register_dp_rank"), json=body) as response:
                response.raise_for_status()
        except _FAILURES as error:
            raise HandshakeError(f"bootstrap server {host}:{port}: {_why(error)}") from error

    async def health(self, host: str, port: int) -> str | None:
        """The server's instance ("" when it tells none), or None when it does not answer well."""
        try:
            async with self._session.get(_url(host, port, "/health"), timeout=_HEALTH) as response:
                return response.headers.get(INSTANCE_HEADER, "") if response.status == 200 else None
        except _FAILURES:
            return None

    async def register(self, host: str, port: int, rank: Rank) -> None:
        """Register a prefill rank; tries five times.

        Raises:
            HandshakeError: it was refused, or nobody answered.
        """
        wait, why = 1.0, ""
        for attempt in range(ATTEMPTS):
            if attempt:
                await asyncio.sleep(wait * random.uniform(0.75, 1.25))
                wait = min(2 * wait, _LONGEST_WAIT)
            try:
                async with self._session.put(
                    _url(host, port, "/route"), data=msgspec.json.encode(rank), timeout=_QUERY
                ) as response:
                    text = await response.text()
                    if response.status == 200:
                        return
                    if response.status == 400:
                        raise HandshakeError(f"bootstrap server {host}:{port} refuses this rank: {text}")
                    why = f"{response.status} {text[:200]}"
            except _FAILURES as error:
                why = _why(error)
        raise HandshakeError(f"bootstrap server {host}:{port} took no registration in {ATTEMPTS} attempts: {why}")

    async def _route(self, host: str, port: int, dp: int, cp: int, tp: int, pp: int) -> bytes:
        query = {"prefill_dp_rank": dp, "prefill_cp_rank": cp, "target_tp_rank": tp, "target_pp_rank": pp}
        try:
            async with self._session.get(_url(host, port, "/route"), params=query, allow_redirects=False) as response:
                body = await _read(response)
                if response.status != 200:
                    text = body[:300].decode(errors="replace")
                    raise HandshakeError(f"bootstrap server {host}:{port} answers {response.status}: {text}")
                return body
        except _FAILURES as error:
            raise HandshakeError(f"bootstrap server {host}:{port}: {_why(error)}") from error


def _url(host: str, port: int, path: str) -> str:
    return f"http://[{host}]:{port}{path}" if ":" in host else f"http://{host}:{port}{path}"


async def _read(response: aiohttp.ClientResponse) -> bytes:
    """The body. Raises OSError: it is longer than any that is meant for us."""
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > _MOST_BYTES:
            raise OSError(f"its answer has more than {_MOST_BYTES} bytes")
    return bytes(body)


def _why(error: BaseException) -> str:
    return str(error) or type(error).__name__
