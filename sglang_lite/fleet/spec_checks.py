"""What a specification says that cannot work, found before anything is started. Messages name the field."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from sglang_lite.config import ServerConfig
from sglang_lite.configuration.command_line import build_parser, parse_arguments
from sglang_lite.types import StartupError

if TYPE_CHECKING:
    from sglang_lite.fleet.spec import FleetSpec, Group, Resources

CHOSEN_BY_FLEET = (
    "host",
    "port",
    "disaggregation-mode",
    "disaggregation-bootstrap-port",
    "engine-info-bootstrap-port",
)
"""Options of a replica that the fleet gives it."""

NOT_IN_A_FLEET = {
    "router-url": "the fleet registers its replicas itself",
    "grpc-mode": "the router speaks HTTP to its workers",
    "ssl-keyfile": "replicas serve HTTP inside the cluster",
    "ssl-certfile": "replicas serve HTTP inside the cluster",
    "nnodes": "a replica runs on one machine",
    "node-rank": "a replica runs on one machine",
    "api-key": "give the key in SGLANG_LITE_API_KEY; command lines are readable to everybody on a machine",
    "admin-api-key": "give the key in SGLANG_LITE_ADMIN_API_KEY; command lines are readable to everybody on a machine",
}

_SECONDS = ("drain_seconds", "start_seconds", "check_seconds", "unhealthy_seconds")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_VARIABLE = "SGLANG_LITE_"
_KEYS = ("api-key", "admin-api-key")
_RAY_NAMES = ("CPU", "GPU", "memory", "object_store_memory")


def check_fields(document: Mapping[str, Any], spec: FleetSpec) -> None:
    """Raises StartupError for values that no type tells from good ones, and for fields without effect.

    Args:
        document: what ``spec`` was made of.
    """
    for name in _SECONDS:
        if not math.isfinite(getattr(spec, name)):
            raise StartupError(f"fleet: {name}: must be a finite number")
    _check_router(document.get("router"), spec)
    if spec.targets_file and not Path(spec.targets_file).absolute().parent.is_dir():
        raise StartupError(f"fleet: targets_file {spec.targets_file!r}: its directory does not exist")
    for name in ("targets_file", "log_directory"):
        if "\0" in getattr(spec, name):
            raise StartupError(f"fleet: {name}: holds a null character")
    for place, group in enumerate(spec.replicas):
        _check_group(f"replicas[{place}]", group)


def check_own_variables(variables: Mapping[str, str]) -> None:
    """Raises StartupError for variables of the fleet itself that would make other servers of its replicas. Address and
    port are harmless (images set them): the replicas' command lines win."""
    for option in ("disaggregation-mode", *NOT_IN_A_FLEET):
        name = _VARIABLE + option.upper().replace("-", "_")
        if option not in _KEYS and variables.get(name, "").lower() not in ("", "0", "false", "null"):
            reason = NOT_IN_A_FLEET.get(option, "the fleet chooses it")
            raise StartupError(f"fleet: the variable {name} is set, and replicas would have it: {reason}; unset it")


def _check_variables(where: str, variables: Mapping[str, str]) -> None:
    for name, value in variables.items():
        if not name or "=" in name or "\0" in name or "\0" in value:
            raise StartupError(f"fleet: {where}.{name}: not a variable that a process can have")
        option = name.removeprefix(_VARIABLE).lower().replace("_", "-") if name.startswith(_VARIABLE) else ""
        if option in CHOSEN_BY_FLEET:
            raise StartupError(f"fleet: {where}.{name}: the fleet chooses it; remove it")
        if option in _KEYS:
            raise StartupError(f"fleet: {where}.{name}: give it to the fleet itself, whose router needs it too")
        if option in NOT_IN_A_FLEET:
            raise StartupError(f"fleet: {where}.{name}: {NOT_IN_A_FLEET[option]}; remove it")


def check_flags(title: str, words: Sequence[str]) -> None:
    """Parsed as the replica will, so that prefixes and ``--flag=value`` do not get around the rules.

    Raises:
        StartupError: a flag that is wrong, or not the operator's to give.
    """
    _check_words(f"replicas {title}: flags", words)
    try:
        fields = parse_arguments(build_parser(ServerConfig.option_specs()), ["--drain-timeout=0", *words]).fields
    except SystemExit:
        raise StartupError(f"fleet: replicas {title}: wrong flags {shlex.join(words)!r}; see above") from None
    for name in fields:
        flag = name.replace("_", "-")
        if flag in CHOSEN_BY_FLEET:
            raise StartupError(f"fleet: replicas {title}: flag --{flag}: the fleet chooses it; remove it")
        if flag in NOT_IN_A_FLEET:
            raise StartupError(f"fleet: replicas {title}: flag --{flag}: {NOT_IN_A_FLEET[flag]}; remove it")


def _check_router(given: Any, spec: FleetSpec) -> None:
    url = spec.router.url
    if not url:
        if not spec.router.host.strip():
            raise StartupError("fleet: router.host: must not be empty")
        return
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        usable = False
    if not usable:
        raise StartupError(f"fleet: router.url {url!r}: must be http://HOST[:PORT] or https://HOST[:PORT]")
    beside = [name for name in ("host", "port", "flags") if isinstance(given, Mapping) and name in given]
    if beside:
        raise StartupError(f"fleet: router.{beside[0]}: has no effect on a router that runs already (router.url)")


def _check_group(where: str, group: Group) -> None:
    if group.name and not _NAME.fullmatch(group.name):
        raise StartupError(
            f"fleet: {where}.name {group.name!r}: at most 63 letters, digits, dots, dashes and underscores; it is a "
            "name of files"
        )
    _check_variables(f"{where}.environment", group.environment)
    _check_resources(f"{where}.resources", group.resources)


def _check_resources(where: str, resources: Resources) -> None:
    for name, value in (("cpus", resources.cpus), ("gpus", resources.gpus), *resources.custom.items()):
        if not math.isfinite(value):
            raise StartupError(f"fleet: {where}: {name} must be a finite number")
    if resources.gpus > 1 and not resources.gpus.is_integer():
        raise StartupError(f"fleet: {where}.gpus {resources.gpus}: above 1 it must be a whole number")
    for name in resources.custom:
        if not name or name in _RAY_NAMES:
            raise StartupError(f"fleet: {where}.custom.{name}: not a name of a custom resource")


def _check_words(where: str, words: Sequence[str]) -> None:
    for word in words:
        if "\0" in word:
            raise StartupError(f"fleet: {where}: {word!r} holds a null character")
