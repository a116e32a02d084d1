"""``ServerConfig``: every option of the server, typed, with its flag, default and meaning in one place.

The command line, the environment (``SGLANG_LITE_PORT``), a YAML file (``--config``), ``--help`` and
``/server_info`` are all made from this class, so they cannot drift apart. Its fields are declared in
``configuration.options``, one module a group. ``configuration.loading`` builds one from those sources; a program
builds one directly: ``ServerConfig(model_path="demo", device="cpu")``.
"""

from __future__ import annotations

from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator

from sglang_lite.configuration import values
from sglang_lite.configuration.option import Option, OptionSpec
from sglang_lite.configuration.options.device import DeviceOptions
from sglang_lite.configuration.options.disaggregation import DisaggregationOptions
from sglang_lite.configuration.options.fleet import FleetOptions
from sglang_lite.configuration.options.grpc import GrpcOptions
from sglang_lite.configuration.options.http import HttpOptions
from sglang_lite.configuration.options.lora import LoraOptions
from sglang_lite.configuration.options.memory import MemoryOptions
from sglang_lite.configuration.options.model import ModelOptions
from sglang_lite.configuration.options.observability import ObservabilityOptions

_SECRETS = ("api_key", "admin_api_key", "router_api_key", "ssl_keyfile_password", "tenants")


class ServerConfig(
    ObservabilityOptions,
    FleetOptions,
    DisaggregationOptions,
    LoraOptions,
    DeviceOptions,
    MemoryOptions,
    GrpcOptions,
    HttpOptions,
    ModelOptions,
):
    """All options of a server. ``None`` means that the value is decided later (model, memory or mode).

    Frozen: ``resolved()`` returns a changed copy. The bases are listed last group first: pydantic orders fields by the
    reversed order of the bases, and ``--help`` shows them in order.
    """

    model_config = ConfigDict(defer_build=False)

    # Options of the command line that are no option of this class
    unknown_flags: dict[str, str | bool] = {}
    """Options that nobody knows, kept for /server_info: name with dashes -> its word, or True."""
    ignored_flags: dict[str, Any] = {}
    """Known SGLang options without effect here: name with dashes -> value."""
    replica: int = 0
    """Which of the data-parallel replicas a core is; set by who starts the cores."""

    @field_validator("*", mode="before")
    @classmethod
    def _check_option(cls, value: Any, info: ValidationInfo) -> Any:
        option = _option_of(cls, info.field_name or "")
        return value if option is None else _checked(option, value, cls.model_fields[info.field_name or ""].annotation)

    @classmethod
    def option_specs(cls) -> list[OptionSpec]:
        """Every option with its name and default, in order of declaration."""
        specs = []
        for name, info in cls.model_fields.items():
            option = _option_of(cls, name)
            if option is not None:
                specs.append(OptionSpec(name, option, info.default, is_flag=info.annotation is bool))
        return specs

    def resolved(self, **changes: Any) -> Self:
        """A copy with ``changes`` applied and validated."""
        return self.model_validate({**self.model_dump(), **changes})

    def to_json(self) -> str:
        """The whole configuration as JSON text, secrets included: for the core process only."""
        return self.model_dump_json()

    @classmethod
    def from_json(cls, document: str | bytes) -> Self:
        """The inverse of ``to_json``; reads neither environment nor files."""
        return cls.model_validate_json(document)

    def public(self) -> dict[str, Any]:
        """The configuration as ``/server_info`` shows it: without keys, secrets blanked when set."""
        shown = self.model_dump(mode="json")
        for name in _SECRETS:
            if shown[name] is not None:
                shown[name] = "******"
        del shown["replica"]
        return shown


def _option_of(model: type[BaseModel], name: str) -> Option | None:
    info = model.model_fields.get(name)
    if info is None:
        return None
    return next((item for item in info.metadata if isinstance(item, Option)), None)


def _checked(option: Option, value: Any, annotation: Any) -> Any:
    """Convert text of any source; a boolean's text means the same everywhere."""
    if annotation is bool:
        return values.boolean(value) if isinstance(value, str) else value
    if isinstance(value, bool):
        raise ValueError(f"invalid value: {value} (the option takes a value, it is no switch)")
    return option.check(value)
