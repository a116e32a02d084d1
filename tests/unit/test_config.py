"""``ServerConfig`` and its sources: command line, environment, YAML file."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from pydantic import ValidationError

from sglang_lite.config import ServerConfig
from sglang_lite.configuration.compatibility import POINTERS, known_options
from sglang_lite.configuration.loading import load_config

BASE = ["--model-path", "m", "--device", "cpu"]


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SGLANG_LITE_PORT", "SGLANG_LITE_CONFIG", "SGLANG_LITE_MODEL_PATH"):
        monkeypatch.delenv(name, raising=False)


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The message of a command line that must be refused with exit code 2."""
    with pytest.raises(SystemExit) as caught:
        load_config(arguments)
    assert caught.value.code == 2
    return capsys.readouterr().err


def test_defaults() -> None:
    config = load_config(BASE)
    assert (config.host, config.port, config.page_size, config.device) == ("127.0.0.1", 30000, 16, "cpu")
    assert (config.tp_size, config.dp_size, config.max_prefill_tokens) == (1, 1, 16384)
    assert config.reserved_slots == 512
    assert config.disaggregation_bootstrap_port == 8998
    assert config.engine_info_bootstrap_port == 6789
    assert not config.unknown_flags


@pytest.mark.parametrize(
    ("arguments", "field", "expected"),
    [
        (["--port=8000"], "port", 8000),
        (["--port", "1", "--port", "2"], "port", 2),
        (["--tp", "2"], "tp_size", 2),
        (["--tensor-parallel-size=2"], "tp_size", 2),
        (["--dp", "3"], "dp_size", 3),
        (["--mem-frac", "0.8"], "mem_fraction_static", 0.8),
        (["--max-total-tokens", "25.6k"], "max_total_tokens", 25600),
        (["--smg-grpc-mode"], "grpc_mode", True),
        (["--grpc-http-sidecar-port", "5"], "smg_http_sidecar_port", 5),
        (["--kv-cache-dtype", "BF16"], "kv_cache_dtype", "bf16"),
        (["--chunked-prefill-size", "-1"], "chunked_prefill_size", -1),
        (["--preferred-sampling-params", '{"top_k": 1}'], "preferred_sampling_params", {"top_k": 1}),
        (["--json-model-override-args", '{"rope_theta": 1}'], "json_model_override_args", {"rope_theta": 1}),
        (["--json-model-override-args={}"], "json_model_override_args", {}),
        (["--device", "cuda:1"], "device", "cuda"),
        (["--enable-metrics", "--no-enable-metrics"], "enable_metrics", False),
        (["--lora-paths", "/a", "b=/b"], "lora_paths", ["/a", "b=/b"]),
        (
            ["--lora-paths", '{"lora_name": "a", "lora_path": "/a b"}'],
            "lora_paths",
            ['{"lora_name": "a", "lora_path": "/a b"}'],
        ),
        (["--lora-paths"], "lora_paths", []),
        (["--lora-target-modules", "q_proj", "all"], "lora_target_modules", ["q_proj", "all"]),
    ],
)
def test_command_line(arguments: list[str], field: str, expected: object) -> None:
    assert getattr(load_config([*BASE, *arguments]), field) == expected


