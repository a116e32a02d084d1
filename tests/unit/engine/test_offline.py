"""Engine: the chain model in this process, without a socket."""

from __future__ import annotations

import itertools
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from sglang_lite import Engine
from sglang_lite.types import RequestError, StartupError

GREEDY = {"temperature": 0, "max_new_tokens": 3}


@pytest.fixture(scope="module")
def engine(chain_model: Path) -> Iterator[Engine]:
    with Engine(model_path=str(chain_model), device="cpu", max_total_tokens=8192) as started:
        yield started


def test_no_socket_is_opened(chain_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **options: Any) -> None:
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket, "socket", refuse)
    before = psutil.Process().net_connections(kind="all")
    children = psutil.Process().children()
    with Engine(model_path=str(chain_model), device="cpu", max_total_tokens=1024) as engine:
        assert engine.generate("A", GREEDY)["text"] == "BCD"
        assert psutil.Process().net_connections(kind="all") == before
        assert psutil.Process().children() == children


def test_the_package_is_light_until_it_is_used() -> None:
    script = "import sys, sglang_lite; print('torch' in sys.modules, 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_one_prompt_gives_sglangs_object(engine: Engine) -> None:
    result = engine.generate("A", {"temperature": 0, "max_new_tokens": 10})
    assert result["text"] == "BCDABCDABC"
    assert result["output_ids"] == [66, 67, 68, 65, 66, 67, 68, 65, 66, 67]
    info = result["meta_info"]
    assert (info["prompt_tokens"], info["completion_tokens"]) == (1, 10)
    assert info["finish_reason"] == {"type": "length", "length": 10}
    assert info["e2e_latency"] > 0


def test_a_batch_gives_a_list_in_order(engine: Engine) -> None:
    results = engine.generate(["A", "0", "G"], {"temperature": 0, "max_new_tokens": 4})
    assert [result["text"] for result in results] == ["BCDA", "1234", "g"]


def test_parameters_for_each_prompt(engine: Engine) -> None:
    parameters = [{"temperature": 0, "max_new_tokens": count} for count in (1, 2, 3)]
    results = engine.generate(input_ids=[[65], [48], [112]], sampling_params=parameters)
    assert [result["text"] for result in results] == ["B", "12", "qXXr"]


def test_several_samples_of_a_prompt(engine: Engine) -> None:
    results = engine.generate(["A", "0"], {**GREEDY, "n": 2})
    assert [result["text"] for result in results] == ["BCD", "BCD", "123", "123"]
    assert len({result["meta_info"]["id"] for result in results}) == 4


def test_a_stop_string_ends_the_request(engine: Engine) -> None:
    result = engine.generate("A", {"temperature": 0, "max_new_tokens": 100, "stop": "CD"})
    assert result["text"] == "B"
    assert result["meta_info"]["finish_reason"] == {"type": "stop", "matched": "CD"}
    load = engine.load()
    assert (load.num_running, load.held_pages) == (0, 0)


def test_log_probabilities(engine: Engine) -> None:
    result = engine.generate(
        input_ids=[65, 66],
        sampling_params=GREEDY,
        return_logprob=True,
        logprob_start_len=0,
        top_logprobs_num=2,
        token_ids_logprob=[94],
        return_text_in_logprobs=True,
    )
    info = result["meta_info"]
    assert [entry[1:] for entry in info["output_token_logprobs"]] == [[67, "C"], [68, "D"], [65, "A"]]
    assert info["output_token_logprobs"][0][0] == pytest.approx(-0.84412, abs=1e-4)
    assert [entry[1] for entry in info["output_top_logprobs"][0]] == [67, 126]
    assert info["output_token_ids_logprobs"][0][0][0] == pytest.approx(-3.10629, abs=1e-4)
    assert [entry[1] for entry in info["input_token_logprobs"]] == [65, 66]
    assert info["input_token_logprobs"][0][0] is None
    assert info["input_token_logprobs"][1][0] == pytest.approx(-0.84412, abs=1e-4)
    assert info["input_top_logprobs"][0] is None


def test_a_stream_is_cumulative(engine: Engine) -> None:
    texts = [result["text"] for result in engine.generate("a", {"temperature": 0}, stream=True)]
    assert texts[-1] == "é🙂!"
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
    assert not any("\ufffd" in text for text in texts)


