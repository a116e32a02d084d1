"""The command line of ``sglang-lite fleet``, laid over a specification in a file."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_lite.fleet.router_process import check_router_flags
from sglang_lite.fleet.spec import FleetSpec, checked_spec, flags_of, read_spec
from sglang_lite.types import StartupError

PROGRAM = "sglang-lite fleet"

_EPILOG = """Options of the servers follow behind --, for example:
  sglang-lite fleet --backend ray --replicas 4 --gpus 1 -- --model-path /models/qwen3 --page-size 16
  sglang-lite fleet --backend ray --prefill 2 --decode 4 --gpus 1 -- --model-path /models/qwen3
SIGHUP reads the specification again and replaces the replicas one by one; SIGTERM drains and ends the fleet.
"""


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """A specification, and how to read it again."""

    words: tuple[str, ...]
    spec: FleetSpec
    log_level: str


def parse_options(words: Sequence[str]) -> FleetOptions:
    """Options from the words after ``fleet``; wrong ones print one line and exit with 2.

    Raises:
        StartupError: a specification that cannot be used.
    """
    words = tuple(words)
    own, _, flags = _split(words)
    given = vars(_parser().parse_args(own))
    log_level = given.pop("log_level", "info")
    file = given.pop("spec", None)
    document = read_spec(file) if file is not None else {}
    _lay_over(document, given, list(flags))
    spec = checked_spec(document)
    check_router_flags(spec)
    return FleetOptions(words, spec, log_level)


def _split(words: tuple[str, ...]) -> tuple[tuple[str, ...], bool, tuple[str, ...]]:
    if "--" not in words:
        return words, False, ()
    at = words.index("--")
    return words[:at], True, words[at + 1 :]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        usage=f"{PROGRAM} [options] [-- OPTIONS OF SERVE]",
        description="Run replicas of a server on a Ray cluster, or on this machine, behind a router.",
        epilog=_EPILOG,
        argument_default=argparse.SUPPRESS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--spec", type=Path, metavar="FILE", help="YAML file; the other options win over it (docs/fleet.md)")
    add("--backend", choices=("ray", "local"), help="where replicas run: a Ray cluster, or this machine (default)")
    add("--ray-address", metavar="ADDRESS", help="of the Ray cluster (default: auto)")
    add("--replicas", type=int, metavar="N", help="servers that do prefill and decode")
    add("--prefill", type=int, metavar="N", help="prefill servers")
    add("--decode", type=int, metavar="N", help="decode servers")
    add("--cpus", type=float, metavar="X", help="CPUs of each replica (default: 1)")
    add("--gpus", type=float, metavar="X", help="GPUs of each replica (default: 0)")
    add("--router-url", metavar="URL", help="a router that runs already; without it the fleet starts one")
    add("--router-host", metavar="HOST", help="address of the fleet's router (default: 0.0.0.0)")
    add("--router-port", type=int, metavar="PORT", help="port of the fleet's router (default: 30000)")
    add("--drain-seconds", type=float, metavar="S", help="time for running requests at the end (default: 30)")
    add("--start-seconds", type=float, metavar="S", help="time for a replica to start (default: 1800)")
    add("--check-seconds", type=float, metavar="S", help="time between two looks at a replica (default: 1)")
    add("--unhealthy-seconds", type=float, metavar="S", help="time until a silent replica is replaced (default: 60)")
    add("--surge", action="store_true", help="a rolling restart starts the new replica before the old one leaves")
    add("--targets-file", metavar="FILE", help="kept up to date for file_sd_configs of Prometheus")
    add("--log-directory", metavar="DIR", help="one log for each replica, on its machine")
    add("--log-level", choices=("debug", "info", "warning", "error"), help="of the fleet itself (default: info)")
    return parser


def _lay_over(document: dict[str, Any], given: dict[str, Any], flags: list[str]) -> None:
    """Write what the command line says into ``document``."""
    counts = {
        role: given.pop(name)
        for name, role in (("replicas", "plain"), ("prefill", "prefill"), ("decode", "decode"))
        if name in given
    }
    if counts and document.get("replicas"):
        raise StartupError("fleet: --replicas, --prefill and --decode do not go together with replicas in --spec")
    resources = {name: given.pop(name) for name in ("cpus", "gpus") if name in given}
    if resources and document.get("replicas"):
        raise StartupError("fleet: --cpus and --gpus do not go together with replicas in --spec")
    if counts:
        document["replicas"] = [
            {"role": role, "count": count, "resources": resources} for role, count in counts.items()
        ]
    for prefix, section in (("router_", "router"), ("ray_", "ray")):
        for name in [name for name in given if name.startswith(prefix)]:
            into = document.setdefault(section, {})
            if not isinstance(into, dict):
                raise StartupError(f"fleet: {section} must be a mapping")
            into[name.removeprefix(prefix)] = given.pop(name)
    if flags:
        before = document.get("flags", [])
        if not isinstance(before, str | list):
            raise StartupError("fleet: flags must be words, or one line of them")
        document["flags"] = flags_of(before) + flags
    document.update(given)
