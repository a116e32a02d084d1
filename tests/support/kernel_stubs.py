"""Stand-ins for ``sgl_kernel`` and ``flashinfer`` on a machine without them.

``installed_stubs`` puts modules into ``sys.modules`` whose functions and classes have exactly the recorded signatures:
a call is bound first, then forwarded by keyword to the given double, or refused when there is none.
``registered_operators`` defines the recorded schemas as ``torch.ops.sgl_kernel.*`` with CPU kernels.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType

import torch

from tests.support.kernel_records import ContractError, KernelRecord, load_record

Doubles = Mapping[str, object]
"""Public path of a function or class -> what computes it on the CPU. A class is doubled by a class or a factory."""


class KernelNotDoubled(NotImplementedError):
    """A function of a wheel was called that the test gave no double for."""


def make_stub_modules(
    line: str = "sglang-kernel", doubles: Doubles | None = None, attributes: Doubles | None = None
) -> dict[str, ModuleType]:
    """Modules by name for one kernel line and ``flashinfer``.

    Args:
        line: ``sglang-kernel`` or ``sgl-kernel``.
        doubles: what the recorded functions and classes forward to, by any public path. Only the arguments of the call
            are passed, by name, so that a double may leave out parameters that no adapter uses.
        attributes: further objects by path that the records do not list, such as enumerations.

    Raises:
        ContractError: a double for something that the wheels do not have.
    """
    records = (load_record(line), load_record("flashinfer-python"))
    modules: dict[str, ModuleType] = {}
    remaining = dict(doubles or {})
    for record in records:
        root = next(iter(record.functions)).split(".")[0]
        own = {path: remaining.pop(path) for path in list(remaining) if path.split(".")[0] == root}
        by_definition = {record.defining_path(path): double for path, double in own.items()}
        _add_record(modules, record, by_definition)
    if remaining:
        raise ContractError(f"doubles outside sgl_kernel and flashinfer: {', '.join(remaining)}")
    for path, value in (attributes or {}).items():
        _place(modules, path, value)
    return modules


@contextmanager
def installed_stubs(
    line: str = "sglang-kernel", doubles: Doubles | None = None, attributes: Doubles | None = None
) -> Iterator[dict[str, ModuleType]]:
    """The modules of ``make_stub_modules`` in ``sys.modules``; what was there before comes back afterwards."""
    modules = make_stub_modules(line, doubles, attributes)
    before = {
        name: module for name, module in sys.modules.items() if name.split(".")[0] in ("sgl_kernel", "flashinfer")
    }
    for name in before:
        del sys.modules[name]
    sys.modules.update(modules)
    try:
        yield modules
    finally:
        for name in modules:
            sys.modules.pop(name, None)
        sys.modules.update(before)


@contextmanager
def registered_operators(
    line: str = "sglang-kernel", kernels: Mapping[str, Callable[..., object]] | None = None
) -> Iterator[None]:
    """``torch.ops.sgl_kernel`` with every recorded schema, and CPU kernels for the operators that are given.

    One line at a time; an operator without a kernel raises NotImplementedError as the wheel does for a CPU tensor.

    Raises:
        ContractError: a kernel for an operator that the line does not register.
    """
    record = load_record(line)
    unknown = set(kernels or {}) - set(record.schemas)
    if unknown:
        raise ContractError(f"{line} {record.version} registers no operator {', '.join(sorted(unknown))}")
    library = torch.library.Library("sgl_kernel", "DEF")
    try:
        for schema in record.schemas.values():
            library.define(schema)
        for name, kernel in (kernels or {}).items():
            library.impl(name, kernel, "CPU")
        yield
    finally:
        library._destroy()


def _add_record(modules: dict[str, ModuleType], record: KernelRecord, doubles: Doubles) -> None:
    objects: dict[str, object] = {
        path: _stub_function(record, path, doubles.get(path)) for path in record.functions
    } | {path: _stub_class(record, path, doubles.get(path)) for path in record.classes}
    for path, value in objects.items():
        _place(modules, path, value)
    for alias, path in record.aliases.items():
        _place(modules, alias, objects[path])


def _place(modules: dict[str, ModuleType], path: str, value: object) -> None:
    parent, _, name = path.rpartition(".")
    module = _module(modules, parent)
    setattr(module, name, value)


def _module(modules: dict[str, ModuleType], name: str) -> ModuleType:
    if name not in modules:
        modules[name] = ModuleType(name)
        modules[name].__path__ = []  # a package: submodules are found in sys.modules
        parent, _, leaf = name.rpartition(".")
        if parent:
            setattr(_module(modules, parent), leaf, modules[name])
    return modules[name]


def _call(
    record: KernelRecord, path: str, target: object, args: tuple[object, ...], kwargs: dict[str, object]
) -> object:
    """Bind as the wheel does, then pass on what the caller gave, by name where that is possible."""
    bound = record.bind(path, *args, **kwargs)
    if not callable(target):
        raise KernelNotDoubled(f"{path} has no double in this test")
    if bound.signature.parameters and any(p.kind is p.VAR_POSITIONAL for p in bound.signature.parameters.values()):
        return target(*bound.args, **bound.kwargs)
    named = {name: value for name, value in bound.arguments.items() if name != "kwargs"}
    return target(**named, **bound.arguments.get("kwargs", {}))


def _stub_function(record: KernelRecord, path: str, double: object) -> Callable[..., object]:
    def stub(*args: object, **kwargs: object) -> object:
        return _call(record, path, double, args, kwargs)

    stub.__name__ = path.rpartition(".")[2]
    stub.__qualname__ = stub.__name__
    stub.__module__ = path.rpartition(".")[0]
    stub.__signature__ = record.functions[path]  # type: ignore[attr-defined]  # read by inspect.signature
    return stub


def _stub_class(record: KernelRecord, path: str, double: object) -> type:
    recorded = record.classes[path]

    def initialize(self: object, *args: object, **kwargs: object) -> None:
        object.__setattr__(self, "double", _call(record, f"{path}.__init__", double, args, kwargs))

    def method(name: str) -> Callable[..., object]:
        def call(self: object, *args: object, **kwargs: object) -> object:
            made: object = object.__getattribute__(self, "double")
            return _call(record, f"{path}.{name}", getattr(made, name, None), args, kwargs)

        call.__name__ = name
        return call

    members: dict[str, object] = {name: method(name) for name in recorded.methods if name != "__init__"}
    for name in recorded.properties:
        members[name] = property(lambda self, name=name: getattr(self.double, name))
    members["__init__"] = initialize
    members["__signature__"] = recorded.methods["__init__"]
    module, _, class_name = path.rpartition(".")
    return type(class_name, (), {**members, "__module__": module})