def test_streams_of_a_batch_carry_an_index(engine: Engine) -> None:
    last: dict[int, str] = {}
    for result in engine.generate(["A", "0"], GREEDY, stream=True):
        last[result["index"]] = result["text"]
    assert last == {0: "BCD", 1: "123"}


def test_a_stream_that_nobody_starts_owns_nothing(engine: Engine) -> None:
    streams = [engine.generate(["A", "0"], GREEDY, stream=True) for _ in range(50)]
    assert len(engine._processor) == 0
    assert engine.load().num_running + engine.load().num_waiting == 0
    with pytest.raises(RequestError):
        engine.generate(input_ids=[], stream=True)  # what is wrong shows at once
    assert [result["text"] for result in streams[0]][-1] in ("BCD", "123")
    del streams
    assert len(engine._processor) == 0


def test_leaving_a_stream_frees_its_pages(engine: Engine) -> None:
    stream = engine.generate("A", {"temperature": 0, "max_new_tokens": 1000}, stream=True)
    next(stream)
    assert engine.load().held_pages > 0
    stream.close()
    load = engine.load()
    assert (load.num_running, load.num_waiting, load.held_pages) == (0, 0, 0)


def test_the_prefix_cache_is_used_and_flushed(engine: Engine) -> None:
    prompt = "ABCD" * 20
    engine.generate(prompt, GREEDY)
    assert engine.generate(prompt, GREEDY)["meta_info"]["cached_tokens"] > 0
    assert engine.flush_cache()
    assert engine.generate(prompt, GREEDY)["meta_info"]["cached_tokens"] == 0


def test_threads_share_the_engine(engine: Engine) -> None:
    results: list[str] = []

    def work(text: str) -> None:
        results.extend(engine.generate(text, GREEDY)["text"] for _ in range(5))

    threads = [threading.Thread(target=work, args=(text,)) for text in ("A", "0", "A", "0")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(results) == ["123"] * 10 + ["BCD"] * 10


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({}, "prompt"),
        ({"prompt": "A", "input_ids": [65]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["A", 5]}, "prompt"),
        ({"prompt": ""}, "text"),
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": [65, 999]}, "input_ids"),
        ({"prompt": "A", "sampling_params": {"top_p": 0}}, "top_p"),
        ({"prompt": ["A", "0"], "sampling_params": [{}]}, "sampling_params"),
        ({"prompt": "A", "sampling_params": {"max_new_tokens": 2000}}, "max_new_tokens"),
    ],
)
def test_bad_arguments_name_the_field(engine: Engine, arguments: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestError) as refused:
        engine.generate(**arguments)
    assert (refused.value.status, refused.value.field) == (400, field)
    assert engine.generate("A", GREEDY)["text"] == "BCD"


def test_an_interrupt_leaves_the_engine_usable(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    executor: Any = engine._executor
    with monkeypatch.context() as patch:
        patch.setattr(type(executor), "collect", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.generate("A", {"temperature": 0, "max_new_tokens": 1000})
    assert engine.generate("A", GREEDY)["text"] == "BCD"
    assert engine.load().held_pages == 0


def _interrupt(executor: Any) -> None:
    raise KeyboardInterrupt


def test_without_a_tokenizer_ids_come_and_go(chain_model: Path) -> None:
    options: dict[str, Any] = {"skip_tokenizer_init": True, "max_total_tokens": 1024}
    with Engine(model_path=str(chain_model), device="cpu", **options) as engine:
        result = engine.generate(input_ids=[65], sampling_params=GREEDY)
        assert result["output_ids"] == [66, 67, 68]
        assert "text" not in result
        with pytest.raises(RequestError, match="tokenizer"):
            engine.generate("A", GREEDY)
        with pytest.raises(RequestError, match="stop"):
            engine.generate(input_ids=[[65], [66]], sampling_params=[GREEDY, {"stop": "x"}])
        assert len(engine._processor) == 0


def test_a_closed_engine_says_so(chain_model: Path) -> None:
    engine = Engine(model_path=str(chain_model), device="cpu", max_total_tokens=1024)
    engine.shutdown()
    engine.shutdown()
    with pytest.raises(RequestError, match="shut down"):
        engine.generate("A")


def test_a_wrong_configuration_is_a_startup_error(tmp_path: Path) -> None:
    with pytest.raises(StartupError):
        Engine(model_path=str(tmp_path / "nothing"), device="cpu")
