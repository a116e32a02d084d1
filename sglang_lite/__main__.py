"""``python -m sglang_lite``: the same as the ``sglang-lite`` command."""

from __future__ import annotations

import sys

from sglang_lite.cli import main

if __name__ == "__main__":
    sys.exit(main())
