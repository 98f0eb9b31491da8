"""Short descriptions of the expressions, values and options of a graph, for its text and its drawing."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from plait.constrained.specs import JsonObject, JsonSchema, Spec
from plait.lang.argument_checks import keyword_of
from plait.lang.core.derived.captures import GenWithCaptures
from plait.lang.core.derived.reasoning import SeparateReasoning
from plait.lang.core.expressions import CallExpr, Gen, GenToolCall, RoleBegin, RoleEnd, Select, SystemWithTools, Text
from plait.lang.sampling_options import KEYWORD_OF_FIELD, Options
from plait.lang.tracing.traced_value import TracedValue

MAX_LABEL_CHARS = 72


def describe_expr(expr: Any) -> str:
    match expr:
        case Text():
            return short(json.dumps(expr.text, ensure_ascii=False))
        case TracedValue():
            return short(expr._label)
        case CallExpr() if expr.adapter is not None:
            return f"{describe_expr(replace(expr, adapter=None))} adapter={expr.adapter}"
        case Gen():
            rule = (
                f"type={expr.value_format.type_name}"
                if expr.value_format is not None
                else _constraint_label(expr.constraint)
            )
            retries = f"retries={expr.retries}" if expr.retries else "after a draft" if expr.draft_tokens else ""
            return " ".join(filter(None, ["gen", expr.name, short(rule), describe_options(expr.options), retries]))
        case Select():
            return " ".join(filter(None, ["select", expr.name, short(json.dumps(expr.choices, ensure_ascii=False))]))
        case GenToolCall():
            tools = ", ".join(tool.name for tool in expr.tools)
            return " ".join(filter(None, ["gen", expr.name, f"tools=[{tools}]", describe_options(expr.options)]))
        case GenWithCaptures():
            return f"{describe_expr(expr.gen)}, groups {', '.join(expr.names)}"
        case SeparateReasoning():
            return f"{describe_expr(expr.gen)}, reasoning separated"
        case RoleBegin() | RoleEnd():
            return str(expr.role)
        case SystemWithTools():
            return f"system, with tools {', '.join(tool.name for tool in expr.tools)}"
    return type(expr).__name__


def describe_value(value: Any) -> str:
    return value._label if isinstance(value, TracedValue) else repr(value)


def _constraint_label(spec: Spec | None) -> str:
    if spec is None:
        return ""
    keyword, value = keyword_of(spec) or ("", None)
    if keyword in ("regex", "choices"):
        return f"{keyword}={json.dumps(value, ensure_ascii=False)}"
    if isinstance(spec, JsonSchema):
        return f"json_schema={spec.text}"
    return "a JSON object" if isinstance(spec, JsonObject) else f"{type(spec).__name__.lower()} grammar"


def describe_options(options: Options) -> str:
    keywords: dict[str, Any] = {KEYWORD_OF_FIELD[field]: value for field, value in options.fields.items()}
    if options.n:
        keywords["n"] = options.n
    if options.same_seed is not None:
        keywords["same_seed"] = options.same_seed
    if options.adapter:
        keywords["adapter"] = options.adapter
    if options.template_variables:
        keywords["chat_template_kwargs"] = options.template_variables
    shown = {
        name: list(value) if isinstance(value, tuple) else value for name, value in keywords.items() if value != ()
    }
    return " ".join(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in shown.items())


def short(text: str) -> str:
    return text if len(text) <= MAX_LABEL_CHARS else f"{text[: MAX_LABEL_CHARS - 3]}..."
