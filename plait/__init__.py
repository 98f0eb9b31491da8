"""plait: a Python language for programs that call a language model many times.

These are the public names. The module of a name is imported when the name is first used; only a Runtime or an Engine
loads a model or torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # for type checkers and editors; `_NAMES_BY_MODULE` has the same names at run time
    from plait.lang.adapters import adapter
    from plait.lang.backends.anthropic import Anthropic
    from plait.lang.backends.cluster import Cluster
    from plait.lang.backends.default_backend import flush_cache, get_server_info, set_default_backend
    from plait.lang.backends.litellm import LiteLLM
    from plait.lang.backends.openai import OpenAI
    from plait.lang.backends.runtime_endpoint import RuntimeEndpoint
    from plait.lang.budget import Budget, BudgetExceeded
    from plait.lang.choices import (
        ChoicesMethod,
        greedy_token_selection,
        token_length_normalized,
        unconditional_likelihood_normalized,
    )
    from plait.lang.compat.global_config import global_config
    from plait.lang.control.agent import AgentRun, AgentStep, agent
    from plait.lang.control.beam import BeamHypothesis, beam
    from plait.lang.control.combinators import best_of, vote
    from plait.lang.control.combinators import map as map
    from plait.lang.control.one_call import ask, classify, extract
    from plait.lang.core.derived.reasoning import separate_reasoning
    from plait.lang.core.expressions import Expr, Typed
    from plait.lang.core.primitives import gen, gen_int, gen_string
    from plait.lang.core.roles import (
        assistant,
        assistant_begin,
        assistant_end,
        system,
        system_begin,
        system_end,
        user,
        user_begin,
        user_end,
    )
    from plait.lang.core.select import image, select, video
    from plait.lang.core.tool_use.tool_calls import ToolResult
    from plait.lang.display.notebook import live
    from plait.lang.errors import (
        Attempt,
        CompileError,
        DependsOnValue,
        MissingVariable,
        ProgramError,
        ToolError,
        UnreadableValue,
    )
    from plait.lang.meta_info import CallMeta, GenMeta, SelectMeta
    from plait.lang.partial.values import partial_value
    from plait.lang.program import Program, function
    from plait.lang.states.async_state import AsyncState
    from plait.lang.states.race import race
    from plait.lang.states.state import ProgramState, ProgramStateGroup
    from plait.lang.tools.mcp_client.server import MCPServer
    from plait.lang.tools.tool import Tool, ToolCall
    from plait.lang.tracing.graph import Graph
    from plait.lang.usage import ProgramUsage
    from plait.runtime.client.partial_json import partial_json
    from plait.runtime.errors import (
        Aborted,
        CallFailed,
        CallRejected,
        ConstraintFailed,
        ContextOverflow,
        CorruptModel,
        DeadlineExceeded,
        InputError,
        ModelError,
        ModelNotFound,
        Overloaded,
        PlaitError,
        QueueTimeout,
        RuntimeGone,
        UnsupportedModel,
    )
    from plait.runtime.process.engine import Engine
    from plait.runtime.process.runtime import Runtime
    from plait.runtime.process.vocabulary import load_vocabulary

    __version__: str

__all__ = [  # without `map`, which would hide Python's in a `from plait import *`
    "Aborted",
    "AgentRun",
    "AgentStep",
    "Anthropic",
    "AsyncState",
    "Attempt",
    "BeamHypothesis",
    "Budget",
    "BudgetExceeded",
    "CallFailed",
    "CallMeta",
    "CallRejected",
    "ChoicesMethod",
    "Cluster",
    "CompileError",
    "ConstraintFailed",
    "ContextOverflow",
    "CorruptModel",
    "DeadlineExceeded",
    "DependsOnValue",
    "Engine",
    "Expr",
    "GenMeta",
    "Graph",
    "InputError",
    "LiteLLM",
    "MCPServer",
    "MissingVariable",
    "ModelError",
    "ModelNotFound",
    "OpenAI",
    "Overloaded",
    "PlaitError",
    "Program",
    "ProgramError",
    "ProgramState",
    "ProgramStateGroup",
    "ProgramUsage",
    "QueueTimeout",
    "Runtime",
    "RuntimeEndpoint",
    "RuntimeGone",
    "SelectMeta",
    "Tool",
    "ToolCall",
    "ToolError",
    "ToolResult",
    "Typed",
    "UnreadableValue",
    "UnsupportedModel",
    "adapter",
    "agent",
    "ask",
    "assistant",
    "assistant_begin",
    "assistant_end",
    "beam",
    "best_of",
    "classify",
    "extract",
    "flush_cache",
    "function",
    "gen",
    "gen_int",
    "gen_string",
    "get_server_info",
    "global_config",
    "greedy_token_selection",
    "image",
    "live",
    "load_vocabulary",
    "partial_json",
    "partial_value",
    "race",
    "select",
    "separate_reasoning",
    "set_default_backend",
    "system",
    "system_begin",
    "system_end",
    "token_length_normalized",
    "unconditional_likelihood_normalized",
    "user",
    "user_begin",
    "user_end",
    "video",
    "vote",
]


_UNSUPPORTED_NAMES = {
    "VertexAI": 'its client package is given up; use LiteLLM("vertex_ai/<model>")',
    "ServerArgs": "settings are keyword arguments of Runtime(...) and Engine(...)",
    "Crusoe": "it speaks OpenAI's chat API: use OpenAI(model, base_url=..., api_key=...)",
}

_NAMES_BY_MODULE = {
    "plait.lang.states.async_state": "AsyncState",
    "plait.lang.adapters": "adapter",
    "plait.lang.backends.default_backend": "flush_cache get_server_info set_default_backend",
    "plait.lang.backends.anthropic": "Anthropic",
    "plait.lang.backends.runtime_endpoint": "RuntimeEndpoint",
    "plait.lang.backends.litellm": "LiteLLM",
    "plait.lang.backends.openai": "OpenAI",
    "plait.lang.choices": (
        "ChoicesMethod greedy_token_selection token_length_normalized unconditional_likelihood_normalized"
    ),
    "plait.lang.backends.cluster": "Cluster",
    "plait.lang.core.derived.reasoning": "separate_reasoning",
    "plait.lang.compat.global_config": "global_config",
    "plait.lang.tracing.graph": "Graph",
    "plait.lang.budget": "Budget BudgetExceeded",
    "plait.lang.control.agent": "AgentRun AgentStep agent",
    "plait.lang.control.beam": "BeamHypothesis beam",
    "plait.lang.control.combinators": "best_of map vote",
    "plait.lang.display.notebook": "live",
    "plait.lang.states.race": "race",
    "plait.lang.errors": "Attempt CompileError DependsOnValue MissingVariable ProgramError ToolError UnreadableValue",
    "plait.lang.core.expressions": "Expr Typed",
    "plait.lang.core.primitives": "gen gen_int gen_string",
    "plait.lang.core.select": "image select video",
    "plait.lang.meta_info": "CallMeta GenMeta SelectMeta",
    "plait.lang.control.one_call": "ask classify extract",
    "plait.lang.partial.values": "partial_value",
    "plait.lang.program": "function Program",
    "plait.lang.core.roles": (
        "assistant assistant_begin assistant_end system system_begin system_end user user_begin user_end"
    ),
    "plait.lang.states.state": "ProgramState ProgramStateGroup",
    "plait.lang.core.tool_use.tool_calls": "ToolResult",
    "plait.lang.tools.mcp_client.server": "MCPServer",
    "plait.lang.tools.tool": "Tool ToolCall",
    "plait.lang.usage": "ProgramUsage",
    "plait.runtime.client.partial_json": "partial_json",
    "plait.runtime.process.engine": "Engine",
    "plait.runtime.errors": (
        "Aborted CallFailed CallRejected ConstraintFailed ContextOverflow CorruptModel DeadlineExceeded "
        "InputError ModelError ModelNotFound Overloaded PlaitError QueueTimeout RuntimeGone UnsupportedModel"
    ),
    "plait.runtime.process.runtime": "Runtime",
    "plait.runtime.process.vocabulary": "load_vocabulary",
}
_MODULE_OF = {name: module for module, names in _NAMES_BY_MODULE.items() for name in names.split()}


def __getattr__(name: str) -> object:
    """Imports a name's module when the name is first used (PEP 562)."""
    value: object
    if name in ("constrained", "lang", "ray", "runtime"):
        value = importlib.import_module(f"plait.{name}")
    elif name in _MODULE_OF:
        value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    elif name == "__version__":
        from importlib.metadata import version

        value = version("plait")
    elif name in _UNSUPPORTED_NAMES:
        raise AttributeError(f"plait has no {name!r}: {_UNSUPPORTED_NAMES[name]}")
    else:
        raise AttributeError(f"module 'plait' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULE_OF})
