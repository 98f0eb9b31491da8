"""plait: a Python language for programs that call a language model many times.

The public names, each listed once. Importing this loads no model, no torch; a Runtime or Engine does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from plait.lang.aio.state import AsyncState
from plait.lang.backend import flush_cache, get_server_info, set_default_backend
from plait.lang.choices import (
    ChoicesMethod,
    greedy_token_selection,
    token_length_normalized,
    unconditional_likelihood_normalized,
)
from plait.lang.compat.reasoning import separate_reasoning
from plait.lang.compat.settings import global_config
from plait.lang.control.budget import Budget, BudgetExceeded
from plait.lang.control.combinators import best_of, map, vote
from plait.lang.control.race import race
from plait.lang.errors import CompileError, DependsOnValue, MissingVariable, ProgramError, UnreadableValue
from plait.lang.expressions import Expr, Typed
from plait.lang.group import ProgramStateGroup
from plait.lang.primitives import gen, gen_int, gen_string, image, select, video
from plait.lang.program import Program, function
from plait.lang.roles import (
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
from plait.lang.state import ProgramState
from plait.lang.tools.calling import ToolResult
from plait.lang.tools.tool import ToolCall
from plait.lang.usage import ProgramUsage
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
    RuntimeGone,
    UnsupportedModel,
)

if TYPE_CHECKING:
    from plait.lang.backends.anthropic import Anthropic
    from plait.lang.backends.endpoint import RuntimeEndpoint
    from plait.lang.backends.litellm import LiteLLM
    from plait.lang.backends.openai import OpenAI
    from plait.lang.compiled.graph import Graph
    from plait.runtime.engine import Engine
    from plait.runtime.launch import Runtime

    __version__: str

__all__ = [
    "Aborted",
    "Anthropic",
    "AsyncState",
    "Budget",
    "BudgetExceeded",
    "CallFailed",
    "CallRejected",
    "ChoicesMethod",
    "CompileError",
    "ConstraintFailed",
    "ContextOverflow",
    "CorruptModel",
    "DeadlineExceeded",
    "DependsOnValue",
    "Engine",
    "Expr",
    "Graph",
    "InputError",
    "LiteLLM",
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
    "Runtime",
    "RuntimeEndpoint",
    "RuntimeGone",
    "ToolCall",
    "ToolResult",
    "Typed",
    "UnreadableValue",
    "UnsupportedModel",
    "assistant",
    "assistant_begin",
    "assistant_end",
    "best_of",
    "flush_cache",
    "function",
    "gen",
    "gen_int",
    "gen_string",
    "get_server_info",
    "global_config",
    "greedy_token_selection",
    "image",
    "map",
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


_NOT_HERE = {
    "VertexAI": 'its client package is given up; use LiteLLM("vertex_ai/<model>")',
    "ServerArgs": "settings are keyword arguments of Runtime(...) and Engine(...)",
    "Crusoe": "it speaks OpenAI's chat API: use OpenAI(model, base_url=..., api_key=...)",
}


def __getattr__(name: str) -> object:
    """The names that cost time to load, when they are first used."""
    if name == "Runtime":
        from plait.runtime.launch import Runtime

        return Runtime
    if name == "Engine":
        from plait.runtime.engine import Engine

        return Engine
    if name == "RuntimeEndpoint":
        from plait.lang.backends.endpoint import RuntimeEndpoint

        return RuntimeEndpoint
    if name == "OpenAI":
        from plait.lang.backends.openai import OpenAI

        return OpenAI
    if name == "Anthropic":
        from plait.lang.backends.anthropic import Anthropic

        return Anthropic
    if name == "LiteLLM":
        from plait.lang.backends.litellm import LiteLLM

        return LiteLLM
    if name == "Graph":
        from plait.lang.compiled.graph import Graph

        return Graph
    if name == "__version__":
        from importlib.metadata import version

        return version("plait")
    if name in _NOT_HERE:
        raise AttributeError(f"plait has no {name!r}: {_NOT_HERE[name]}")
    raise AttributeError(f"module 'plait' has no attribute {name!r}")
