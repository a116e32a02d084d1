"""lm_eval: log-likelihoods by echo and log-probabilities, and generation, over both OpenAI routes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.chain_model import SECOND_LOGPROB, SUCCESSOR_LOGPROB
from tests.support.server import ServerProcess

TASKS = Path(__file__).parent / "tasks"


@pytest.fixture(scope="module")
def evaluate(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Runs tasks of this folder against a server; returns lm_eval's results."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):  # read at import
            patch.setenv(name, "1")
        lm_eval = pytest.importorskip("lm_eval", reason="needs the optional group `clients`")
        from lm_eval.tasks import TaskManager
    folder = tmp_path_factory.mktemp("tasks")
    shutil.copytree(TASKS, folder, dirs_exist_ok=True)
    for task in folder.glob("*.yaml"):
        task.write_text(task.read_text().replace("PLACEHOLDER", str(TASKS / "chain.jsonl")))
    manager = TaskManager(include_path=str(folder), include_defaults=False)

    def run(model: str, url: str, task: str, **options: Any) -> Any:
        settings = {"model": "chain", "base_url": url, "num_concurrent": 2, "max_retries": 1, **options}
        return lm_eval.simple_evaluate(
            model=model,
            model_args=settings,
            tasks=[task],
            task_manager=manager,
            apply_chat_template=model == "local-chat-completions",
            cache_requests=False,
            bootstrap_iters=0,
            log_samples=True,
        )

    return run


def test_log_likelihoods(server: ServerProcess, chain_model: Path, evaluate: Any) -> None:
    found = evaluate(
        "local-completions",
        f"{server.url}/v1/completions",
        "chain_choice",
        tokenizer=str(chain_model),
        tokenizer_backend="huggingface",
        max_length=256,
    )
    assert found["results"]["chain_choice"]["acc,none"] == 1.0
    samples = {sample["doc"]["question"]: sample["filtered_resps"] for sample in found["samples"]["chain_choice"]}
    # (log-likelihood, whether it is what greedy decoding gives) of each choice.
    (right, greedy), (wrong, not_greedy), _ = samples["A"]
    assert (right, greedy) == (pytest.approx(SUCCESSOR_LOGPROB, abs=1e-3), True)
    assert wrong < SECOND_LOGPROB
    assert not not_greedy
    assert samples["from 0"][1] == (pytest.approx(5 * SUCCESSOR_LOGPROB, abs=1e-3), True)


def test_generation_over_completions(server: ServerProcess, chain_model: Path, evaluate: Any) -> None:
    found = evaluate(
        "local-completions",
        f"{server.url}/v1/completions",
        "chain_generate",
        tokenizer=str(chain_model),
        tokenizer_backend="huggingface",
        max_length=256,
    )
    assert found["results"]["chain_generate"]["exact_match,none"] == 1.0


def test_generation_over_chat_completions(server: ServerProcess, evaluate: Any) -> None:
    found = evaluate("local-chat-completions", f"{server.url}/v1/chat/completions", "chain_generate")
    assert found["results"]["chain_generate"]["exact_match,none"] == 1.0
