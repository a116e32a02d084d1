"""What a fleet consists of: groups of equal replicas, their router, and where they run."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import yaml
from msgspec import Meta

from sglang_lite.fleet.spec_checks import check_fields, check_flags
from sglang_lite.types import StartupError

Role = Literal["plain", "prefill", "decode"]
Positive = Annotated[float, Meta(gt=0)]
NotNegative = Annotated[float, Meta(ge=0)]
Count = Annotated[int, Meta(ge=0, le=1024)]
Port = Annotated[int, Meta(ge=1, le=65535)]


class _Struct(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Fields of a section; one that is not known is an error."""


class Resources(_Struct, frozen=True):
    """What a replica takes from its machine, in Ray's units.

    Attributes:
        cpus, gpus: logical ones; whole GPUs are made visible to the replica, others are not.
        memory: bytes.
        custom: named resources of the cluster, for example ``accelerator_type:H100: 0.001``.
    """

    cpus: NotNegative = 1.0
    gpus: NotNegative = 0.0
    memory: Annotated[int, Meta(ge=0)] = 0
    custom: dict[str, NotNegative] = {}


class Group(_Struct, frozen=True):
    """Equal replicas.

    Attributes:
        name: in logs and names of actors; the role when empty.
        flags: options of ``sglang-lite serve`` behind those of the fleet, as words or as one line.
        environment: variables of the replicas.
    """

    role: Role = "plain"
    name: str = ""
    count: Count = 1
    flags: str | list[str] = []
    environment: dict[str, str] = {}
    resources: Resources = msgspec.field(default_factory=Resources)

    @property
    def title(self) -> str:
        """The name that is shown."""
        return self.name or self.role


class Router(_Struct, frozen=True):
    """The router that the replicas are registered with: one that runs at ``url``, or one that the fleet starts."""

    url: str = ""
    host: str = "0.0.0.0"
    port: Port = 30000
    flags: str | list[str] = []


class RaySettings(_Struct, frozen=True):
    """How to reach a Ray cluster.

    Attributes:
        address: of the cluster; ``auto`` is the one that this machine belongs to.
        runtime_env: handed to Ray as it is, for example ``{pip: [...]}`` or ``{image_uri: ...}``.
    """

    address: str = "auto"
    namespace: str = "sglang-lite"
    runtime_env: dict[str, Any] = {}


class FleetSpec(_Struct, frozen=True):
    """A fleet. Times are in seconds.

    Attributes:
        flags: options of every replica, before those of its group.
        drain_seconds: how long running requests of a replica that leaves may take.
        start_seconds: how long a placed replica may take to serve.
        check_seconds: between two looks at a replica.
        unhealthy_seconds: after that long without a good health check a replica that still runs is replaced.
        surge: a rolling restart starts the new replica before the old one leaves; needs room for one more.
        targets_file: kept up to date with the addresses of router and replicas, for ``file_sd_configs`` of Prometheus.
        log_directory: where each replica writes its own log, on its machine; none lets it write to its parent's.
    """

    backend: Literal["ray", "local"] = "local"
    ray: RaySettings = msgspec.field(default_factory=RaySettings)
    router: Router = msgspec.field(default_factory=Router)
    replicas: list[Group] = []
    flags: str | list[str] = []
    drain_seconds: NotNegative = 30.0
    start_seconds: Positive = 1800.0
    check_seconds: Positive = 1.0
    unhealthy_seconds: Positive = 60.0
    surge: bool = False
    targets_file: str = ""
    log_directory: str = ""

    @property
    def has_pairs(self) -> bool:
        """Whether prefill and decode are apart."""
        return any(group.role != "plain" for group in self.replicas)


def read_spec(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file.

    Raises:
        StartupError: unreadable, or no mapping.
    """
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise StartupError(f"--spec: cannot read {path}: {error}") from None
    if not isinstance(document, dict):
        raise StartupError(f"--spec: {path} must hold a mapping; docs/fleet.md shows one")
    return document


def checked_spec(document: dict[str, Any]) -> FleetSpec:
    """The fleet that ``document`` describes.

    Raises:
        StartupError: a field is unknown or wrong, or groups do not go together; the message names the field.
    """
    try:
        spec = msgspec.convert(document, FleetSpec)
    except msgspec.ValidationError as error:
        raise StartupError(f"fleet: {error}") from None
    if not any(group.count for group in spec.replicas):
        raise StartupError("fleet: no replicas; give --replicas, or --prefill and --decode, or replicas in the spec")
    _check_groups(spec.replicas)
    check_fields(document, spec)
    for group in spec.replicas:
        check_flags(group.title, flags_of(spec.flags) + flags_of(group.flags))
    return spec


def flags_of(flags: str | list[str]) -> list[str]:
    """Words of ``flags``.

    Raises:
        StartupError: a quotation that does not end.
    """
    if isinstance(flags, list):
        return flags
    try:
        return shlex.split(flags, comments=True)
    except ValueError as error:
        raise StartupError(f"fleet: flags {flags!r}: {error}") from None


def _check_groups(groups: list[Group]) -> None:
    titles = [group.title for group in groups]
    for title in titles:
        if titles.count(title) > 1:
            raise StartupError(f"fleet: replicas: two groups are called {title!r}; give each a name")
    roles = {group.role for group in groups if group.count}
    if "plain" in roles and len(roles) > 1:
        raise StartupError("fleet: replicas: plain ones do not go together with prefill and decode behind one router")
    if len(roles) == 1 and "plain" not in roles:
        raise StartupError(f"fleet: replicas: only {roles.pop()} ones; prefill and decode need each other")
