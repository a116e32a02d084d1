"""Tokenizer of a model directory: text to ids, ids to text, and what the vocabulary calls special.

Format: tokenizer.json of the ``tokenizers`` library, with the tokenizer_config.json, special_tokens_map.json and chat
template files that Hugging Face model directories keep beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import tokenizers

from sglang_lite.frontend.detokenizer import (
    ByteLevelDetokenizer,
    IncrementalDetokenizer,
    TokenLevelDetokenizer,
    WindowedDetokenizer,
)
from sglang_lite.frontend.pieces import BytePieces, TextCache, id_to_token, read_pieces
from sglang_lite.types import RequestError, StartupError

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """A vocabulary with its text rules. Safe to share between threads.

    Attributes:
        vocab_size: number of ids, one more than the largest one.
        special_ids: ids of special added tokens (left out of text unless asked for).
        named_tokens: "bos_token", "eos_token", ... -> token text, as far as the directory names them.
        bos_token_id, eos_token_id: None where not named.
        chat_templates: name -> template source; "default" is the one for ordinary chats.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        named_tokens: Mapping[str, str] | None = None,
        chat_templates: Mapping[str, str] | None = None,
        added_special_tokens: Mapping[int, str] | None = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        _register_special_tokens(backend, added_special_tokens or {})
        self._backend = backend
        self.special_ids = frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.named_tokens = dict(named_tokens or {})
        self.chat_templates = dict(chat_templates or {})
        self.bos_token_id = self._named_id("bos_token")
        self.eos_token_id = self._named_id("eos_token")
        self._pieces = read_pieces(backend)
        self._texts: dict[bool, TextCache] = {}
        if self._pieces is not None:
            skipping = {True: self.special_ids, False: frozenset[int]()}
            self._texts = {skip: TextCache(self._pieces, ids) for skip, ids in skipping.items()}

    @classmethod
    def load(cls, path: str | Path, tokenizer_config: Mapping[str, Any] | None = None) -> Tokenizer:
        """Read a model or tokenizer directory (or a tokenizer.json itself).

        Args:
            path: the directory.
            tokenizer_config: contents of tokenizer_config.json where they come from elsewhere.
        Raises:
            StartupError: tokenizer.json is missing or cannot be read, or a file beside it is not valid JSON.
        """
        given = Path(path)
        file = given if given.suffix == ".json" else given / "tokenizer.json"
        if not file.is_file():
            raise StartupError(
                f"tokenizer not found: {file} does not exist. The model directory must hold a tokenizer.json (the "
                f"format of the `tokenizers` library); point --tokenizer-path at a directory that has one, or start "
                f"with --skip-tokenizer-init and send input_ids"
            )
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception for every malformed file
            raise StartupError(f"tokenizer file {file} cannot be read: {error}") from error
        directory = file.parent
        config = tokenizer_config if tokenizer_config is not None else _read_json(directory / "tokenizer_config.json")
        named = _named_tokens(_read_json(directory / "special_tokens_map.json")) | _named_tokens(config)
        return cls(
            backend,
            named_tokens=named,
            chat_templates=_chat_templates(directory, config),
            added_special_tokens=_special_added_tokens(config),
        )

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text.

        Raises:
            RequestError: the text holds half of a surrogate pair and so is not Unicode text.
        """
        _require_unicode(text)
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """Ids of several texts, in parallel threads of the library."""
        for text in texts:
            _require_unicode(text)
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encodings]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ids in one go. Ids without an entry in the vocabulary are left out."""
        known = [i for i in token_ids if 0 <= i < self.vocab_size]
        return self._backend.decode(known, skip_special_tokens=skip_special_tokens)

    def detokenizer(self, *, skip_special_tokens: bool = True) -> IncrementalDetokenizer:
        """A fresh incremental detokenizer for one sequence.

        There is no choice of spaces between special tokens: vocabularies of this format never add any.
        """
        if self._pieces is None:
            return WindowedDetokenizer(self._backend, skip_special_tokens=skip_special_tokens)
        texts = self._texts[skip_special_tokens]
        if isinstance(self._pieces, BytePieces):
            return ByteLevelDetokenizer(self._pieces, texts)
        return TokenLevelDetokenizer(self._pieces, texts, self.special_ids if skip_special_tokens else frozenset())

    def id_to_token(self, token_id: int) -> str | None:
        """The vocabulary entry as it is stored (not its text), None where there is none."""
        return id_to_token(self._backend, token_id)

    def token_to_id(self, token: str) -> int | None:
        return self._backend.token_to_id(token)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token stands for (after another token); empty for an id without an entry."""
        if isinstance(self._pieces, BytePieces):
            return self._pieces.token_bytes(token_id)
        if self._pieces is None:
            return self.decode([token_id], skip_special_tokens=False).encode()
        byte = self._pieces.byte(token_id)
        return bytes([byte]) if byte is not None else self._pieces.join([token_id], first=False).encode()

    def token_text(self, token_id: int) -> str:
        """Text of one token for logprob lists: special tokens shown, malformed UTF-8 replaced."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def _named_id(self, name: str) -> int | None:
        token = self.named_tokens.get(name)
        return None if token is None else self._backend.token_to_id(token)


def read_chat_templates(path: str | Path) -> dict[str, str]:
    """The chat templates of a model or tokenizer directory, as ``Tokenizer.load`` finds them.

    Raises:
        StartupError: a file cannot be read.
    """
    given = Path(path)
    directory = given.parent if given.suffix == ".json" else given
    return _chat_templates(directory, _read_json(directory / "tokenizer_config.json"))


def _require_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"text is not valid Unicode: character {error.start} is half of a surrogate pair", field="text"
        ) from error


def _register_special_tokens(backend: tokenizers.Tokenizer, tokens: Mapping[int, str]) -> None:
    """Mark tokens that only tokenizer_config.json calls special; ids that do not agree with the vocabulary stay out."""
    known = backend.get_added_tokens_decoder()
    missing = [
        tokenizers.AddedToken(token, special=True, normalized=False)
        for token_id, token in tokens.items()
        if token_id not in known and backend.token_to_id(token) == token_id
    ]
    if missing:
        backend.add_special_tokens(missing)


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        content = msgspec.json.decode(file.read_bytes())
    except OSError as error:
        raise StartupError(f"{file} cannot be read: {error.strerror}") from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise StartupError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise StartupError(f"{file} must hold a JSON object, not {type(content).__name__}")
    return content


def _named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    named = {}
    for name in _NAMED_TOKENS:
        value = config.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            named[name] = value
    return named


def _special_added_tokens(config: Mapping[str, Any]) -> dict[int, str]:
    entries = config.get("added_tokens_decoder")
    if not isinstance(entries, dict):
        return {}
    return {
        int(token_id): entry["content"]
        for token_id, entry in entries.items()
        if token_id.isdigit()
        and isinstance(entry, dict)
        and entry.get("special")
        and isinstance(entry.get("content"), str)
    }


def _chat_templates(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Templates of a directory. A chat_template.jinja file wins over the one inside tokenizer_config.json."""
    templates: dict[str, str] = {}
    value = config.get("chat_template")
    if isinstance(value, str):
        templates["default"] = value
    elif isinstance(value, list):
        for entry in value:
            if isinstance(entry, dict) and isinstance(entry.get("template"), str):
                templates[str(entry.get("name", "default"))] = entry["template"]
    for file in sorted((directory / "additional_chat_templates").glob("*.jinja")):
        templates[file.stem] = _read_text(file)
    default = directory / "chat_template.jinja"
    if default.is_file():
        templates["default"] = _read_text(default)
    return templates


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"chat template {file} cannot be read: {error}") from error
