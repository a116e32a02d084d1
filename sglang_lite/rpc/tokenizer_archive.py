"""The files of the tokenizer as one archive, for a gateway that tokenizes itself."""

from __future__ import annotations

import hashlib
import io
import zipfile
from pathlib import Path

from sglang_lite.types import RequestError

_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "config.json",
    "generation_config.json",
)
_EPOCH = (1980, 1, 1, 0, 0, 0)


def tokenizer_archive(directory: str) -> tuple[bytes, str]:
    """A ZIP archive of the tokenizer's files and its SHA-256 in hexadecimal. The same files give the same bytes.

    Raises:
        RequestError: there are none.
    """
    root = Path(directory)
    found = [name for name in _FILES if (root / name).is_file()]
    if "tokenizer.json" not in found:
        raise RequestError("this server has no tokenizer.json to hand out", status=404)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in found:
            entry = zipfile.ZipInfo(name, _EPOCH)
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, (root / name).read_bytes())
    data = buffer.getvalue()
    return data, hashlib.sha256(data).hexdigest()
