"""Generation through low-rank adapters: as with merged weights, alone and mixed, each with a cache of its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sglang_lite.engine.offline import Engine
from sglang_lite.types import RequestError, StartupError
from tests.support.tiny_adapters import merge_adapter, write_adapter
from tests.support.tiny_checkpoints import TinyCase, save_checkpoint

PROMPTS = [[5, 17, 99, 3, 64, 8, 120, 41, 77, 30, 11, 12], [9, 8, 7, 33, 21], [5, 17, 99, 3, 64, 8, 1, 2, 3], [70]]
GREEDY = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "skip_tokenizer_init": True,
    "page_size": 4,
    "max_total_tokens": 1024,
    "max_running_requests": 8,
}


@dataclass(frozen=True)
class Files:
    """A base model, adapters a and b of it, and what each of them looks like merged."""

    base: Path
    adapters: dict[str, Path]
    merged: dict[str, Path]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    root = tmp_path_factory.mktemp("adapters")
    base = root / "base"
    save_checkpoint(TinyCase("Qwen3", {"head_dim": 32, "attention_bias": True}), base)
    few = ("q_proj", "v_proj", "down_proj")
    adapters = {
        "a": write_adapter(root / "a", base, seed=1),
        # Another rank, a part of the projections, a rank of its own for one of them and the other scaling.
        "b": write_adapter(
            root / "b", base, rank=3, projections=few, seed=2, ranks={"v_proj": 6}, use_rslora=False, alpha=3.0
        ),
        "c": write_adapter(root / "c", base, rank=4, seed=3, use_rslora=True, alpha=2.0, projections=few),
    }
    merged = {
        "a": merge_adapter(base, adapters["a"], root / "merged_a", scaling=2.0),
        "c": merge_adapter(base, adapters["c"], root / "merged_c", scaling=1.0),
    }
    return Files(base, adapters, merged)


@pytest.fixture(scope="module")
def engine(files: Files) -> Iterator[Engine]:
    paths = [f"a={files.adapters['a']}", f"b={files.adapters['b']}"]
    with Engine(model_path=str(files.base), lora_paths=paths, max_loras_per_batch=3, **OPTIONS) as engine:
        yield engine


def generate(engine: Engine, prompts: list[list[int]], adapters: Any = None) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = engine.generate(
        input_ids=prompts, sampling_params=GREEDY, lora_path=adapters, return_logprob=True, logprob_start_len=0
    )
    return results


def tokens(results: list[dict[str, Any]]) -> list[list[int]]:
    return [result["output_ids"] for result in results]


def logprobs(result: dict[str, Any]) -> list[float]:
    info = result["meta_info"]
    scored = info["input_token_logprobs"][1:] + info["output_token_logprobs"]
    return [entry[0] for entry in scored]


def test_an_adapter_equals_merged_weights(engine: Engine, files: Files) -> None:
    engine.flush_cache()
    adapted = generate(engine, PROMPTS, "a")
    with Engine(model_path=str(files.merged["a"]), **OPTIONS) as merged:
        expected = generate(merged, PROMPTS)
    assert tokens(adapted) == tokens(expected)
    for one, other in zip(adapted, expected, strict=True):
        assert logprobs(one) == pytest.approx(logprobs(other), abs=1e-4)
    assert tokens(adapted) != tokens(generate(engine, PROMPTS)), "the adapter changes what is said"


def test_a_mixed_batch_equals_solo_runs(engine: Engine) -> None:
    names = ["a", None, "b", "a"]
    solo = []
    for prompt, name in zip(PROMPTS, names, strict=True):
        engine.flush_cache()
        solo += generate(engine, [prompt], [name])
    engine.flush_cache()
    mixed = generate(engine, PROMPTS, names)
    assert tokens(mixed) == tokens(solo)
    for one, other in zip(mixed, solo, strict=True):
        assert logprobs(one) == pytest.approx(logprobs(other), abs=1e-4)


def test_the_base_model_is_not_touched(engine: Engine, files: Files) -> None:
    with Engine(model_path=str(files.base), **OPTIONS) as plain:
        expected = tokens(generate(plain, PROMPTS))
    assert tokens(generate(engine, PROMPTS)) == expected
    generate(engine, PROMPTS, "b")
    assert tokens(generate(engine, PROMPTS)) == expected


def test_adapters_do_not_share_cached_prefixes(engine: Engine) -> None:
    engine.flush_cache()
    prompt = PROMPTS[0]

    def cached(name: str | None) -> int:
        [result] = engine.generate(input_ids=[prompt], sampling_params=GREEDY, lora_path=[name])
        return int(result["meta_info"]["cached_tokens"])

    assert [cached(name) for name in (None, "a", "b")] == [0, 0, 0]
    assert all(cached(name) >= 8 for name in (None, "a", "b"))


def test_loading_and_unloading(engine: Engine, files: Files) -> None:
    with pytest.raises(RequestError, match="adapter 'c' is not loaded; loaded adapters: a, b") as caught:
        generate(engine, PROMPTS, "c")
    assert caught.value.status == 400
    engine.load_lora_adapter("c", str(files.adapters["c"]))
    assert dict(engine.adapters.loaded).keys() == {"a", "b", "c"}
    with pytest.raises(RequestError, match="already loaded"):
        engine.load_lora_adapter("c", str(files.adapters["c"]))
    with pytest.raises(RequestError, match="all 3 places for adapters are taken"):
        engine.load_lora_adapter("d", str(files.adapters["c"]))
    adapted = generate(engine, PROMPTS, "c")
    with Engine(model_path=str(files.merged["c"]), **OPTIONS) as merged:
        assert tokens(adapted) == tokens(generate(merged, PROMPTS))
    engine.unload_lora_adapter("c")
    with pytest.raises(RequestError, match="adapter 'c' is not loaded"):
        engine.unload_lora_adapter("c")
    # The same name with other weights: nothing of the old ones is left, in the slot or in the cache.
    engine.load_lora_adapter("c", str(files.adapters["b"]))
    replaced = generate(engine, PROMPTS, "c")
    assert [result["meta_info"]["cached_tokens"] for result in replaced] == [0] * len(PROMPTS)
    assert tokens(replaced) == tokens(generate(engine, PROMPTS, "b"))
    engine.unload_lora_adapter("c")


def test_an_adapter_in_use_is_not_unloaded(engine: Engine) -> None:
    stream = engine.generate(input_ids=PROMPTS[0], sampling_params=GREEDY, lora_path="a", stream=True)
    next(stream)
    with pytest.raises(RequestError, match="used by 1 open sequences"):
        engine.unload_lora_adapter("a")
    stream.close()
    assert generate(engine, PROMPTS[:1], "a")[0]["output_ids"], "it is still there"


def test_a_bad_adapter_leaves_nothing_behind(engine: Engine, files: Files, tmp_path: Path) -> None:
    large = write_adapter(tmp_path / "large", files.base, rank=64)
    with pytest.raises(RequestError, match=r"rank 64, over the limit of 6.*--max-lora-rank 64"):
        engine.load_lora_adapter("large", str(large))
    with pytest.raises(RequestError, match=r"no adapter_config.json"):
        engine.load_lora_adapter("none", str(tmp_path))
    assert engine.adapters.num_used == 2


def test_without_lora(files: Files) -> None:
    with Engine(model_path=str(files.base), **OPTIONS) as plain:
        with pytest.raises(RequestError, match="is not loaded; loaded adapters: none"):
            generate(plain, PROMPTS, "a")
        with pytest.raises(RequestError, match="started without --enable-lora"):
            plain.load_lora_adapter("a", str(files.adapters["a"]))


def test_a_start_with_a_bad_adapter_names_it(files: Files, tmp_path: Path) -> None:
    damaged = write_adapter(tmp_path / "damaged", files.base)
    (damaged / "adapter_model.safetensors").write_bytes(b"\0" * 4)
    with pytest.raises(StartupError, match=r"--lora-paths: adapter 'damaged': .*adapter_model.safetensors"):
        Engine(model_path=str(files.base), lora_paths=[f"damaged={damaged}"], **OPTIONS)
