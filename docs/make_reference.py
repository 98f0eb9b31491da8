"""Writes docs/reference.md, the language reference, from the docstrings of the public names.

    python docs/make_reference.py

A test compares the committed page with the output of this script. GROUPS lists the public names in reading order.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import plait
import plait.ray
import plait.testing

PAGE = Path(__file__).parent / "reference.md"
GROUPS = {
    "One call": "extract classify ask",
    "Programs": "function Program",
    "What is appended": "gen select gen_int gen_string separate_reasoning system user assistant "
    "system_begin system_end user_begin user_end assistant_begin assistant_end Expr Typed",
    "How choices are scored": "token_length_normalized greedy_token_selection unconditional_likelihood_normalized "
    "ChoicesMethod",
    "States": "ProgramState AsyncState ProgramStateGroup ProgramUsage CallMeta GenMeta SelectMeta "
    "live partial_value partial_json",
    "Compiled programs": "Graph CompileError DependsOnValue",
    "Control": "Budget race best_of vote map beam BeamHypothesis",
    "Tools": "Tool ToolCall ToolResult MCPServer agent AgentRun AgentStep",
    "Backends": "Runtime Engine Cluster RuntimeEndpoint OpenAI Anthropic LiteLLM "
    "load_vocabulary set_default_backend flush_cache get_server_info global_config",
    "Errors": "PlaitError InputError ProgramError MissingVariable UnreadableValue Attempt ToolError BudgetExceeded "
    "CallFailed CallRejected ConstraintFailed ContextOverflow DeadlineExceeded QueueTimeout Aborted Overloaded "
    "RuntimeGone ModelError ModelNotFound CorruptModel UnsupportedModel",
    "Refused": "image video",
}
MADE = [
    *("Program", "ProgramState", "AsyncState", "ProgramStateGroup", "ProgramUsage"),
    *("ToolCall", "ToolResult", "AgentRun", "AgentStep", "ChoicesMethod", "Asked", "Attempt", "BeamHypothesis"),
    *("CallMeta", "GenMeta", "SelectMeta"),
]
"""Classes whose objects plait creates; programs do not call them, so their signatures are left out."""
INNER = ["adopt", "turn", "copy_to_raise", "answer", "check_request", "run_call", "status", "record_call"]
"""Methods that are public for other parts of plait only."""
INTRO = """# Language reference

Every public name of `plait`, from its docstring. What they are for, task by task: [quickstart](quickstart.md) and the
pages it links to. This page is made by `make docs`.
"""


def page() -> str:
    """Returns the page. Public names that no group lists come under "More"."""
    listed = {name for names in GROUPS.values() for name in names.split()}
    more = " ".join(sorted(set(plait.__all__) - listed))
    parts = [INTRO]
    for title, names in (GROUPS | ({"More": more} if more else {})).items():
        parts.append(f"## {title}\n")
        parts += [_entry(plait, name) for name in names.split()]
    parts.append("## plait.testing\n")
    parts += [_entry(plait.testing, name) for name in plait.testing.__all__]
    parts.append("## plait.ray\n")
    parts += [_entry(plait.ray, name) for name in plait.ray.__all__]
    return "\n".join(parts)


def _entry(module: ModuleType, name: str) -> str:
    thing = getattr(module, name)
    lines = [f"### {name}\n", *_described(name, thing, is_called=name not in MADE)]
    if inspect.isclass(thing) and not issubclass(thing, Exception):
        for method, function in _methods(thing):
            lines += [f"#### {name}.{method}\n", *_described(method, function, is_called=True)]
    return "\n".join(line for line in lines if line)


def _described(name: str, thing: Any, is_called: bool) -> list[str]:
    if type(thing).__name__ in MADE:
        return [f"A `{type(thing).__name__}`. {_said_behind(name, type(thing).__module__)}\n"]
    signature = _signature(name, thing) if is_called else name
    shown = f"```text\n{signature}\n```\n" if "(" in signature else ""
    return [shown, _prose(inspect.getdoc(thing)) if _has_own_doc(thing) else ""]


def _said_behind(name: str, module: str) -> str:
    """Returns the docstring after the assignment of `name` in a module's source."""
    body = ast.parse(inspect.getsource(sys.modules[module])).body
    for assigned, statement in itertools.pairwise(body):
        if (
            isinstance(assigned, ast.Assign)
            and ast.unparse(assigned.targets[0]) == name
            and isinstance(statement, ast.Expr)
        ):
            return inspect.cleandoc(str(ast.literal_eval(statement.value)))
    return ""


def _has_own_doc(thing: Any) -> bool:
    doc = inspect.getdoc(thing) or ""
    is_generated = inspect.isclass(thing) and doc.startswith(f"{thing.__name__}(")  # by dataclass()
    return not is_generated


def _methods(cls: type) -> Iterator[tuple[str, Any]]:
    """Yields the documented public methods and properties in source order, those of base classes last."""
    seen = set()
    for base in cls.__mro__:
        if not base.__module__.startswith("plait"):
            continue
        for name, raw in vars(base).items():
            thing = inspect.unwrap(raw.__func__) if isinstance(raw, (classmethod, staticmethod)) else raw
            if (
                name.startswith("_")
                or name in seen
                or name in INNER
                or not (callable(thing) or isinstance(thing, property))
            ):
                continue
            seen.add(name)
            if inspect.getdoc(thing):
                yield name, thing


def _signature(name: str, thing: Any) -> str:
    """Returns `name(a, b=1, *, c)`, without types, which are for type checkers."""
    if isinstance(thing, property) or not callable(thing):
        return name
    if inspect.isclass(thing) and issubclass(thing, (Exception, plait.Expr)):
        return name
    try:
        parameters = inspect.signature(thing).parameters.values()
    except (TypeError, ValueError):
        return name
    shown, is_keyword_only = [], False
    for parameter in parameters:
        if parameter.name in ("self", "cls") or parameter.name.startswith("_") or parameter.name == "unknown":
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not is_keyword_only:
            is_keyword_only = True
            if not any(text.startswith("*") for text in shown):
                shown.append("*")
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        shown.append(
            f"{stars}{parameter.name}"
            + ("" if parameter.default is parameter.empty else f"={_default(parameter.default)}")
        )
    return f"{name}({', '.join(shown)})"


def _default(value: Any) -> str:
    named = getattr(value, "__name__", None) or getattr(value, "name", None)
    text = named if isinstance(named, str) else repr(value)
    return "..." if text.startswith("<") or len(text) > 40 else text


def _prose(doc: str | None) -> str:
    """Returns a docstring as Markdown; examples become code blocks."""
    lines: list[str] = []
    in_code = False
    for line in (doc or "").splitlines():
        is_example = line.startswith((">>>", "..."))
        if is_example and not in_code:
            lines += [*([""] if lines and lines[-1] else []), "```python"]
            in_code = True
        elif in_code and not line.strip():
            lines.append("```")
            in_code = False
        lines.append(re.sub(r"\s*# doctest: \+SKIP", "", line))
    return "\n".join([*lines, *(["```"] if in_code else []), ""])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
