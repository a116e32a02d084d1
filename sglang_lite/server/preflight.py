"""Checks of what only the front uses: before the engine is started, so that no weights are read in vain."""

from __future__ import annotations

from collections.abc import Iterable

from sglang_lite.config import ServerConfig
from sglang_lite.frontend.chat_template import ChatTemplate, parse_template_variables, read_template_option
from sglang_lite.frontend.parsing.formats import TOOL_FORMATS
from sglang_lite.frontend.parsing.reasoning import REASONING_FORMATS
from sglang_lite.frontend.tokenizer import read_chat_templates
from sglang_lite.frontend.validation import parse_sampling_params
from sglang_lite.observability.tracing import check_tracing_installed
from sglang_lite.server.tenants import Tenants
from sglang_lite.server.tls import Certificates
from sglang_lite.types import RequestError, StartupError


def check_text_side(config: ServerConfig) -> None:
    """Check the chat template and the defaults that every request gets.

    Args:
        config: prepared by ``startup.prepare``.

    Raises:
        StartupError: the template is not valid, a default would be refused in a request, or the TLS files or the
            tenants cannot be used, or tracing is not installed.
    """
    Certificates.of(config)
    Tenants.of(config)
    if config.enable_trace:
        check_tracing_installed()
    if not config.skip_tokenizer_init:
        if config.chat_template is None:
            templates = read_chat_templates(config.effective_tokenizer_path)
        else:
            templates = {"default": read_template_option(config.chat_template)}
        ChatTemplate(templates)
    _check_parser("--tool-call-parser", config.tool_call_parser, TOOL_FORMATS)
    _check_parser("--reasoning-parser", config.reasoning_parser, REASONING_FORMATS)
    try:
        parse_template_variables(config.default_chat_template_kwargs)
    except RequestError as error:
        raise StartupError(f"--default-chat-template-kwargs: {error.message}") from error
    try:
        parse_sampling_params(config.preferred_sampling_params)
    except RequestError as error:
        raise StartupError(f"--preferred-sampling-params: {error.message}") from error


def _check_parser(option: str, name: str | None, known: Iterable[str]) -> None:
    if name is not None and name != "auto" and name not in known:
        raise StartupError(f"{option}: {name!r} is not supported; allowed: auto, {', '.join(sorted(known))}")
