"""Grammars and guesses: the text that a grammar forces is verified in one step, and no output differs for it."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from sglang_lite.execution.device_runner import DeviceRunner
from sglang_lite.execution.model_runner import ModelRunner
from sglang_lite.grammar.backends import make_backend
from sglang_lite.grammar.base import CompiledGrammar, Vocabulary
from sglang_lite.scheduler import Scheduler, SchedulerConfig
from sglang_lite.scheduler.stats import SchedulerStats
from sglang_lite.types import FinishCode, Grammar, RequestFlags
from tests.support.host_device import HostDevice
from tests.support.scheduler_driver import request_columns
from tests.support.tiny_checkpoints import CASES, save_checkpoint
from tests.unit.execution.test_device_runner import CONTEXT, NUM_ROWS, PAGE_SIZE, device_runner, host_runner, kernels

__all__ = ["kernels"]

PIECES = [b"name", b'"fi', b"rst", b'":', b'{"', b"true", b"fal", b"first", b'"first_name', b"_n"]
"""Stand for tokens 3 to 12: letters nobody needs, so that texts have several spellings."""

TOKENS = [bytes([token]) for token in range(128)]
TOKENS[3:13] = PIECES
TOKENS[0] = TOKENS[1] = TOKENS[2] = b""
VOCABULARY = Vocabulary(TOKENS, 128, (2,))

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"first_name_of_it": {"type": "boolean"}, "the_second_name": {"enum": ["abcdefgh", "abcdefxy"]}},
        "required": ["first_name_of_it", "the_second_name"],
        "additionalProperties": False,
    }
)
PROMPTS = [[50, 60, 70, 50, 60, 70], [40, 41, 42], [99] * 9, [33, 34]]


@pytest.fixture(scope="module", params=["xgrammar", "llguidance"])
def grammar(request: pytest.FixtureRequest) -> CompiledGrammar:
    backend = make_backend(request.param, VOCABULARY)
    return backend.load(backend.compile(Grammar("json_schema", SCHEMA)))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("llama")
    save_checkpoint(CASES["llama"], directory)
    return str(directory)


def generate(
    runner: ModelRunner | DeviceRunner,
    grammar: CompiledGrammar,
    draft_tokens: int,
    sampling: dict[str, Any],
    constrained: tuple[int, ...] = (0, 1, 2),
    num_pages: int = 64,
) -> tuple[dict[int, list[int]], dict[int, int], SchedulerStats]:
    """Output tokens and finish codes by request; the requests that are not constrained run beside the others."""
    scheduler = Scheduler(
        SchedulerConfig(
            num_pages=num_pages,
            page_size=PAGE_SIZE,
            context_length=CONTEXT,
            max_running_requests=NUM_ROWS,
            chunked_prefill_size=8,
            overlap=False,
            eos_token_ids=(2,),
            draft_tokens=draft_tokens,
        )
    )
    keys = list(range(1, len(PROMPTS) + 1))
    columns = request_columns(keys, PROMPTS, max_new_tokens=54, **sampling)
    for place in range(len(keys)):
        if place not in constrained:
            columns.flags[place] |= RequestFlags.IGNORE_EOS
            columns.max_new_tokens[place] = 30
    scheduler.admit(columns, 0.0, {place: grammar.matcher() for place in constrained})
    outputs: dict[int, list[int]] = {key: [] for key in keys}
    codes: dict[int, int] = {}
    while (plan := scheduler.plan(0.0)) is not None:
        result = scheduler.commit(runner.run(plan), 0.0)
        for key, token, code in zip(result.key.tolist(), result.token.tolist(), result.finish.tolist(), strict=True):
            outputs[key].append(token)
            codes.update({key: code} if code else {})
        scheduler.audit()
    return outputs, codes, scheduler.stats()


SAMPLINGS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.9, "seed": np.arange(4) + 3},
    {"temperature": 2.0, "top_k": 20, "seed": np.arange(4) + 90},
    {"frequency_penalty": np.array([0.0, 0.5, 0.0, 0.0])},
)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "seeded", "hot", "penalty"])
def test_forced_text_takes_fewer_steps_and_changes_no_token(
    checkpoint: str, grammar: CompiledGrammar, sampling: dict[str, Any]
) -> None:
    expected, codes, plain = generate(host_runner(checkpoint), grammar, 0, sampling)
    found, same_codes, jumping = generate(host_runner(checkpoint), grammar, 7, sampling)
    assert found == expected and same_codes == codes
    for key in (1, 2, 3):
        if codes[key] == FinishCode.STOP_TOKEN:  # else whitespace filled it to the limit
            document = json.loads(b"".join(TOKENS[token] for token in found[key]))
            assert set(document) == {"first_name_of_it", "the_second_name"}
    assert jumping.accepted_tokens > 20
    assert jumping.steps < plain.steps


def test_a_row_that_is_preempted_goes_on_where_its_grammar_stood(checkpoint: str, grammar: CompiledGrammar) -> None:
    expected, _, _ = generate(host_runner(checkpoint), grammar, 0, {})
    found, _, stats = generate(host_runner(checkpoint), grammar, 7, {}, num_pages=26)
    assert found == expected
    assert stats.retractions > 0


def test_the_device_does_the_same(checkpoint: str, grammar: CompiledGrammar) -> None:
    expected, codes, host = generate(host_runner(checkpoint), grammar, 7, {})
    found, same_codes, device = generate(device_runner(checkpoint, HostDevice()), grammar, 7, {})
    assert found == expected and same_codes == codes
    assert device.accepted_tokens == host.accepted_tokens > 20


def test_a_matcher_takes_back_what_it_accepted(grammar: CompiledGrammar) -> None:
    """Any walk through the grammar, taken back, leaves the masks as they were, also over the end."""
    random = np.random.default_rng(1)
    matcher = grammar.matcher()
    bits = np.zeros(VOCABULARY.mask_width, dtype=np.int32)
    masks: list[bytes] = []
    tokens: list[int] = []
    while not matcher.is_terminated:
        matcher.fill(bits)
        masks.append(bits.tobytes())
        allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))
        dull = [token for token in allowed if not TOKENS[token].isspace()]
        tokens.append(int(random.choice(dull)))
        assert matcher.accept(tokens[-1])
    for count in (1, 2, 5, len(tokens)):
        matcher.rollback(count)
        matcher.fill(bits)
        assert bits.tobytes() == masks[-count]
        assert not matcher.is_terminated
        for token in tokens[len(tokens) - count :]:
            assert matcher.accept(token)
        assert matcher.is_terminated and matcher.forced() == []
