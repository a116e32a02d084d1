"""Stand-ins for ``sgl_kernel`` and ``flashinfer`` on a machine without them.

``installed_stubs`` puts modules into ``sys.modules`` whose functions and classes have exactly the recorded signatures:
a call is bound first, then forwarded by keyword to the given double, or refused when there is none.
``registered_operators`` defines the recorded schemas as ``torch.ops.sgl_kernel.*`` with CPU kernels.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import ModuleType

import torch

from tests.support.kernel_records import ContractError, KernelRecord, load_record

Observer = Callable[[str, inspect.BoundArguments], None]
"""Told of every call that binds: the defining path of the function or method, and the arguments."""

Doubles = Mapping[str, object]
"""Public path of a function or class -> what computes it on the CPU. A class is doubled by a class or a factory."""


class KernelNotDoubled(NotImplementedError):
    """A function of a wheel was called that the test gave no double for."""


def make_stub_modules(
    line: str = "sglang-kernel",
    doubles: Doubles | None = None,
    attributes: Doubles | None = None,
    observer: Observer | None = None,
) -> dict[str, ModuleType]:
    """Modules by name for one kernel line and ``flashinfer``.

    Args:
        line: ``sglang-kernel`` or ``sgl-kernel``.
        doubles: what the recorded functions and classes forward to, by any public path. Only the arguments of the call
            are passed, by name, so that a double may leave out parameters that no adapter uses.
        attributes: further objects by path that the records do not list, such as enumerations.
        observer: is told of every call.

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
        _add_record(modules, record, by_definition, observer)
    if remaining:
        raise ContractError(f"doubles outside sgl_kernel and flashinfer: {', '.join(remaining)}")
    for path, value in (attributes or {}).items():
        _place(modules, path, value)
    return modules


@contextmanager
def installed_stubs(
    line: str = "sglang-kernel",
    doubles: Doubles | None = None,
    attributes: Doubles | None = None,
    observer: Observer | None = None,
) -> Iterator[dict[str, ModuleType]]:
    """The modules of ``make_stub_modules`` in ``sys.modules``; what was there before comes back afterwards."""
    modules = make_stub_modules(line, doubles, attributes, observer)
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


def _add_record(
    modules: dict[str, ModuleType], record: KernelRecord, doubles: Doubles, observer: Observer | None
) -> None:
    objects: dict[str, object] = {}
    for path in record.functions:
        objects[path] = _stub_function(_Stub(record, path, doubles.get(path), observer))
    for path in record.classes:
        objects[path] = _stub_class(_Stub(record, path, doubles.get(path), observer))
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


@dataclass(frozen=True, slots=True)
class _Stub:
    """A function, class or method of a record, what computes it, and who is told of calls."""

    record: KernelRecord
    path: str
    target: object
    observer: Observer | None

    def call(self, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """Bind as the wheel does, then pass on what the caller gave, by name where that is possible."""
        bound = self.record.bind(self.path, *args, **kwargs)
        if self.observer is not None:
            self.observer(self.path, bound)
        if not callable(self.target):
            raise KernelNotDoubled(f"{self.path} has no double in this test")
        if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in bound.signature.parameters.values()):
            return self.target(*bound.args, **bound.kwargs)
        named = {name: value for name, value in bound.arguments.items() if name != "kwargs"}
        return self.target(**named, **bound.arguments.get("kwargs", {}))


def _stub_function(stub: _Stub) -> Callable[..., object]:
    def function(*args: object, **kwargs: object) -> object:
        return stub.call(args, kwargs)

    module, _, function.__name__ = stub.path.rpartition(".")
    function.__qualname__ = function.__name__
    function.__module__ = module
    function.__signature__ = stub.record.functions[stub.path]  # type: ignore[attr-defined]  # read by inspect.signature
    return function


def _stub_class(stub: _Stub) -> type:
    recorded = stub.record.classes[stub.path]
    constructor = replace(stub, path=f"{stub.path}.__init__")

    def initialize(self: object, *args: object, **kwargs: object) -> None:
        object.__setattr__(self, "double", constructor.call(args, kwargs))

    def method(name: str) -> Callable[..., object]:
        def call(self: object, *args: object, **kwargs: object) -> object:
            made: object = object.__getattribute__(self, "double")
            return replace(stub, path=f"{stub.path}.{name}", target=getattr(made, name, None)).call(args, kwargs)

        call.__name__ = name
        call.__signature__ = _with_self(recorded.methods[name])  # type: ignore[attr-defined]  # read by inspect.signature
        return call

    initialize.__signature__ = _with_self(recorded.methods["__init__"])  # type: ignore[attr-defined]
    members: dict[str, object] = {name: method(name) for name in recorded.methods if name != "__init__"}
    for name in recorded.properties:
        members[name] = property(lambda self, name=name: getattr(self.double, name))
    members["__init__"] = initialize
    members["__signature__"] = recorded.methods["__init__"]
    module, _, class_name = stub.path.rpartition(".")
    return type(class_name, (), {**members, "__module__": module})


def _with_self(signature: inspect.Signature) -> inspect.Signature:
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return signature.replace(parameters=[own, *signature.parameters.values()])
