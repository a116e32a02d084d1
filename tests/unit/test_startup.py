"""Every start-up failure is a message that names the fault, before anything is started or bound."""

from __future__ import annotations

import json
import re
import shutil
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sglang_lite import startup
from sglang_lite.config import ServerConfig
from sglang_lite.types import StartupError


def failure(**options: Any) -> str:
    """The message of a configuration that must not start."""
    with pytest.raises(StartupError) as caught:
        startup.prepare(ServerConfig(**{"device": "cpu", "model_path": "/nonexistent", **options}))
    return str(caught.value)


@pytest.fixture
def model(smoke_model: Path, tmp_path: Path) -> Path:
    """A copy of the smoke model to damage."""
    return shutil.copytree(smoke_model, tmp_path / "model")


def edit_config(directory: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = directory / "config.json"
    document = json.loads(path.read_text(encoding="utf-8"))
    change(document)
    path.write_text(json.dumps(document), encoding="utf-8")


def test_prepared_configuration_is_settled(smoke_model: Path) -> None:
    config = ServerConfig(model_path=str(smoke_model), device="cpu", enable_priority_scheduling=True)
    prepared = startup.prepare(config)
    assert prepared.model_path == str(smoke_model)
    assert prepared.served_model_name == str(smoke_model)
    assert prepared.load_balance_method == "round_robin"
    assert prepared.schedule_policy == "priority"
    assert startup.prepare(prepared) == prepared


def test_auto_never_falls_back_to_cpu(smoke_model: Path) -> None:
    message = failure(device="auto", model_path=str(smoke_model))
    assert "no executable production backend" in message
    assert "--device cpu" in message
    assert all(device in message for device in ("cuda: ", "rocm", "metal", "musa", "xpu", "npu", "hpu"))
    assert message.count("no provider is registered") == 1
    line, hint = message.splitlines()
    assert len(line) < 300
    assert "check-env" in hint


@pytest.mark.parametrize("device", ["cuda", "metal", "rocm", "musa", "xpu", "npu", "hpu"])
def test_device_without_provider(device: str) -> None:
    message = failure(device=device)
    assert f"--device {device}" in message
    assert "cpu" in message


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"tp_size": 2}, "CPU reference supports only tp_size=1, requested 2"),
        ({"dp_size": 2, "tp_size": 2, "nnodes": 2}, "--dp-size 2 needs --nnodes 1"),
        ({"tp_size": 2, "nnodes": 2}, "--dist-init-addr None: several nodes need host:port"),
        ({"ep_size": 3, "tp_size": 2}, "--ep-size 3 must divide --tp-size 2"),
        ({"dtype": "float16"}, "--dtype float16"),
        ({"kv_cache_dtype": "fp8_e4m3"}, "--kv-cache-dtype fp8_e4m3"),
        ({"page_size": 0}, "--page-size 0"),
        ({"max_total_tokens": 8}, "--max-total-tokens 8 holds no page of --page-size 16"),
        ({"chunked_prefill_size": 100}, "--chunked-prefill-size 100 must be -1 or a multiple of --page-size 16"),
        ({"chunked_prefill_size": 0}, "--chunked-prefill-size 0"),
        ({"num_reserved_decode_tokens": 100}, "100 token slots are not divisible by --page-size 16"),
        ({"num_reserved_decode_tokens": 0}, "0 token slots"),
        ({"api_key": ""}, "--api-key is empty"),
        ({"admin_api_key": " "}, "--admin-api-key is empty"),
        ({"served_model_name": "a:b"}, "--served-model-name 'a:b'"),
        ({"chat_template": "/nonexistent.jinja"}, "/nonexistent.jinja"),
        ({"chat_template": "x" * 5000}, "--chat-template: no such file"),
        ({"nnodes": 2}, "--nnodes 2 must divide --tp-size 1"),
        ({"grpc_mode": True, "port": 65535}, "65536"),
        ({"grpc_mode": True, "port": 5, "smg_http_sidecar_port": 5}, "must differ"),
        ({"grpc_mode": True, "tokenizer_worker_num": 2}, "--tokenizer-worker-num"),
    ],
)
def test_options_that_cannot_be_served(options: dict[str, Any], expected: str) -> None:
    assert expected in failure(**options)


