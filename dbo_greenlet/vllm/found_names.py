"""What a module offers, read from the module itself or from its source text, in one form for both.

`describe_module` looks at the imported module and so sees what is really there, other plugins' patches included.
`describe_source` reads a file without importing anything, which works for a vLLM that cannot run on this machine.
"""

from __future__ import annotations

import ast
import dis
import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import FunctionType, ModuleType
from typing import Any

__all__ = ["Found", "Parameter", "describe_module", "describe_source"]


@dataclass(frozen=True)
class Parameter:
    """One parameter of a function; `name` carries its stars, as in "*args"."""

    name: str
    has_default: bool = False


@dataclass(frozen=True)
class Found:
    """One name of a module. `kind` is "class", "function", "property" or "value".

    `parameters` is None for what is no function and for functions that are made at import time, whose parameters a
    source text does not tell. `free_variables` is None where they are not known. `fixed_slots`: a class whose
    instances take no further attributes.
    """

    kind: str
    parameters: tuple[Parameter, ...] | None = None
    free_variables: tuple[str, ...] | None = None
    fixed_slots: bool = False


@dataclass
class _Description:
    """Names as they are collected: "Class.method" for a method, "Class#name" for what __init__ or the body sets."""

    names: dict[str, Found] = field(default_factory=dict)


# -- an imported module ------------------------------------------------------------------------------------------------


def describe_module(module: ModuleType, wanted: set[str]) -> dict[str, Found]:
    """Those of the `wanted` names ("name", "Class.method", "Class#attribute") that the module has."""
    found = {}
    for name in wanted:
        owner_name, hash_sign, attribute = name.partition("#")
        if hash_sign:
            owner = getattr(module, owner_name, None)
            if isinstance(owner, type) and attribute in _attributes_of(owner):
                found[name] = Found("value")
            continue
        described = _describe_object(_look_up(module, name))
        if described is not None:
            found[name] = described
    return found


_MISSING = object()


def _look_up(module: ModuleType, name: str) -> Any:
    owner: Any = module
    for part in name.split("."):
        # getattr_static: a property must be seen as one, and not be run.
        owner = inspect.getattr_static(owner, part, _MISSING)
        if owner is _MISSING:
            return _MISSING
    return owner


def _describe_object(value: Any) -> Found | None:
    if value is _MISSING:
        return None
    if isinstance(value, type):
        return Found("class", fixed_slots=value.__dictoffset__ == 0)
    if isinstance(value, property):
        return Found("property")
    if isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    if callable(value):
        # Through wrappers: a function that was replaced by one of ours is judged by the one that it stands for.
        return _describe_function(inspect.unwrap(value))
    return Found("value")


def _describe_function(function: Any) -> Found:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return Found("value")
    stars: dict[Any, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    parameters = tuple(
        Parameter(stars.get(each.kind, "") + each.name, each.default is not each.empty)
        for each in signature.parameters.values()
    )
    free = function.__code__.co_freevars if isinstance(function, FunctionType) else None
    return Found("function", parameters, free)


def _attributes_of(owner: type) -> set[str]:
    """Attributes that instances have: what `__init__` stores on anything, fields, and what the classes hold."""
    names: set[str] = set()
    for cls in owner.__mro__:
        names.update(cls.__dict__, inspect.get_annotations(cls))
        constructor = cls.__dict__.get("__init__")
        constructor = None if constructor is None else inspect.unwrap(constructor)
        if isinstance(constructor, FunctionType):
            stores = (each for each in dis.get_instructions(constructor) if each.opname == "STORE_ATTR")
            names.update(str(each.argval) for each in stores)
    return names


# -- a source text -----------------------------------------------------------------------------------------------------


def describe_source(text: str) -> dict[str, Found]:
    """Every name that a source text defines or imports at its top level, and the members of its classes.

    Raises SyntaxError if the text is no Python that this interpreter can read.
    """
    description = _Description()
    for statement in _statements(ast.parse(text).body):
        _add_statement(description, statement, "")
    return description.names


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements, with those inside `if`, `try` and `with`: a module may choose between two definitions."""
    for statement in body:
        if isinstance(statement, (ast.If, ast.Try, ast.With)):
            yield from _statements(statement.body)
            yield from _statements(getattr(statement, "orelse", []))
            yield from _statements(getattr(statement, "finalbody", []))
            for handler in getattr(statement, "handlers", []):
                yield from _statements(handler.body)
        else:
            yield statement


def _add_statement(description: _Description, statement: ast.stmt, owner: str) -> None:
    names = description.names
    if isinstance(statement, ast.ClassDef) and not owner:
        slots = any(
            "__slots__" in (target.id for target in _plain_targets(each)) for each in _statements(statement.body)
        )
        names[statement.name] = Found("class", fixed_slots=slots)
        for member in _statements(statement.body):
            _add_statement(description, member, statement.name)
    elif isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
        key = f"{owner}.{statement.name}" if owner else statement.name
        decorators = {each.id for each in statement.decorator_list if isinstance(each, ast.Name)}
        if owner:
            names[f"{owner}#{statement.name}"] = Found("value")
        if "property" in decorators:
            names[key] = Found("property")
            return
        # At the top level, or as a plain method, a function has no free variables.
        names[key] = Found("function", tuple(_parameters(statement.args)), ())
        if owner and statement.name == "__init__":
            names.update((f"{owner}#{name}", Found("value")) for name in _stored_attributes(statement))
    elif isinstance(statement, (ast.Import, ast.ImportFrom)) and not owner:
        for alias in statement.names:
            names[alias.asname or alias.name.partition(".")[0]] = Found("value")
    else:
        for target in _plain_targets(statement):
            names[f"{owner}#{target.id}" if owner else target.id] = _assigned(statement)


def _plain_targets(statement: ast.stmt) -> list[ast.Name]:
    targets: list[ast.expr] = []
    if isinstance(statement, ast.Assign):
        targets = statement.targets
    elif isinstance(statement, ast.AnnAssign):
        targets = [statement.target]
    return [target for target in targets if isinstance(target, ast.Name)]


def _assigned(statement: ast.stmt) -> Found:
    # `name = make(function)`: as likely as not a function, made at import time. Who needs to know more must import it.
    return Found("made" if isinstance(getattr(statement, "value", None), ast.Call) else "value")


def _stored_attributes(constructor: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    me = constructor.args.args[0].arg if constructor.args.args else ""
    attributes = (node for node in ast.walk(constructor) if isinstance(node, ast.Attribute))
    for node in attributes:
        if isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name) and node.value.id == me:
            yield node.attr


def _parameters(arguments: ast.arguments) -> Iterator[Parameter]:
    positional = [*arguments.posonlyargs, *arguments.args]
    first_default = len(positional) - len(arguments.defaults)
    for number, each in enumerate(positional):
        yield Parameter(each.arg, number >= first_default)
    if arguments.vararg is not None:
        yield Parameter("*" + arguments.vararg.arg)
    for each, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        yield Parameter(each.arg, default is not None)
    if arguments.kwarg is not None:
        yield Parameter("**" + arguments.kwarg.arg)
