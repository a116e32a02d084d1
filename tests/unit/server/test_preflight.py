"""What only the front uses is checked before the engine is started."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from sglang_lite.config import ServerConfig
from sglang_lite.server import run
from sglang_lite.server.preflight import check_text_side
from sglang_lite.types import StartupError


@pytest.fixture
def model(smoke_model: Path, tmp_path: Path) -> Path:
    """A copy of the smoke model to damage."""
    return shutil.copytree(smoke_model, tmp_path / "model")


def config(model: Path, **options: Any) -> ServerConfig:
    return ServerConfig(model_path=str(model), device="cpu", **options)


def test_a_sound_configuration_passes(model: Path) -> None:
    check_text_side(config(model, chat_template="{{ messages[0].content }}", preferred_sampling_params={"top_k": 3}))
    check_text_side(config(model, skip_tokenizer_init=True, chat_template="{% broken"))


def test_broken_template_of_the_option(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text("{% for message in messages %}", encoding="utf-8")
    for option in (str(file), "{{ unfinished"):
        with pytest.raises(StartupError, match="chat template 'default' is not valid: line 1"):
            check_text_side(config(model, chat_template=option))
    file.write_bytes(b"\xff\xfe{{")
    with pytest.raises(StartupError, match="cannot read"):
        check_text_side(config(model, chat_template=str(file)))


def test_broken_template_of_the_model(model: Path) -> None:
    (model / "chat_template.jinja").write_text("{{ messages", encoding="utf-8")
    with pytest.raises(StartupError, match="chat template 'default' is not valid"):
        check_text_side(config(model))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"preferred_sampling_params": {"temperature": -1}}, "--preferred-sampling-params: temperature"),
        ({"preferred_sampling_params": {"bogus": 1}}, "--preferred-sampling-params: unknown field `bogus`"),
        ({"default_chat_template_kwargs": {"messages": []}}, "--default-chat-template-kwargs"),
    ],
)
def test_defaults_that_every_request_would_be_refused_for(model: Path, options: dict[str, Any], named: str) -> None:
    with pytest.raises(StartupError, match=named):
        check_text_side(config(model, **options))


def test_no_engine_is_started_for_a_broken_template(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run.AsyncEngine, "start", None)
    with pytest.raises(StartupError, match="chat template"):
        run.run_server(config(model, chat_template="{% broken"))


@pytest.mark.parametrize("option", ["tool_call_parser", "reasoning_parser"])
def test_parsers_are_known_or_the_start_ends(model: Path, option: str) -> None:
    check_text_side(config(model, **{option: "auto"}))
    with pytest.raises(StartupError, match=rf"--{option.replace('_', '-')}: 'telepathy'.*allowed: auto, "):
        check_text_side(config(model, **{option: "telepathy"}))
