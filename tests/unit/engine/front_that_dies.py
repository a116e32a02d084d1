"""A front that starts a core, prints the core's process id and socket directory, and waits to be killed.

Run as ``python -m tests.unit.engine.front_that_dies MODEL_DIRECTORY``.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

from tests.unit.engine.conftest import ask, start_engine


async def main() -> None:
    engine = await start_engine(Path(sys.argv[1]), "1")
    client: Any = engine._client
    stream = engine.generate(ask("endless", "A", 1000, stream=True))
    await anext(stream)
    print(engine.info.process_id, client._process.directory, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
