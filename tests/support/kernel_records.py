"""The contract records of the kernel wheels (``tests/contract/data``) as signatures that calls are bound against.

A record holds what one published version of a wheel offers: the signatures of its Python functions and classes, and for
the ``sgl_kernel`` lines the schemas of its registered operators. Needs neither torch nor a wheel.
"""

from __future__ import annotations

import ast
import functools
import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DATA = Path(__file__).parents[1] / "contract" / "data"

FILES = {
    "sglang-kernel": ("sgl_kernel-0.4.10-signatures.json", "sgl_kernel-0.4.10-schemas.json"),
    "sgl-kernel": ("sgl_kernel-0.3.21-signatures.json", "sgl_kernel-0.3.21-schemas.json"),
    "flashinfer-python": ("flashinfer-0.7.2-signatures.json", None),
}
"""Distribution name -> file of signatures, file of operator schemas."""


class ContractError(TypeError):
    """A call that the recorded function does not accept, or a name that the record does not have."""


@dataclass(frozen=True, slots=True)
class RecordedDefault:
    """A default that is no literal, as its text in the record: ``torch.bfloat16``, ``ActivationType.Swiglu``."""

    text: str

    def __repr__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class RecordedClass:
    """A class of the record: ``methods`` without ``self``, ``properties`` by name."""

    methods: Mapping[str, inspect.Signature]
    properties: frozenset[str]


@dataclass(frozen=True, slots=True)
class KernelRecord:
    """One wheel at one version.

    Attributes:
        distribution, version: as in the package metadata.
        functions, classes: by defining path (``flashinfer.norm.rmsnorm``).
        aliases: other public path -> defining path (``flashinfer.rmsnorm``).
        schemas: operator name -> schema text; empty where the wheel registers no operators.
        keywords: ``function or Class.method`` path -> keywords taken through ``**kwargs``.
    """

    distribution: str
    version: str
    functions: Mapping[str, inspect.Signature]
    classes: Mapping[str, RecordedClass]
    aliases: Mapping[str, str]
    schemas: Mapping[str, str]
    keywords: Mapping[str, tuple[str, ...]]

    def defining_path(self, path: str) -> str:
        """The path under which a function or class is defined, for any of its public paths.

        Raises:
            ContractError: the wheel has nothing of that name.
        """
        found = self.aliases.get(path, path)
        if found not in self.functions and found not in self.classes:
            raise ContractError(f"{self.distribution} {self.version} has no {path}")
        return found

    def signature(self, path: str) -> inspect.Signature:
        """Of a function, of a class (its constructor) or of ``Class.method``; methods come without ``self``.

        Raises:
            ContractError: the wheel has nothing of that name.
        """
        owner, _, method = path.rpartition(".")
        owner = self.aliases.get(owner, owner)
        if owner in self.classes:
            methods = self.classes[owner].methods
            if method not in methods:
                raise ContractError(f"{self.distribution} {self.version}: {owner} has no method {method}")
            return methods[method]
        found = self.defining_path(path)
        return self.functions[found] if found in self.functions else self.classes[found].methods["__init__"]

    def bind(self, path: str, /, *args: object, **kwargs: object) -> inspect.BoundArguments:
        """Bind a call as the wheel would; keywords behind ``**kwargs`` and deprecated positions are checked too.

        Raises:
            ContractError: wrong arity, an unknown keyword, a missing argument.
        """
        signature = self.signature(path)
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise ContractError(f"{path}{signature}: {error}") from error
        if bound.arguments.get("deprecated_positional_args"):
            raise ContractError(f"{path}: pass what follows page_size by keyword, positions are deprecated")
        owner, _, method = path.rpartition(".")
        allowed = self.keywords.get(f"{self.aliases.get(owner, owner)}.{method}")
        unknown = set(bound.arguments.get("kwargs", ())) - set(allowed or ())
        if allowed is not None and unknown:
            raise ContractError(f"{path}: unknown keywords {', '.join(sorted(unknown))}; it takes {', '.join(allowed)}")
        return bound


