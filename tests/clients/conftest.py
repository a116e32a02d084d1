"""A server for clients that other people wrote: the optional group ``clients`` (``pip install -e .[clients]``)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.server import ServerProcess


@pytest.fixture(scope="session")
def server(chain_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """The chain model under the name ``chain``."""
    log = tmp_path_factory.mktemp("clients") / "server.log"
    options = ["--model-path", str(chain_model), "--served-model-name", "chain", "--max-total-tokens", "65536"]
    with ServerProcess([*options, "--enable-metrics"], log) as started:
        started.wait_ready()
        yield started


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients ask nobody but the server: no proxy, no hub, no price list, no usage reports."""
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE", "LITELLM_LOCAL_MODEL_COST_MAP"):
        monkeypatch.setenv(name, "True")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    monkeypatch.setenv("LANGSMITH_TRACING", "false")
