"""Record what the installed kernel wheels offer, for the tests that hold every call of the CUDA adapters against it.

    python ops/record_kernel_contracts.py --output tests/contract/data

Run it where the wheels are installed, with a CUDA driver: importing ``sgl_kernel`` loads libraries that need one.
FlashInfer alone (``--only flashinfer``) needs no driver. Files are named after the version, so that a new pin comes
with a new file; ``tests/support/kernel_records.py`` names the files that the tests read.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.metadata
import inspect
import json
import pkgutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

SGL_KERNEL_LINES = ("sglang-kernel", "sgl-kernel")

FLASHINFER_MODULES = (
    *("activation", "attention", "cascade", "comm", "concat_ops", "decode", "fused_moe", "gemm", "grouped_mm"),
    *(
        "logits_processor",
        "mla",
        "norm",
        "page",
        "prefill",
        "quantization",
        "rope",
        "sampling",
        "sparse",
        "topk",
        "utils",
    ),
)

RECORDED_CLASSES = (
    "Wrapper",
    "BatchAttention",
    "LogitsPipe",
    "MinP",
    "Sample",
    "Softmax",
    "Temperature",
    "TopK",
    "TopP",
)
"""Endings of the names of classes that are recorded: what is planned and run, not enumerations and plans."""

DISPATCH_KEYS = ("CUDA", "CPU", "CompositeImplicitAutograd", "CompositeExplicitAutograd", "Meta")


def record_flashinfer() -> dict[str, Any]:
    """Functions and classes of FlashInfer's public modules."""
    root = importlib.import_module("flashinfer")
    modules = [root, *(importlib.import_module(f"flashinfer.{name}") for name in FLASHINFER_MODULES)]
    functions: dict[str, Any] = {}
    classes: dict[str, Any] = {}
    for paths, value in _public_objects(modules):
        path, *others = paths
        entry = class_entry(value) if inspect.isclass(value) else signature_entry(value)
        (classes if inspect.isclass(value) else functions)[path] = {**entry, **({"also": others} if others else {})}
    return {
        "package": "flashinfer-python",
        "version": importlib.metadata.version("flashinfer-python"),
        "import_name": "flashinfer",
        "note": 'inspect.signature of the public Python API; "also" lists other public import paths of the same object',
        "functions": dict(sorted(functions.items())),
        "classes": dict(sorted(classes.items())),
    }


def record_sgl_kernel(distribution: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """(signatures, operator schemas) of the installed line."""
    root = importlib.import_module("sgl_kernel")
    for info in pkgutil.walk_packages(root.__path__, "sgl_kernel."):
        _import_or_skip(info.name)
    version = importlib.metadata.version(distribution)
    modules = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "sgl_kernel"}
    signatures = {
        "package": distribution,
        "version": version,
        "import_name": "sgl_kernel",
        "top_level_exports": sorted(name for name, value in vars(root).items() if inspect.isfunction(value)),
        "functions": dict(sorted(_own_functions(root, modules))),
    }
    import torch

    schemas = {
        "package": distribution,
        "version": version,
        "torch": torch.__version__,
        "method": "registered schemas of the loaded extension libraries; dispatch lists the keys that have a kernel",
        "ops": dict(sorted(_operators())),
    }
    return signatures, schemas


def signature_entry(function: Callable[..., object]) -> dict[str, Any]:
    """Parameters in order and the result, as text."""
    signature = inspect.signature(function)
    entry: dict[str, Any] = {"params": [_parameter(parameter) for parameter in signature.parameters.values()]}
    if signature.return_annotation is not inspect.Signature.empty:
        entry["returns"] = annotation_text(signature.return_annotation)
    return entry


def class_entry(value: type) -> dict[str, Any]:
    """Public methods and properties, the constructor included."""
    methods: dict[str, Any] = {}
    for name in sorted(dir(value)):
        if name.startswith("_") and name != "__init__":
            continue
        member = inspect.getattr_static(value, name)
        if isinstance(member, property):
            methods[name] = {"property": True}
        elif inspect.isfunction(member) or isinstance(member, functools.partialmethod):
            methods[name] = signature_entry(getattr(value, name))
    return {"methods": methods}


def annotation_text(annotation: object) -> str:
    """``torch.Tensor``, ``Optional[int]``; texts stay as they are."""
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation).replace("typing.", "")


