"""The syntax trees of kernels: each source file is parsed once."""

from __future__ import annotations

import ast
import builtins
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any

from plait.kernels.cpu.compiler.values import CompileError


@cache
def _functions(path: str) -> dict[tuple[str, int], ast.FunctionDef]:
    """Returns the functions of a file by their name and first line, which is that of the first decorator."""
    nodes = ast.walk(ast.parse(Path(path).read_text(encoding="utf-8")))
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
    return {(node.name, min([node.lineno, *(part.lineno for part in node.decorator_list)])): node for node in functions}


def syntax_tree(function: FunctionType) -> ast.FunctionDef:
    """Returns the definition of a function."""
    code = function.__code__
    try:
        return _functions(code.co_filename)[code.co_name, code.co_firstlineno]
    except KeyError:
        raise CompileError(f"{code.co_filename} has no function {code.co_name}") from None


def outer_name(function: FunctionType, name: str) -> Any:
    """Returns what a name that is no local variable means in a function."""
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    if name in cells:
        return cells[name].cell_contents
    try:
        return function.__globals__[name] if name in function.__globals__ else getattr(builtins, name)
    except AttributeError:
        raise CompileError(f"nothing is named {name}") from None
