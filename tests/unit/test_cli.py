"""The command: sub-commands, exit codes, nothing heavy before it is needed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sglang_lite import __version__, cli


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Configurations that reached the server instead of starting one."""
    configs: list[Any] = []

    def run_server(config: Any) -> int:
        configs.append(config)
        return 0

    import sglang_lite.server.run

    monkeypatch.setattr(sglang_lite.server.run, "run_server", run_server)
    return configs


@pytest.mark.parametrize("words", [["serve"], ["launch_server"], []])
def test_ways_to_serve(words: list[str], served: list[Any], smoke_model: Path) -> None:
    assert cli.main([*words, "--model-path", str(smoke_model), "--device=cpu", "--port=0"]) == 0
    assert served[0].model_path == str(smoke_model)
    assert served[0].port == 0


def test_model_path_as_first_word(served: list[Any], smoke_model: Path) -> None:
    assert cli.main(["serve", str(smoke_model), "--device=cpu", "--port=0"]) == 0
    assert served[0].model_path == str(smoke_model)


def test_unknown_sub_command_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["frobnicate", "--port", "1"]) == 2
    assert "unknown sub-command 'frobnicate'" in capsys.readouterr().err


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["version"]) == 0
    assert capsys.readouterr().out == f"sglang-lite version: {__version__}\n"
    assert cli.main(["--help"]) == 0
    assert "demo-model" in capsys.readouterr().out


def test_help_of_serve_lists_options_once(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["serve", "--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert "--max-running-requests N" in text
    assert "--deepep-mode" not in text


def test_failed_start_is_one_line_and_exit_code_1(
    served: list[Any], smoke_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["serve", str(smoke_model), "--device", "cpu", "--tp-size", "2"]) == 1
    error = capsys.readouterr().err
    assert "sglang-lite: error: --device cpu: the CPU reference supports only tp_size=1, requested 2" in error
    assert not served


def test_check_env_does_not_pass_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check-env"]) == 1
    text = capsys.readouterr().out
    assert "cpu: ready" in text
    assert "nothing about GPUs is claimed" in text


def test_checks_before_a_start_load_no_torch(smoke_model: Path) -> None:
    script = (
        "import sys\n"
        "from sglang_lite.configuration.loading import load_config\n"
        "from sglang_lite import startup\n"
        f"startup.prepare(load_config(['--model', {str(smoke_model)!r}, '--device', 'cpu']))\n"
        "print(sorted({'torch', 'aiohttp', 'transformers', 'grpc'} & set(sys.modules)))\n"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
