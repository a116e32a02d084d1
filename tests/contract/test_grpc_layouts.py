"""C976: names, numbers and types of the messages and RPCs; the stubs in the package are the compiler's output."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor

from sglang_lite.rpc.generated.sglang.grpc.scheduler import sglang_scheduler_pb2
from sglang_lite.rpc.generated.sglang.runtime.v1 import sglang_pb2
from sglang_lite.rpc.generated.smg.grpc.common import common_pb2

ROOT = Path(__file__).parents[2]
LAYOUTS = json.loads((ROOT / "tests/contract/data/grpc_layouts.json").read_text())
FILES = {module.DESCRIPTOR.package: module.DESCRIPTOR for module in (sglang_pb2, sglang_scheduler_pb2, common_pb2)}
_SCALARS = {
    getattr(FieldDescriptor, f"TYPE_{name.upper()}"): name
    for name in ("string", "bytes", "bool", "float", "double", "int32", "int64", "uint32", "uint64")
}


def _type(field: Any) -> str:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        entry = field.message_type.fields_by_name
        return f"map<{_type(entry['key'])},{_type(entry['value'])}>"
    return _SCALARS.get(field.type) or (field.message_type or field.enum_type).name


def _row(field: Any) -> list[Any]:
    type_name = _type(field)
    oneof = field.containing_oneof
    is_optional = oneof is not None and oneof.name == f"_{field.name}"
    label = "opt" if is_optional else "rep" if field.is_repeated and not type_name.startswith("map<") else ""
    return [field.number, field.name, label, type_name, None if oneof is None or is_optional else oneof.name]


def _number(row: list[Any]) -> int:
    return int(row[0])


@pytest.mark.parametrize("package", LAYOUTS)
def test_messages_and_enums(package: str) -> None:
    found = {
        name: sorted(map(_row, message.fields), key=_number)
        for name, message in FILES[package].message_types_by_name.items()
    }
    assert found == {name: sorted(rows, key=_number) for name, rows in LAYOUTS[package]["messages"].items()}
    enums = {
        name: {value.name: value.number for value in kind.values}
        for name, kind in FILES[package].enum_types_by_name.items()
    }
    assert enums == LAYOUTS[package]["enums"]


@pytest.mark.parametrize(("package", "count"), [("sglang.runtime.v1", 29), ("sglang.grpc.scheduler", 15)])
def test_rpcs(package: str, count: int) -> None:
    service = FILES[package].services_by_name[LAYOUTS[package]["service"]]
    found = {
        method.name: [method.input_type.name, method.output_type.name, method.server_streaming]
        for method in service.methods
    }
    assert found == LAYOUTS[package]["methods"]
    assert len(found) == count
    assert not any(method.client_streaming for method in service.methods)


def test_stubs_are_what_the_compiler_writes() -> None:
    command = [sys.executable, str(ROOT / "ops/generate_protos.py"), "--check"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
