"""The draft model of ``--speculative-algorithm STANDALONE``: where it is and whether it fits. Free of torch."""

from __future__ import annotations

from sglang_lite.config import ServerConfig
from sglang_lite.models.description import ModelDescription, read_description
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
    if algorithm is not None and algorithm not in ("ngram", "standalone"):
        raise StartupError(
            f"--speculative-algorithm {algorithm.upper()} is not supported: draft heads (EAGLE, EAGLE3, NEXTN and "
            f"others) are not built; STANDALONE guesses with a draft model, NGRAM from the request's own tokens"
        )
    if algorithm == "standalone" and not path:
        raise StartupError(
            "--speculative-algorithm STANDALONE guesses with a second model: name it with "
            "--speculative-draft-model-path, or choose NGRAM, which needs none"
        )
    if path and algorithm != "standalone":
        raise StartupError(
            f"--speculative-draft-model-path {path}: only --speculative-algorithm STANDALONE uses a draft model"
        )
    if algorithm == "standalone" and config.is_disaggregated:
        raise StartupError(
            f"--speculative-algorithm STANDALONE with --disaggregation-mode {config.disaggregation_mode} is not "
            f"supported: the draft model's KV is not transferred"
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