@functools.cache
def load_record(distribution: str) -> KernelRecord:
    """The record of ``sglang-kernel``, ``sgl-kernel`` or ``flashinfer-python``."""
    signatures_file, schemas_file = FILES[distribution]
    document = _read(signatures_file)
    schemas = {} if schemas_file is None else {name: op["schema"] for name, op in _read(schemas_file)["ops"].items()}
    functions = {path: _signature(entry) for path, entry in document["functions"].items()}
    return KernelRecord(
        distribution=document["package"],
        version=document["version"],
        functions=functions,
        classes={path: _recorded_class(entry) for path, entry in document.get("classes", {}).items()},
        aliases=_aliases(document),
        schemas=schemas,
        keywords={path: tuple(names) for path, names in _read("keywords.json").get(distribution, {}).items()},
    )


def record_of(path: str, line: str = "sglang-kernel") -> KernelRecord:
    """The record that a dotted path belongs to: ``flashinfer....`` or the given line of ``sgl_kernel``."""
    return load_record("flashinfer-python" if path.split(".")[0] == "flashinfer" else line)


def operator_parameters(schema: str) -> tuple[str, ...]:
    """Parameter names of an operator's schema, in order: ``f(Tensor(a!) out, float eps=1e-6) -> ()``."""
    inside = schema[schema.index("(") + 1 : schema.rindex(") ->")]
    return tuple(part.partition("=")[0].split()[-1] for part in inside.split(", ") if part and part != "*")


def _read(name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((DATA / name).read_text(encoding="utf-8"))
    return document


def _aliases(document: Mapping[str, Any]) -> dict[str, str]:
    aliases: dict[str, str] = {}
    for path, entry in {**document["functions"], **document.get("classes", {})}.items():
        for other in entry.get("also", ()):
            aliases[other] = path
        if entry.get("exported_at_top_level"):
            aliases[f"{path.split('.')[0]}.{path.rsplit('.')[-1]}"] = path
    return {alias: path for alias, path in aliases.items() if alias not in document["functions"]}


def _recorded_class(entry: Mapping[str, Any]) -> RecordedClass:
    methods = {name: _signature(method) for name, method in entry["methods"].items() if "params" in method}
    return RecordedClass(
        methods={name: _without_self(signature) for name, signature in methods.items()},
        properties=frozenset(name for name, method in entry["methods"].items() if method.get("property")),
    )


def _without_self(signature: inspect.Signature) -> inspect.Signature:
    return signature.replace(parameters=list(signature.parameters.values())[1:])


def _signature(entry: Mapping[str, Any]) -> inspect.Signature:
    if "signature" in entry:
        return _parsed_signature(entry["signature"])
    return inspect.Signature(
        [
            inspect.Parameter(
                parameter["name"],
                getattr(inspect.Parameter, parameter["kind"]),
                default=_default(parameter["default"]) if "default" in parameter else inspect.Parameter.empty,
                annotation=parameter.get("annotation", inspect.Parameter.empty),
            )
            for parameter in entry["params"]
        ],
        return_annotation=entry.get("returns", inspect.Signature.empty),
    )


def _parsed_signature(text: str) -> inspect.Signature:
    """From source text ``(a: int, *, b=1) -> int``."""
    function = ast.parse(f"def recorded{text}: ...").body[0]
    if not isinstance(function, ast.FunctionDef):
        raise ContractError(f"not a signature: {text}")
    arguments = function.args
    empty, kind = inspect.Parameter.empty, inspect.Parameter
    positional = [*arguments.posonlyargs, *arguments.args]
    missing: list[ast.expr | None] = [None] * (len(positional) - len(arguments.defaults))
    found = []
    for argument, default in zip(positional, [*missing, *arguments.defaults], strict=True):
        value = empty if default is None else _default(ast.unparse(default))
        which = kind.POSITIONAL_ONLY if argument in arguments.posonlyargs else kind.POSITIONAL_OR_KEYWORD
        found.append(kind(argument.arg, which, default=value, annotation=_annotation(argument)))
    if arguments.vararg:
        found.append(kind(arguments.vararg.arg, kind.VAR_POSITIONAL))
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        value = empty if default is None else _default(ast.unparse(default))
        found.append(kind(argument.arg, kind.KEYWORD_ONLY, default=value, annotation=_annotation(argument)))
    if arguments.kwarg:
        found.append(kind(arguments.kwarg.arg, kind.VAR_KEYWORD))
    returns = inspect.Signature.empty if function.returns is None else ast.unparse(function.returns)
    return inspect.Signature(found, return_annotation=returns)


def _annotation(argument: ast.arg) -> object:
    return inspect.Parameter.empty if argument.annotation is None else ast.unparse(argument.annotation)


def _default(text: str) -> object:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return RecordedDefault(text)
