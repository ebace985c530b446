"""Finds the files of a user's own rewards without importing them."""

from __future__ import annotations

import ast
import importlib
import os
import sys
from collections.abc import Iterable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from rlpipe import artifact
from rlpipe.errors import ConfigError


def search_path(folders: Iterable[Path]) -> list[str]:
    """`sys.path` of the scoring processes: this process's own, then `folders` in their order, each once."""
    known = {os.path.abspath(entry) for entry in sys.path}
    return [*sys.path, *(folder for folder in dict.fromkeys(map(os.path.abspath, folders)) if folder not in known)]


def files(path: str, folders: Sequence[Path]) -> dict[str, Path]:
    """The files that `package.module:Name` is made of: its module's alone, or all Python files of its top-level package.

    Returns:
        Files by their name as seen from the folder that holds the module or package.

    Raises:
        ConfigError: there is no such module.
    """
    top, module = _specs(path, folders)
    packages = [Path(place) for place in top.submodule_search_locations or ()]
    found = {file.relative_to(package.parent).as_posix(): file for package in packages for file in sorted(package.rglob("*.py"))}
    own = Path(module.origin or "")
    if own.is_file() and own not in found.values():
        found[own.name] = own
    return found


def content_hash(path: str, folders: Sequence[Path]) -> str:
    """Sha256 over the names and contents of `files`.

    Raises:
        ConfigError: there is no such module.
    """
    return artifact.fingerprint_of({name: artifact.sha256(file) for name, file in files(path, folders).items()})


def check(path: str, folders: Sequence[Path]) -> None:
    """Refuse `package.module:Name` if the module is not there, is not Python, or nowhere mentions the name.

    Raises:
        ConfigError: says which.
    """
    _, module = _specs(path, folders)
    source, name = Path(module.origin or ""), path.partition(":")[2]
    if source.suffix != ".py" or not source.is_file():
        return
    try:
        mentioned = _names(ast.parse(source.read_bytes()))
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"the module of the custom reward {path} is not Python", got=f"{source.name}: {error}") from error
    # star imports, `__getattr__` and `globals()` can give a module names that its text does not mention
    if not mentioned & {name, "*", "__getattr__", "globals"}:
        raise ConfigError(f"the module of the custom reward {path} has no {name}", got=str(source), do="check `path` of the reward")


def _specs(path: str, folders: Sequence[Path]) -> tuple[ModuleSpec, ModuleSpec]:
    """Of the top-level module or package, and of the module itself."""
    importlib.invalidate_caches()
    top, *below = path.partition(":")[0].split(".")
    first = spec = _top(top, search_path(folders))
    for name in below:
        # by its last name: under the full one, a namespace package wants its parent imported
        spec = PathFinder.find_spec(name, list(spec.submodule_search_locations or ())) if spec else None
    if first is None or spec is None or spec.origin is None:
        searched = ", ".join(dict.fromkeys(map(os.path.abspath, folders)))
        raise ConfigError(
            "no module for a custom reward", got=path, accepted=f"a module that is installed or lies in {searched}", do="check `path` of the reward"
        )
    return first, spec


def _top(name: str, path: list[str]) -> ModuleSpec | None:
    for finder in sys.meta_path:
        if spec := finder.find_spec(name, path if finder is PathFinder else None):
            return spec
    return None


def _names(tree: ast.AST) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.alias):
            names.add(node.asname or node.name.partition(".")[0])
    return names
