"""What the router reads of a request's body, and what it adds. The rest is passed on as it came, never rebuilt."""

from __future__ import annotations

from typing import Any

import msgspec

from sglang_lite.router.errors import NOT_AN_OBJECT, RouterError

NOT_READ = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What reading JSON fails with: it is none, or it is nested too deeply."""

_BOOTSTRAP = ("bootstrap_host", "bootstrap_port", "bootstrap_room")
_EMPTY = msgspec.Raw(b"")


class Head(msgspec.Struct, kw_only=True):
    """The fields that decide where a request goes. ``Raw`` ones stay JSON text: a conversation's next turn begins
    with the text of the turn before, so that this text is a key for prefix caches as it is."""

    model: Any = None
    stream: Any = None
    rid: Any = None
    return_logprob: Any = None
    routed_dp_rank: Any = None
    data_parallel_rank: Any = None
    background: Any = None
    session_id: msgspec.Raw = _EMPTY
    session_params: msgspec.Raw = _EMPTY
    resume_from: msgspec.Raw = _EMPTY
    cache_salt: Any = None
    extra_key: msgspec.Raw = _EMPTY
    lora_path: msgspec.Raw = _EMPTY
    tools: msgspec.Raw = _EMPTY
    system: msgspec.Raw = _EMPTY
    messages: msgspec.Raw = _EMPTY
    text: msgspec.Raw = _EMPTY
    prompt: msgspec.Raw = _EMPTY
    input_ids: msgspec.Raw = _EMPTY
    input: msgspec.Raw = _EMPTY
    bootstrap_host: msgspec.Raw = _EMPTY
    bootstrap_port: msgspec.Raw = _EMPTY
    bootstrap_room: msgspec.Raw = _EMPTY

    @property
    def key(self) -> bytes:
        """The prompt as bytes, in the order in which a template would place it."""
        parts = (self.tools, self.system, self.messages, self.input_ids, self.text, self.prompt, self.input)
        return b"".join(bytes(part) for part in parts)

    @property
    def model_name(self) -> str | None:
        """The model asked for, if any."""
        return self.model if isinstance(self.model, str) and self.model else None

    @property
    def batch_size(self) -> int | None:
        """Prompts of a batch; None for a single one.

        Raises:
            RouterError: what was left to the worker to check is no JSON.
        """
        for raw in (self.text, self.prompt, self.input_ids):
            data = bytes(raw)
            if data.startswith(b"["):
                items = _decoded(data)
                if items and isinstance(items[0], str | list):
                    return len(items)
        return None


_decoder = msgspec.json.Decoder(Head)
_BACKSLASH = ord("\\")
_IDS, _STAND_IN = b'"input_ids"', b"-0e-77"
_LONG = 2048
"""Bytes of a body from which on its token ids are worth a look of their own."""


def parse_head(body: bytes) -> Head:
    """Read a body.

    Raises:
        RouterError: it is no JSON object.
    """
    try:
        return (_around_ids(body) if len(body) >= _LONG else None) or _decoder.decode(body)
    except NOT_READ:
        raise RouterError("bad_request", NOT_AN_OBJECT) from None


def _decoded(data: bytes) -> Any:
    try:
        return msgspec.json.decode(data)
    except NOT_READ:
        raise RouterError("bad_request", NOT_AN_OBJECT) from None


def _around_ids(body: bytes) -> Head | None:
    """Read a body without looking at each of its token ids, which is most of the work; None where that is not safe.

    The list is found by its name, and a number stands in for it while the rest is read. A list with a text, a list or
    a bracket in it, another field of this name, or one further down, is left to the decoder. What is in the list is
    the worker's to check.
    """
    name = body.find(_IDS)
    start = body.find(b"[", name + len(_IDS), name + len(_IDS) + 16)
    if name < 1 or start < 0 or body[name - 1] == _BACKSLASH or body[name + len(_IDS) : start].strip() != b":":
        return None
    end = body.find(b"]", start) + 1
    if not end or body.find(b'"', start, end) >= 0 or body.find(b"[", start + 1, end) >= 0:
        return None
    try:
        head = _decoder.decode(b"%b%b%b" % (body[:start], _STAND_IN, body[end:]))
    except NOT_READ:
        return None
    if bytes(head.input_ids) != _STAND_IN:
        return None
    head.input_ids = msgspec.Raw(body[start:end])
    return head


def with_fields(body: bytes, head: Head, fields: dict[str, Any]) -> bytes:
    """``body`` with ``fields``; bootstrap fields replace those of the caller."""
    if any(bytes(getattr(head, name)) for name in _BOOTSTRAP):
        return msgspec.json.encode({**_decoded(body), **fields})
    start = body.rstrip()[:-1].rstrip()
    comma = b"" if start.endswith(b"{") else b","
    return start + comma + msgspec.json.encode(fields)[1:]
