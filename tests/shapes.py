"""Annotated shapes, checked while the tests run.

`install()` makes the package's modules load with `checked` around every function and dataclass that annotates arrays
with jaxtyping. What was given and what came back is held against the annotations *after* a call has succeeded: a
function may refuse arrays of the wrong shape in its own words, and an annotation that a successful call contradicts is
false. Types, dtypes and shapes that have passed before are not compared again: nothing else is looked at.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import sys
import types
import typing
from collections import defaultdict
from collections.abc import Callable, Mapping
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from typing import Any

import numpy as np
from jaxtyping import AbstractArray, jaxtyped
from torch import Tensor

ARRAYS = ("[Tensor, ", "[ndarray, ")


SEEN: defaultdict[str, set[Any]] = defaultdict(set)
"""What has passed before, by function; not held by the functions, whose digests say what a method is made of."""


class FalseShape(BaseException):
    """An annotation and a value that contradict each other; no `except Exception` on the way may take it in."""


def checked(thing: Any) -> Any:
    """A function or a dataclass that holds arrays against their annotations."""
    if isinstance(thing, type):
        return _checked_dataclass(thing) if dataclasses.is_dataclass(thing) else thing
    written = {name: text for name, text in thing.__annotations__.items() if any(a in str(text) for a in ARRAYS)}
    if not written:
        return thing
    read = functools.cache(lambda: _read(written, thing.__globals__))
    where = f"{thing.__module__}, line {thing.__code__.co_firstlineno}: {thing.__qualname__}"
    parameters = inspect.signature(thing).parameters.values()
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]

    @functools.wraps(thing)
    def run(*args: Any, **kwargs: Any) -> Any:
        result = thing(*args, **kwargs)
        given = dict(zip(names, args, strict=False))  # the call has succeeded; further ones are of *args
        _compare(read(), {**given, **kwargs, "return": result}, where)
        return result

    return run


def _checked_dataclass(cls: type) -> type:
    written = {f.name: f.type for f in dataclasses.fields(cls) if any(a in str(f.type) for a in ARRAYS)}
    if not written or "__init__" not in vars(cls):
        return cls
    made, read = cls.__init__, functools.cache(lambda: _read(written, vars(sys.modules[cls.__module__])))
    where = f"{cls.__module__}: {cls.__qualname__}"

    @functools.wraps(made)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        _compare(read(), {name: getattr(self, name) for name in written}, where)

    cls.__init__ = init
    return cls


def _read(written: Mapping[str, Any], names: dict[str, Any]) -> dict[str, Any]:
    """The annotations as types; `from __future__ import annotations` leaves their text."""
    return {name: eval(text, names) if isinstance(text, str) else text for name, text in written.items()}  # noqa: S307


def _compare(hints: Mapping[str, Any], values: Mapping[str, Any], where: str) -> None:
    kinds = tuple(_kind(values[name]) if name in values else None for name in hints)
    if kinds in SEEN[where]:
        return
    with jaxtyped("context"):  # one name, one size
        for name, hint in hints.items():
            if name in values and not _fits(values[name], hint):
                shapes = {n: f"{hints[n]}: {_shown(v)}" for n, v in values.items() if n in hints}
                raise FalseShape(f"{where}: {name} is not what its annotation says; {shapes}")
    SEEN[where].add(kinds)


def _kind(value: Any) -> Any:
    """All of a value that decides whether it fits an annotation."""
    if isinstance(value, (Tensor, np.ndarray)):
        return type(value), value.dtype, tuple(value.shape)
    return tuple(map(_kind, value)) if isinstance(value, tuple) else type(value)


def _fits(value: Any, hint: Any) -> bool:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return any(_fits(value, option) for option in typing.get_args(hint))
    if typing.get_origin(hint) is tuple and isinstance(value, tuple) and ... not in typing.get_args(hint):
        parts = typing.get_args(hint)
        return len(value) == len(parts) and all(map(_fits, value, parts))
    if inspect.isclass(hint) and issubclass(hint, AbstractArray):
        return not isinstance(value, (Tensor, np.ndarray)) or isinstance(value, hint)
    return not inspect.isclass(hint) or isinstance(value, hint)


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(_shown, value))
    return f"{value.dtype}{tuple(value.shape)}" if isinstance(value, (Tensor, np.ndarray)) else type(value).__name__


# -- loading ------------------------------------------------------------------------------------------------------


class _Decorating(ast.NodeTransformer):
    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self.generic_visit(node)
        node.decorator_list.append(ast.Name("__checked_shapes__", ast.Load()))  # innermost
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        self.generic_visit(node)
        node.decorator_list.insert(0, ast.Name("__checked_shapes__", ast.Load()))  # after `dataclass`
        return node


class _Loader(SourceFileLoader):
    def get_code(self, name: str) -> types.CodeType:
        """The module's code with every function decorated; never from or to a cache."""
        path = self.get_filename(name)
        tree = ast.fix_missing_locations(_Decorating().visit(ast.parse(self.get_data(path), path)))
        return compile(tree, path, "exec", dont_inherit=True)

    def exec_module(self, module: types.ModuleType) -> None:
        vars(module)["__checked_shapes__"] = checked
        super().exec_module(module)


class _Finder(MetaPathFinder):
    def __init__(self, package: str) -> None:
        self.package = package

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name.partition(".")[0] != self.package:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


def install(package: str) -> Callable[[], None]:
    """Check every module of the package that is imported from now on; returns how to stop."""
    finder = _Finder(package)
    sys.meta_path.insert(0, finder)
    return lambda: sys.meta_path.remove(finder)
