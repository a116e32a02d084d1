"""sglang-lite: serve large language models with the SGLang interfaces, in pure Python.

``Engine`` generates in this process without a server, ``DisaggregatedEngine`` with a prefill and a decode side;
``AsyncEngine`` streams and drives a core process. They are loaded on first use, so that importing the package stays
cheap.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang_lite.config import ServerConfig as ServerConfig
    from sglang_lite.engine.async_engine import AsyncEngine as AsyncEngine
    from sglang_lite.engine.local_pair import DisaggregatedEngine as DisaggregatedEngine
    from sglang_lite.engine.offline import Engine as Engine
    from sglang_lite.frontend.request import GenerateRequest as GenerateRequest
    from sglang_lite.types import SamplingParams as SamplingParams

__version__ = "0.1.0"

__all__ = [
    "AsyncEngine",
    "DisaggregatedEngine",
    "Engine",
    "GenerateRequest",
    "SamplingParams",
    "ServerConfig",
    "__version__",
]

_LAZY = {
    "AsyncEngine": "sglang_lite.engine.async_engine",
    "DisaggregatedEngine": "sglang_lite.engine.local_pair",
    "Engine": "sglang_lite.engine.offline",
    "GenerateRequest": "sglang_lite.frontend.request",
    "SamplingParams": "sglang_lite.types",
    "ServerConfig": "sglang_lite.config",
}


def __getattr__(name: str) -> Any:
    """Import a public class when it is first asked for."""
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(module), name)
