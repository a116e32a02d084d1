"""Read a ``ServerConfig`` from command line, environment and YAML file, in that order of precedence."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from sglang_lite.config import ServerConfig
from sglang_lite.configuration.command_line import (
    ConfigurationError,
    OptionParser,
    ParsedOptions,
    build_parser,
    find_known,
    note_known,
    parse_arguments,
)
from sglang_lite.configuration.compatibility import POINTERS

ENVIRONMENT_PREFIX = "SGLANG_LITE_"
_NOT_OPTIONS = frozenset({"SGLANG_LITE_CACHE", "SGLANG_LITE_CONFIG", "SGLANG_LITE_TEST_CPU_RANKS"})
_FROM_FILE = "from_file"
_RECORDS = frozenset({"unknown_flags", "ignored_flags"})

logger = logging.getLogger(__name__)


class _Layers(BaseSettings, ServerConfig):
    """The same fields, filled from the sources; never leaves this module."""

    model_config = SettingsConfigDict(
        env_prefix=ENVIRONMENT_PREFIX, extra="ignore", frozen=True, enable_decoding=False, protected_namespaces=()
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Command line, then environment, then file."""
        assert isinstance(init_settings, InitSettingsSource)
        given = dict(init_settings.init_kwargs)
        from_file = given.pop(_FROM_FILE, {})
        return (
            InitSettingsSource(settings_cls, init_kwargs=given),
            EnvSettingsSource(settings_cls, env_prefix=ENVIRONMENT_PREFIX),
            InitSettingsSource(settings_cls, init_kwargs=from_file),
        )


def load_config(arguments: Sequence[str]) -> ServerConfig:
    """The configuration that the words after ``serve``, the environment and ``--config`` make.

    A wrong option prints one line that names it and exits with 2, as argparse does.
    """
    parser = build_parser(ServerConfig.option_specs())
    parsed = parse_arguments(parser, arguments)
    path = parsed.config_file or os.environ.get("SGLANG_LITE_CONFIG") or None
    try:
        from_file = read_file(Path(path)) if path else ParsedOptions()
        config = _combine(parsed, from_file, os.environ)
    except ConfigurationError as error:
        parser.error(str(error))
    _require_model(parser, config)
    _warn(config, os.environ)
    return config


def read_file(path: Path) -> ParsedOptions:
    """Options of a YAML file: a mapping whose keys are option names or aliases, with ``-`` or ``_``.

    Raises:
        ConfigurationError: not readable, not a mapping, a value that no option can have, or a refused option.
    """
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(f"argument --config: cannot read {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"argument --config: {path} is not valid YAML: {error}") from None
    if document is None:
        document = {}
    if not isinstance(document, dict):
        raise ConfigurationError(f"argument --config: {path} must hold a mapping of option names to values")
    names = {
        spelling.removeprefix("--"): spec.name for spec in ServerConfig.option_specs() for spelling in spec.spellings
    }
    result = ParsedOptions()
    for key, value in document.items():
        name = str(key).replace("_", "-").removeprefix("--")
        _take(result, names, name, value)
    return result


def _take(result: ParsedOptions, names: Mapping[str, str], name: str, value: Any) -> None:
    """Sort one entry of a file into ``result``; null is an option that is not set."""
    if value is None:
        return
    if name in names:
        result.fields[names[name]] = value
    elif name in POINTERS or find_known(name) is not None:
        note_known(result, name, value)
    else:
        result.unknown[name] = value if isinstance(value, bool) else str(value)


def _combine(parsed: ParsedOptions, from_file: ParsedOptions, environment: Mapping[str, str]) -> ServerConfig:
    try:
        layered = _Layers(**{**parsed.fields, _FROM_FILE: from_file.fields})
    except ValidationError as error:
        raise ConfigurationError(_describe(error, parsed, environment)) from None
    return ServerConfig.model_validate(
        {
            **layered.model_dump(exclude=set(_RECORDS)),
            "unknown_flags": {**from_file.unknown, **parsed.unknown},
            "ignored_flags": {**from_file.ignored, **parsed.ignored},
        }
    )


def _describe(error: ValidationError, parsed: ParsedOptions, environment: Mapping[str, str]) -> str:
    """One line for the first fault: the variable or the option, and what is wrong with its value."""
    fault = error.errors()[0]
    name = str(fault["loc"][0])
    variable = f"{ENVIRONMENT_PREFIX}{name.upper()}"
    if name not in parsed.fields and variable in environment:
        where = f"environment variable {variable}"
    else:
        where = f"argument --{name.replace('_', '-')}"
    cause = fault.get("ctx", {}).get("error")
    reason = str(cause) if cause is not None else f"invalid value: {fault['input']!r} ({fault['msg']})"
    return f"{where}: {reason}"


def _require_model(parser: OptionParser, config: ServerConfig) -> None:
    if not config.model_path:
        unknown = _dashed(config.unknown_flags)
        parser.error(
            "the following arguments are required: --model-path/--model "
            "(a directory, a Hugging Face repository id, or 'demo')"
            + (f"; not understood: {unknown}" if unknown else "")
        )


def _warn(config: ServerConfig, environment: Mapping[str, str]) -> None:
    """Say once which options have no effect."""
    if config.unknown_flags:
        logger.warning("unknown options, ignored: %s", _dashed(config.unknown_flags))
    if config.ignored_flags:
        logger.warning("options without effect in sglang-lite, ignored: %s", _dashed(config.ignored_flags))
    fields = {f"{ENVIRONMENT_PREFIX}{name.upper()}" for name in ServerConfig.model_fields}
    strange = [
        name
        for name in environment
        if name.startswith(ENVIRONMENT_PREFIX) and name.upper() not in fields and name not in _NOT_OPTIONS
    ]
    if strange:
        logger.warning("environment variables that name no option, ignored: %s", ", ".join(sorted(strange)))


def _dashed(flags: Mapping[str, Any]) -> str:
    return ", ".join(f"--{name}" for name in flags)