def test_first_word_is_the_model_path() -> None:
    assert load_config(["some/model", "--device", "cpu"]).model_path == "some/model"
    assert load_config(["--model", "x"]).model_path == "x"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--port", "abc"], "argument --port: invalid int value: 'abc'"),
        (["--port", "65536"], "argument --port: invalid port: '65536'"),
        (["--dtype", "int3"], "argument --dtype: invalid choice: 'int3' (choose from 'auto', 'bfloat16'"),
        (["--device", "toaster"], "argument --device: invalid choice: 'toaster' (choose from 'auto', 'cpu', 'cuda'"),
        (["--max-total-tokens", "1.5Ki"], "argument --max-total-tokens: Decimals are not allowed with IEC suffixes"),
        (["--preferred-sampling-params", "{bad"], "argument --preferred-sampling-params: invalid loads value: '{bad'"),
        (["--mem-fraction-static", "1.5"], "must be at most 1"),
        (["--context-length", "100G"], "argument --context-length: invalid value: 100000000000"),
        (["--max-running-requests", "100000000"], "argument --max-running-requests: invalid value"),
        (["--max-wait-ms", "1e12"], "argument --max-wait-ms: invalid value"),
        (["--mem-fraction-static", "x"], "argument --mem-fraction-static: invalid float value: 'x'"),
        (["--disaggregation-zmq-ports", "9-8"], "argument --disaggregation-zmq-ports: invalid port range: '9-8'"),
        (["--disaggregation-transfer-backend", "fake"], "invalid choice: 'fake'"),
        (["--deepep-config", "{"], "argument --deepep-config: invalid loads value"),
        (["--log-level", "loud"], "argument --log-level: invalid choice: 'loud'"),
        (["--tp"], "expected one argument"),
        (["--encoder", "x"], "ambiguous option: --encoder could match --encoder-only"),
        (["--runtime-backend", "cuda"], "use --device"),
        (["--kv-cache-num-layers", "4"], "comes from the model definition"),
        (["--quantization", "fp8"], "argument --quantization: not supported by sglang-lite"),
        (["--lora-target-modules", "q_proj", "x"], "argument --lora-target-modules: invalid choice: 'x'"),
        (["--enable-eplb"], "argument --enable-eplb: not supported by sglang-lite"),
        (["--config", "a", "--config", "b"], "argument --config: given more than once"),
        (["--config", "/nonexistent.yaml"], "argument --config: cannot read /nonexistent.yaml"),
        (["--enable-metrics", "true"], "unrecognized arguments: true"),
    ],
)
def test_wrong_command_lines(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    error = refused([*BASE, *arguments], capsys)
    assert error.startswith("sglang-lite serve: error: ")
    assert message in error


def test_model_is_required(capsys: pytest.CaptureFixture[str]) -> None:
    error = refused(["--device", "cpu"], capsys)
    assert "the following arguments are required: --model-path/--model" in error
    assert "not understood" not in error


def test_a_misspelt_model_option_is_named_beside_the_missing_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert "; not understood: --modle-path" in refused(["--modle-path", "demo"], capsys)


def test_unknown_flags_are_kept_and_warned_about_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        config = load_config([*BASE, "--some-future-flag", "3", "--bare", "--with=x", "--negative", "-1"])
    assert config.unknown_flags == {"some-future-flag": "3", "bare": True, "with": "x", "negative": "-1"}
    assert [record.message for record in caplog.records] == [
        "unknown options, ignored: --some-future-flag, --bare, --with, --negative"
    ]


def test_options_without_effect_are_recorded(caplog: pytest.LogCaptureFixture) -> None:
    arguments = ["--disable-custom-all-reduce", "--attention-backend", "fa3", "--deepep-config", '{"a": 1}']
    with caplog.at_level(logging.WARNING):
        config = load_config([*BASE, *arguments])
    assert config.ignored_flags == {
        "disable-custom-all-reduce": True,
        "attention-backend": "fa3",
        "deepep-config": {"a": 1},
    }
    assert "without effect" in caplog.text


@pytest.mark.parametrize("arguments", [["--load-format", "auto"], ["--pp-size", "1"], ["--quantization", "unquant"]])
def test_a_refused_option_with_its_default_is_accepted(arguments: list[str]) -> None:
    assert load_config([*BASE, *arguments]).ignored_flags == {}


def test_environment_and_precedence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "server.yaml"
    file.write_text(
        "model-path: from-file\nport: 5\ntp: 4\nmax_total_tokens: 4k\nenable-metrics: true\nfuture: 3\n"
        "attention-backend: fa3\npreferred-sampling-params: {top_k: 2}\n",
        encoding="utf-8",
    )
    monkeypatch.setenv("SGLANG_LITE_PORT", "77")
    monkeypatch.setenv("SGLANG_LITE_MAX_PREFILL_TOKENS", "4Ki")
    monkeypatch.setenv("SGLANG_LITE_DISABLE_RADIX_CACHE", "yes")
    config = load_config(["--config", str(file), "--tp-size", "2"])
    assert config.model_path == "from-file"
    assert config.port == 77
    assert config.tp_size == 2
    assert config.max_total_tokens == 4000
    assert config.max_prefill_tokens == 4096
    assert config.enable_metrics
    assert config.disable_radix_cache
    assert config.preferred_sampling_params == {"top_k": 2}
    assert config.unknown_flags == {"future": "3"}
    assert config.ignored_flags == {"attention-backend": "fa3"}
    assert load_config(["--config", str(file), "--port", "9"]).port == 9


def test_wrong_environment_names_the_variable(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SGLANG_LITE_PORT", "abc")
    assert "environment variable SGLANG_LITE_PORT: invalid int value: 'abc'" in refused(BASE, capsys)
    assert load_config([*BASE, "--port", "5"]).port == 5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a\n", "must hold a mapping"),
        ("a: [\n", "is not valid YAML"),
        ("port: true\n", "argument --port: invalid value: True"),
        ("dtype: int3\n", "argument --dtype: invalid choice: 'int3'"),
        ("runtime-backend: cuda\n", "use --device"),
        ("enable-eplb: true\n", "not supported by sglang-lite"),
        ("mem_fraction_static: .nan\n", "argument --mem-fraction-static: invalid value: nan"),
        ("drain_timeout: .inf\n", "argument --drain-timeout: invalid value: inf"),
        ("page_size: 99999999999999999999\n", "argument --page-size: invalid value"),
    ],
)
def test_wrong_files(text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "server.yaml"
    file.write_text(text, encoding="utf-8")
    assert message in refused([*BASE, "--config", str(file)], capsys)


def test_several_words_in_every_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "server.yaml"
    file.write_text("lora-paths: [a=/a, {lora_name: b, lora_path: /b}]\n", encoding="utf-8")
    from_file = ["a=/a", '{"lora_name": "b", "lora_path": "/b"}']
    assert load_config([*BASE, "--config", str(file)]).lora_paths == from_file
    monkeypatch.setenv("SGLANG_LITE_LORA_PATHS", "a=/a b=/b")
    assert load_config([*BASE, "--config", str(file)]).lora_paths == ["a=/a", "b=/b"]
    monkeypatch.setenv("SGLANG_LITE_LORA_PATHS", '["a b=/a b", {"lora_name": "c", "lora_path": "/c"}]')
    assert load_config(BASE).lora_paths == ["a b=/a b", '{"lora_name": "c", "lora_path": "/c"}']
    assert load_config([*BASE, "--lora-paths", "x=/x"]).lora_paths == ["x=/x"]


def test_files_may_leave_options_empty_and_texts_unquoted(tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text(
        "dtype: null\nport:\nquantization: null\nfuture:\nserved-model-name: 123\napi_key: 4.5\n"
        "disaggregation_zmq_ports: 9000\n",
        encoding="utf-8",
    )
    config = load_config([*BASE, "--config", str(file)])
    assert (config.dtype, config.port, config.unknown_flags) == ("auto", 30000, {})
    assert (config.served_model_name, config.api_key, config.disaggregation_zmq_ports) == ("123", "4.5", "9000")


def test_json_round_trip_reads_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ServerConfig(model_path="m", device="cpu", max_total_tokens=4096, api_key="k", unknown_flags={"a": True})
    monkeypatch.setenv("SGLANG_LITE_PORT", "77")
    assert ServerConfig.from_json(config.to_json()) == config
    assert config.resolved(port=4).port == 4


def test_public_form_hides_keys() -> None:
    shown = ServerConfig(model_path="m", api_key="secret", admin_api_key="other").public()
    assert "secret" not in str(shown)
    assert "other" not in str(shown)
    assert ServerConfig(model_path="m").public()["api_key"] is None


def test_direct_construction_is_checked() -> None:
    with pytest.raises(ValidationError, match="invalid choice: 'toaster'"):
        ServerConfig(model_path="m", device="toaster")
    with pytest.raises(ValidationError, match="Extra inputs"):
        ServerConfig(model_path="m", prot=3)  # type: ignore[call-arg]


def test_no_name_is_declared_twice() -> None:
    names = [spelling for spec in ServerConfig.option_specs() for spelling in spec.spellings]
    names += [spelling for known in known_options() for spelling in known.spellings]
    names += [f"--{name}" for name in POINTERS]
    assert len(names) == len(set(names))
    assert len(names) > 500
