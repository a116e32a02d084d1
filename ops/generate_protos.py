"""Compile ``proto/`` into the stubs of ``sglang_lite/rpc/generated``.

``python ops/generate_protos.py`` writes them; with ``--check`` it writes nothing and fails when they differ.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "proto"
TARGET = ROOT / "sglang_lite" / "rpc" / "generated"
_PACKAGE = "sglang_lite.rpc.generated"
# The compiler imports by the path of the .proto file; ours live inside the package, because `sglang` is another's name.
_OURS = re.compile(r"^(from|import) (sglang|smg)\.", re.MULTILINE)


def compile_protos(source: Path = SOURCE) -> dict[str, str]:
    """Path below ``generated`` -> text of each module, ``__init__.py`` files included."""
    from grpc_tools import protoc

    protos = sorted(str(path.relative_to(source)) for path in source.rglob("*.proto"))
    with tempfile.TemporaryDirectory() as directory:
        options = [f"--{kind}_out={directory}" for kind in ("python", "pyi", "grpc_python")]
        well_known = files("grpc_tools") / "_proto"
        status = protoc.main(["protoc", f"-I{source}", f"-I{well_known}", *options, *protos])
        if status:
            raise SystemExit(f"protoc failed with {status}")
        output = Path(directory)
        modules = {
            str(path.relative_to(output)): _OURS.sub(rf"\1 {_PACKAGE}.\2.", path.read_text())
            for path in sorted(output.rglob("*.py*"))
        }
    folders = {Path(name).parent for name in modules}
    folders |= {parent for folder in folders for parent in folder.parents}
    return modules | {str(folder / "__init__.py"): "" for folder in folders}


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail when a stub differs")
    check = parser.parse_args().check
    wanted = compile_protos()
    paths = [path for path in TARGET.rglob("*.py*") if "__pycache__" not in path.parts]
    present = {str(path.relative_to(TARGET)): path.read_text() for path in paths}
    if check:
        differing = sorted(name for name in wanted.keys() | present.keys() if wanted.get(name) != present.get(name))
        for name in differing:
            print(f"{name} differs from proto/: run python ops/generate_protos.py", file=sys.stderr)
        return 1 if differing else 0
    for name in present.keys() - wanted.keys():
        (TARGET / name).unlink()
    for name, text in wanted.items():
        path = TARGET / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