def _parameter(parameter: inspect.Parameter) -> dict[str, str]:
    entry = {"name": parameter.name, "kind": parameter.kind.name}
    if parameter.default is not inspect.Parameter.empty:
        entry["default"] = repr(parameter.default)
    if parameter.annotation is not inspect.Parameter.empty:
        entry["annotation"] = annotation_text(parameter.annotation)
    return entry


def _public_objects(modules: Sequence[ModuleType]) -> Iterator[tuple[list[str], Any]]:
    """(paths, object) of what the modules offer: first the path in the module that it belongs to, then the others."""
    paths: dict[int, list[str]] = {}
    objects: dict[int, Any] = {}
    for module in modules:
        root = module.__name__.split(".")[0]
        for name, value in vars(module).items():
            is_own = (getattr(value, "__module__", None) or "").split(".")[0] == root
            if name.startswith("_") or not is_own or not (_is_function(value) or _is_recorded_class(value)):
                continue
            paths.setdefault(id(value), []).append(f"{module.__name__}.{name}")
            objects[id(value)] = value
    for key, found in paths.items():
        home = ".".join(objects[key].__module__.split(".")[:2])
        yield (
            sorted(found, key=lambda path, home=home: (not path.startswith(f"{home}."), -path.count("."), path)),
            objects[key],
        )


def _is_function(value: object) -> bool:
    """Functions, and what caches a function."""
    return inspect.isfunction(value) or (callable(value) and inspect.isfunction(getattr(value, "__wrapped__", None)))


def _is_recorded_class(value: object) -> bool:
    return inspect.isclass(value) and value.__name__.endswith(RECORDED_CLASSES)


def _own_functions(root: ModuleType, modules: dict[str, ModuleType]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Functions under the module that defines them."""
    for module_name, module in modules.items():
        for name, value in vars(module).items():
            if inspect.isfunction(value) and value.__module__ == module_name and not name.startswith("_"):
                exported = getattr(root, name, None) is value
                yield f"{module_name}.{name}", {**signature_entry(value), "exported_at_top_level": exported}


def _operators() -> Iterator[tuple[str, dict[str, Any]]]:
    """Operators that are registered under ``sgl_kernel``."""
    import torch

    for schema in torch._C._jit_get_all_schemas():
        namespace, _, name = schema.name.partition("::")
        if namespace != "sgl_kernel":
            continue
        keys = [key for key in DISPATCH_KEYS if torch._C._dispatch_has_kernel_for_dispatch_key(schema.name, key)]
        yield (
            name,
            {
                "schema": str(schema).removeprefix("sgl_kernel::"),
                "dispatch": keys,
                "mutates": [
                    argument.name
                    for argument in schema.arguments
                    if argument.alias_info and argument.alias_info.is_write
                ],
            },
        )


def _import_or_skip(name: str) -> None:
    """Parts of the wheel are for other devices and do not import here; they are said and left out."""
    try:
        importlib.import_module(name)
    except (ImportError, AttributeError, OSError) as error:
        print(f"left out: {name}: {error}", file=sys.stderr)


def _write(directory: Path, name: str, document: dict[str, Any]) -> None:
    path = directory / name
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(path)


def main(words: Sequence[str] | None = None) -> int:
    """Write the records of what is installed."""
    parser = argparse.ArgumentParser(description="Record what the installed kernel wheels offer.")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="directory of the records")
    parser.add_argument("--only", choices=("flashinfer", "sgl_kernel"), help="record one of the two")
    options = parser.parse_args(words)
    installed = {distribution.metadata["Name"] for distribution in importlib.metadata.distributions()}
    lines = [line for line in SGL_KERNEL_LINES if line in installed]
    if options.only != "flashinfer":
        if len(lines) != 1:
            parser.error(
                f"one of {' or '.join(SGL_KERNEL_LINES)} must be installed, found {', '.join(lines) or 'none'}"
            )
        signatures, schemas = record_sgl_kernel(lines[0])
        _write(options.output, f"sgl_kernel-{signatures['version']}-signatures.json", signatures)
        _write(options.output, f"sgl_kernel-{signatures['version']}-schemas.json", schemas)
    if options.only != "sgl_kernel":
        document = record_flashinfer()
        _write(options.output, f"flashinfer-{document['version']}-signatures.json", document)
    return 0


if __name__ == "__main__":
    sys.exit(main())