@pytest.mark.parametrize("backend", ["mooncake", "mooncake_tcp", "nixl", "ascend", "mori"])
def test_transfer_backend_that_is_not_installed(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """C014: the failure names the backend."""
    for module in ("mooncake.engine", "nixl._api", "nixl_cu13._api", "nixl_cu12._api"):
        monkeypatch.setitem(sys.modules, module, None)
    message = failure(disaggregation_mode="prefill", disaggregation_transfer_backend=backend)
    assert f"--disaggregation-transfer-backend {backend}" in message


@pytest.mark.parametrize("library", ["libibverbs.so.1", "libnuma.so.1", "libcurl.so.4"])
def test_system_libraries_of_mooncake_that_are_missing(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loader names one of them; the message says what to install for all."""

    def load(name: str) -> object:
        raise ImportError(f"{library}: cannot open shared object file: No such file or directory")

    monkeypatch.setattr("sglang_lite.transfer.factory.importlib.import_module", load)
    message = failure(disaggregation_mode="decode", disaggregation_transfer_backend="mooncake_tcp")
    install = re.search(r"apt-get install ([\w -]+)", message)
    assert install is not None, message
    assert set(install[1].split()) == {"libibverbs1", "libnuma1", "libcurl4"}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"num_reserved_decode_tokens": 100}, "100 token slots are not divisible by --page-size 16"),
        ({"page_size": 3}, "512 token slots are not divisible by --page-size 3"),
        ({"kv_cache_dtype": "fp4_e2m1"}, "needs model metadata"),
        ({"disaggregation_zmq_ports": "9000-9001"}, "names 2 ports, expected 1"),
        ({"tp_size": 4, "disaggregation_zmq_ports": "9000-9001"}, "names 2 ports, expected 4"),
    ],
)
def test_prefill_mode_options(options: dict[str, Any], expected: str) -> None:
    assert expected in failure(disaggregation_mode="prefill", **options)


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        ({"enable_pdmux": True}, "--enable-pdmux"),
        ({"speculative_algorithm": "ngram"}, "--speculative-algorithm ngram"),
        ({"disaggregation_decode_enable_radix_cache": True}, "--disaggregation-decode-enable-radix-cache"),
        ({"disaggregation_fallback": "local"}, "--disaggregation-fallback local"),
    ],
)
def test_what_a_prefill_server_is_not_combined_with(options: dict[str, Any], flag: str) -> None:
    backend = {"disaggregation_transfer_backend": "tcp"}
    assert flag in failure(disaggregation_mode="prefill", **backend, **options)


def test_model_path_that_is_no_directory() -> None:
    assert "model path is not a local directory: /nonexistent" in failure()


def test_missing_and_bad_config(model: Path) -> None:
    (model / "config.json").write_text("{", encoding="utf-8")
    assert f"cannot parse model config {model / 'config.json'}" in failure(model_path=str(model))
    (model / "config.json").unlink()
    assert "config.json" in failure(model_path=str(model))


def test_architectures(model: Path) -> None:
    edit_config(model, lambda document: document.update(architectures=["BertForMaskedLM"]))
    message = failure(model_path=str(model))
    assert "BertForMaskedLM" in message
    assert "LlamaForCausalLM" in message
    edit_config(model, lambda document: document.pop("architectures"))
    assert "architectures" in failure(model_path=str(model))


def test_overrides_of_the_model_configuration(model: Path) -> None:
    assert "BertForMaskedLM" in failure(
        model_path=str(model), json_model_override_args={"architectures": ["BertForMaskedLM"]}
    )
    assert "hidden_act" in failure(model_path=str(model), json_model_override_args={"hidden_act": "gelu"})
    options = {"model_path": str(model), "device": "cpu", "json_model_override_args": {"max_position_embeddings": 8}}
    assert startup.prepare(ServerConfig(**options)).json_model_override_args == {"max_position_embeddings": 8}


def test_no_weights(model: Path) -> None:
    (model / "model.safetensors").unlink()
    assert f"no safetensors weights found under {model}" in failure(model_path=str(model))


def test_truncated_weights_name_a_tensor(model: Path) -> None:
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4])
    assert "model.safetensors" in failure(model_path=str(model))


def test_missing_tokenizer(model: Path, tmp_path: Path) -> None:
    (model / "tokenizer.json").unlink()
    message = failure(model_path=str(model))
    assert "tokenizer" in message
    assert str(model) in message
    assert startup.prepare(ServerConfig(model_path=str(model), device="cpu", skip_tokenizer_init=True))
    other = tmp_path / "other"
    other.mkdir()
    assert str(other) in failure(model_path=str(model), tokenizer_path=str(other))


def test_separate_tokenizer(model: Path, smoke_model: Path) -> None:
    (model / "tokenizer.json").unlink()
    config = ServerConfig(model_path=str(model), device="cpu", tokenizer_path=str(smoke_model))
    assert startup.prepare(config).effective_tokenizer_path == str(smoke_model)


def test_port_in_use() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        config = ServerConfig(model_path="m", device="cpu", port=port)
        with pytest.raises(StartupError, match=f"cannot listen on 127.0.0.1:{port}"):
            startup.check_port(config)
    startup.check_port(config)
    startup.check_port(config.resolved(port=0))


def test_host_that_does_not_exist() -> None:
    for port in (0, 30000):
        with pytest.raises(StartupError, match=r"cannot listen on 203\.0\.113\.1"):
            startup.check_port(ServerConfig(model_path="m", device="cpu", host="203.0.113.1", port=port))
