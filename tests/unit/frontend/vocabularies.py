"""Small vocabularies of every kind of decoder, built or trained on the spot."""

from __future__ import annotations

from functools import cache

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from sglang_lite.frontend.pieces import byte_level_alphabet
from sglang_lite.frontend.tokenizer import Tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog, again and again.",
    "삼겹살 먹고 싶다. 세상에서 가장 맛있는 삼겹살!",
    "你好世界。今天天气很好。中文分词世界",
    "Ünïcødé ünï Ñandú façade naïve — “quotes” … 12345",
    "👩‍👩‍👧‍👦 🙂🙂 🎉 emoji 🙂",
    "def main():\n    return 'x' * 3\n\n# done\n",
    "Привет мир, как дела? Привет!",
]
BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]


def chain_backend() -> Backend:
    """Ids 0..255 are the bytes, 256 is XX, 257..259 are special."""
    characters = sorted(byte_level_alphabet().items(), key=lambda entry: entry[1])
    vocabulary = dict(characters) | {"XX": 256}
    backend = Backend(models.BPE(vocabulary, [("X", "X")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(name, special=True) for name in ("<|bos|>", "<|eos|>", "<|pad|>")])
    return backend


def byte_level_backend() -> Backend:
    """Trained byte-level BPE with special tokens and awkward ordinary added tokens."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens([AddedToken("two words"), AddedToken("世界 "), AddedToken("<think>"), AddedToken("é")])
    backend.add_special_tokens([AddedToken("<|end|>", special=True), AddedToken("<| spaced 世 |>", special=True)])
    return backend


def _sentence_piece_model() -> models.BPE:
    pieces = ["<unk>", "<s>", "</s>", *BYTE_TOKENS]
    letters = sorted({character for text in CORPUS[:2] for character in text.replace(" ", "▁")})
    words = ["▁T", "▁Th", "▁The", "▁f", "▁fo", "▁fox", "▁▁", "qu", "▁,"]
    merges = [("▁", "T"), ("▁T", "h"), ("▁Th", "e"), ("▁", "f"), ("▁f", "o"), ("▁fo", "x"), ("▁", "▁"), ("q", "u")]
    vocabulary = {piece: index for index, piece in enumerate(dict.fromkeys([*pieces, *letters, *words]))}
    return models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)


def byte_fallback_backend(*, strip: bool) -> Backend:
    """SentencePiece style: Llama 2 (one leading space stripped) or Gemma (not stripped)."""
    backend = Backend(_sentence_piece_model())
    steps: list[normalizers.Normalizer] = [normalizers.Replace(" ", "▁")]
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), *steps] if strip else steps)
    chain: list[decoders.Decoder] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*chain, decoders.Strip(" ", 1, 0)] if strip else chain)
    backend.add_special_tokens([AddedToken(name, special=True) for name in ("<unk>", "<s>", "</s>")])
    backend.add_tokens([AddedToken("▁added piece"), AddedToken("[INST]")])
    return backend


def metaspace_backend(prepend_scheme: str = "always") -> Backend:
    backend = Backend(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme)
    backend.decoder = decoders.Metaspace(prepend_scheme=prepend_scheme)
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>", "</s>"], show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def word_piece_backend() -> Backend:
    backend = Backend(models.WordPiece(unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(cleanup=True)
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=["[UNK]", "[SEP]"], show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def word_level_backend() -> Backend:
    """Words joined by spaces, for want of a decoder."""
    backend = Backend(models.WordLevel({"[UNK]": 0, "hi": 1, "world": 2, "!": 3}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return backend


def suffix_backend() -> Backend:
    """A decoder that treats the last token differently, so no token's text is certain before the next one."""
    backend = Backend(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.BPEDecoder(suffix="</w>")
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<unk>"], end_of_word_suffix="</w>", show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


BUILDERS = {
    "chain": chain_backend,
    "byte level": byte_level_backend,
    "byte fallback, stripped": lambda: byte_fallback_backend(strip=True),
    "byte fallback": lambda: byte_fallback_backend(strip=False),
    "metaspace": metaspace_backend,
    "metaspace, never": lambda: metaspace_backend("never"),
    "word piece": word_piece_backend,
    "word level": word_level_backend,
    "suffix": suffix_backend,
}


@cache
def vocabulary(name: str) -> Tokenizer:
    return Tokenizer(BUILDERS[name]())
