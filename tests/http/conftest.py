"""Servers of the HTTP tests: one application per set of options and test session, over the chain model.

The cases of the acceptance list are named by their id (C101 ...) in the parameters or docstrings of the tests.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from inspect import iscoroutinefunction
from pathlib import Path

import pytest
import pytest_asyncio

from tests.support.server import LocalServer, local_server


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Asynchronous tests run in the event loop of their servers, which live as long as the session."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents and isinstance(item, pytest.Function) and iscoroutinefunction(item.function):
            item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def server(chain_model: Path) -> AsyncIterator[LocalServer]:
    """Page size 1, metrics on, a roomy pool."""
    async with local_server(chain_model, page_size=1, max_total_tokens=65536, enable_metrics=True) as started:
        yield started


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def paged_server(chain_model: Path) -> AsyncIterator[LocalServer]:
    """Page size 16, metrics off, deltas on /generate."""
    async with local_server(
        chain_model, page_size=16, max_total_tokens=65536, incremental_streaming_output=True
    ) as started:
        yield started


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def small_pages_server(chain_model: Path) -> AsyncIterator[LocalServer]:
    """Page size 4."""
    async with local_server(chain_model, page_size=4, max_total_tokens=8192) as started:
        yield started


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def uncached_server(chain_model: Path) -> AsyncIterator[LocalServer]:
    """Without prefix cache, with API keys."""
    async with local_server(
        chain_model,
        page_size=1,
        max_total_tokens=4096,
        disable_radix_cache=True,
        api_key="user-key",
        admin_api_key="admin-key",
    ) as started:
        started.session.headers["Authorization"] = "Bearer user-key"
        yield started


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def tight_server(chain_model: Path) -> AsyncIterator[LocalServer]:
    """64 token slots and 8 prompt tokens a step."""
    async with local_server(
        chain_model, page_size=1, max_total_tokens=64, max_prefill_tokens=8, chunked_prefill_size=8
    ) as started:
        yield started


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def single_server(chain_model: Path) -> AsyncIterator[LocalServer]:
    """One running request at a time; waiting ends after a second; two may wait."""
    async with local_server(
        chain_model,
        page_size=1,
        max_total_tokens=8192,
        max_running_requests=1,
        max_queued_requests=2,
        request_waiting_timeout=1.0,
    ) as started:
        yield started
