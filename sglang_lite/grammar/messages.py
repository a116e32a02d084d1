"""What the front and its compiler process say to each other: msgpack, each message behind its length."""

from __future__ import annotations

import struct

import msgspec

from sglang_lite.types import Grammar

LENGTH = struct.Struct("<I")


class Setup(msgspec.Struct, frozen=True, tag="setup"):
    """The first message; answered once the library is loaded. See ``Vocabulary`` for the last four fields."""

    backend: str
    memory_bytes: int
    tokens: list[bytes]
    size: int
    end_ids: tuple[int, ...]
    markers: dict[int, bytes] = {}


class Compile(msgspec.Struct, frozen=True, tag="compile"):
    """Compile a grammar."""

    grammar: Grammar


class Answer(msgspec.Struct, frozen=True):
    """``compiled`` if ``error`` is empty, else why not. ``loaded`` is False where the library could not be."""

    compiled: bytes = b""
    error: str = ""
    loaded: bool = True


def encode(message: Setup | Compile | Answer) -> bytes:
    """A message with its length."""
    body = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(body)) + body


def decode_request(body: bytes) -> Setup | Compile:
    """What a compiler process is asked."""
    return msgspec.msgpack.decode(body, type=Setup | Compile)


def decode_answer(body: bytes) -> Answer:
    """What it answers."""
    return msgspec.msgpack.decode(body, type=Answer)
