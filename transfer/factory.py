"""Opens a transport by the name of its backend."""

from __future__ import annotations

import importlib

from sglang_lite.transfer.base import KVTransport, TransferError
from sglang_lite.transfer.nixl_engine import MODULES

_MODULES = {"mooncake": ("mooncake.engine",), "nixl": tuple(f"{name}._api" for name in MODULES)}
"""Of which one has to be there."""

_PACKAGES = {"libibverbs.so": "libibverbs1", "libnuma.so": "libnuma1", "libcurl.so": "libcurl4", "libnl": "libnl-3-200"}
_NEEDED = {"mooncake": ("libibverbs1", "libnuma1", "libcurl4")}
"""System packages by extra."""

NAMES = ("tcp", "mooncake", "mooncake_tcp", "nixl")


def check_available(name: str) -> None:
    """Check that a transport can be opened here.

    Raises:
        TransferError: names the extra or the system package that is missing.
    """
    if name not in NAMES:
        raise TransferError("engine", f"there is no transport {name!r}; allowed are {', '.join(NAMES)}")
    extra = name.removesuffix("_tcp")
    missing: ModuleNotFoundError | None = None
    for module in _MODULES.get(extra, ()):
        try:
            importlib.import_module(module)
            return
        except ModuleNotFoundError as error:
            missing = missing or error
        except ImportError as error:
            package = next((package for library, package in _PACKAGES.items() if library in str(error)), None)
            # The loader names the first library only: the others may be missing as well.
            others = [name for name in _NEEDED.get(extra, ()) if name != package]
            advice = (
                f"apt-get install {' '.join((package, *others))}" if package else "its wheel does not fit this machine"
            )
            raise TransferError("engine", f"transport {name!r} does not load: {error}; {advice}") from error
    if missing is not None:
        raise TransferError(
            "engine", f"transport {name!r} needs the extra {extra!r}: pip install 'sglang-lite[{extra}]' ({missing})"
        ) from missing


def open_transport(name: str, *, host: str, devices: str = "", port: int = 0) -> KVTransport:
    """Open a transport.

    Args:
        name: one of ``NAMES``.
        host: address that peers can reach.
        devices: host channel adapters of Mooncake, a comma between them; empty for those that it finds.
        port: where Mooncake's engine listens; 0 for any.

    Raises:
        TransferError: as ``check_available``, or the engine does not start.
    """
    if name == "tcp":
        from sglang_lite.transfer.tcp import TcpTransport

        return TcpTransport(host)
    if name.startswith("mooncake"):
        from sglang_lite.transfer.mooncake import prepare_environment

        prepare_environment(host)
    check_available(name)
    if name == "nixl":
        from sglang_lite.transfer.nixl import NixlTransport

        return NixlTransport(host)
    from sglang_lite.transfer.mooncake import MooncakeTransport

    # Adapters are dropped where TCP is asked for, as SGLang does.
    is_tcp = name == "mooncake_tcp"
    return MooncakeTransport(host, force_tcp=is_tcp, devices="" if is_tcp else devices, port=port)
