"""The draft model of ``--speculative-algorithm STANDALONE`` and the heads of NEXTN and EAGLE: where they are and
whether they fit. Free of torch."""

from __future__ import annotations

from pathlib import Path

from sglang_lite.config import ServerConfig
from sglang_lite.configuration.options.memory import DRAFT_HEADS
from sglang_lite.models.description import ModelDescription, read_description
from sglang_lite.models.draft_head_config import DraftHeadDescription, eagle_head, next_token_head
from sglang_lite.models.registry import check_checkpoint
from sglang_lite.models.repository import resolve_model_path
from sglang_lite.types import StartupError

_MOST_PADDING = 1024
"""Tokens by which two vocabularies of one tokenizer may differ: checkpoints pad theirs to a multiple of something."""


def check_draft_options(config: ServerConfig) -> None:
    """Options of speculation that do not fit together.

    Raises:
        StartupError: names them.
    """
    algorithm, path = config.speculative_algorithm, config.speculative_draft_model_path
    if algorithm is not None and algorithm not in ("ngram", "standalone", *DRAFT_HEADS):
        raise StartupError(
            f"--speculative-algorithm {algorithm.upper()} is not supported; allowed are NGRAM (guesses from the "
            f"request's own tokens), STANDALONE (a draft model), NEXTN (the multi-token prediction layer of the "
            f"model's checkpoint) and EAGLE (a head in a directory of its own)"
        )
    if algorithm == "standalone" and not path:
        raise StartupError(
            "--speculative-algorithm STANDALONE guesses with a second model: name it with "
            "--speculative-draft-model-path, or choose NGRAM, which needs none"
        )
    if path and algorithm not in ("standalone", *DRAFT_HEADS):
        raise StartupError(
            f"--speculative-draft-model-path {path}: only --speculative-algorithm STANDALONE and EAGLE take one"
        )
    if config.drafts_with_weights and algorithm is not None:
        _check_company(config, algorithm.upper())


def _check_company(config: ServerConfig, algorithm: str) -> None:
    if config.is_disaggregated:
        raise StartupError(
            f"--speculative-algorithm {algorithm} with --disaggregation-mode {config.disaggregation_mode} is not "
            f"supported: the draft model's KV is not transferred; guess with NGRAM on the decode side"
        )
    if config.drafts_with_head and config.tp_size > 1:
        raise StartupError(
            f"--speculative-algorithm {algorithm} with --tp-size {config.tp_size} is not supported: a draft head reads "
            f"the embedding and the output matrix, which the ranks share; use NGRAM or STANDALONE"
        )


def settle_draft_model(config: ServerConfig, description: ModelDescription) -> ServerConfig:
    """The configuration with the draft model as a local directory; unchanged without one.

    Args:
        description: of the served model.

    Raises:
        StartupError: there is no such model, its checkpoint is not usable, or it does not fit the served one.
    """
    path = config.speculative_draft_model_path
    if not path:
        return config
    try:
        directory = resolve_model_path(path)
        if config.drafts_with_head:
            return config.resolved(speculative_draft_model_path=str(directory))
        draft = read_description(directory)
        check_checkpoint(directory, draft)
    except StartupError as error:
        raise StartupError(f"--speculative-draft-model-path {path}: {error}") from error
    if draft.recurrent is not None:
        raise StartupError(
            f"--speculative-draft-model-path {path}: {draft.architecture} carries recurrent state, from which a wrong "
            f"guess cannot be taken back; choose a draft model of attention layers"
        )
    if draft.selected_keys is not None:
        raise StartupError(
            f"--speculative-draft-model-path {path}: the sparse attention of {draft.architecture} is not built for "
            f"draft models; choose another"
        )
    if abs(draft.vocab_size - description.vocab_size) > _MOST_PADDING:
        raise StartupError(
            f"--speculative-draft-model-path {path}: a vocabulary of {draft.vocab_size} tokens, where the served model "
            f"has {description.vocab_size}; the two must share a tokenizer"
        )
    return config.resolved(speculative_draft_model_path=str(directory))


def draft_head(
    config: ServerConfig, description: ModelDescription, directory: Path | str
) -> DraftHeadDescription | None:
    """The draft head of the configuration; None where none guesses.

    A path that is the served model's own directory, or none, means the multi-token prediction layer in it, whether it
    is called NEXTN or EAGLE: the two names are one, as in SGLang.

    Args:
        description, directory: of the served model.

    Raises:
        StartupError: there is no such head, or it is not one for this model.
    """
    if not config.drafts_with_head:
        return None
    path = config.speculative_draft_model_path
    try:
        if path is None or Path(path).resolve() == Path(directory).resolve():
            return next_token_head(directory, description)
        return eagle_head(path, description)
    except StartupError as error:
        flag = f"--speculative-draft-model-path {path}" if path else "--speculative-algorithm NEXTN"
        raise StartupError(f"{flag}: {error}") from error
