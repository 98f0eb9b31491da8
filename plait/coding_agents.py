"""The coding agents of `plait launch`, one row each: what it needs, and what points it at a server.

Sources: the agents' own help and documentation, and their requests as recorded with the versions in the table.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from plait.serve import KEY_VARIABLE

ANSWER_TOKENS = 2048  # of the context, for a conversation behind the first prompt
PATIENCE_MS = 3_600_000  # a CPU may take minutes for a long first prompt


@dataclass(frozen=True)
class Served:
    """The server of an agent. url: without a path. model: its name there. context_length: in tokens."""

    url: str
    key: str
    model: str
    context_length: int


@dataclass(frozen=True)
class AgentSettings:
    """Environment variables, and texts of files, which lie in the agent's own folder."""

    variables: Mapping[str, str]
    files: Mapping[Path, str] = field(default_factory=dict)


@dataclass(frozen=True)
class CodingAgent:
    """One agent.

    command: its program. install: the command that installs it. prompt_tokens: of its first request in an empty folder,
    with its tools, as `measured` says. removed: prefixes of variables that are not passed on, since they would lead
    the agent to another server. settings: made of the server and the agent's folder.
    """

    command: str
    install: str
    prompt_tokens: int
    measured: str
    settings: Callable[[Served, Path], AgentSettings]
    removed: tuple[str, ...] = ()

    @property
    def min_context(self) -> int:
        """The shortest context in tokens with which the agent is of use."""
        return self.prompt_tokens + ANSWER_TOKENS


def _claude(server: Served, folder: Path) -> AgentSettings:
    home = folder / "claude"
    names = ("MODEL", *(f"DEFAULT_{size}_MODEL" for size in ("HAIKU", "SONNET", "OPUS", "FABLE")))
    variables = {
        "ANTHROPIC_BASE_URL": server.url,
        "ANTHROPIC_AUTH_TOKEN": server.key,
        **{f"ANTHROPIC_{name}": server.model for name in names},
        "CLAUDE_CONFIG_DIR": str(home),
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(server.context_length),
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(max(ANSWER_TOKENS, server.context_length // 8)),
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        **dict.fromkeys(("API_TIMEOUT_MS", "CLAUDE_STREAM_IDLE_TIMEOUT_MS"), str(PATIENCE_MS)),
    }
    files = {
        home / ".claude.json": json.dumps({"hasCompletedOnboarding": True}),
        home / "settings.json": json.dumps({"disableDeepLinkRegistration": "disable"}),  # a file in ~/.local
    }
    return AgentSettings(variables, files)


def _codex(server: Served, folder: Path) -> AgentSettings:
    home = folder / "codex"
    lines = (
        f"model = {_toml(server.model)}",
        'model_provider = "plait"',
        f"model_context_window = {server.context_length}",
        "check_for_update_on_startup = false",
        "[analytics]",
        "enabled = false",
        "[model_providers.plait]",
        'name = "plait"',
        f"base_url = {_toml(server.url + '/v1')}",
        f'env_key = "{KEY_VARIABLE}"',
        'wire_api = "responses"',
        f"stream_idle_timeout_ms = {PATIENCE_MS}",
    )
    variables = {"CODEX_HOME": str(home), KEY_VARIABLE: server.key}
    return AgentSettings(variables, {home / "config.toml": "\n".join(lines) + "\n"})


def _toml(text: str) -> str:
    """A basic string of TOML, which takes the escapes of JSON."""
    return json.dumps(text, ensure_ascii=False)


def _opencode(server: Served, folder: Path) -> AgentSettings:
    limit = {"context": server.context_length, "output": max(ANSWER_TOKENS, server.context_length // 8)}
    options = {"baseURL": f"{server.url}/v1", "apiKey": f"{{env:{KEY_VARIABLE}}}", "timeout": PATIENCE_MS}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "plait",
        "options": options,
        "models": {server.model: {"name": server.model, "tool_call": True, "limit": limit}},
    }
    name = f"plait/{server.model}"
    config = {"model": name, "small_model": name, "autoupdate": False, "provider": {"plait": provider}}
    path, home = folder / "opencode.json", folder / "opencode"
    variables = {
        "OPENCODE_CONFIG": str(path),
        KEY_VARIABLE: server.key,
        **{f"XDG_{kind}_HOME": str(home / kind.lower()) for kind in ("CONFIG", "DATA", "STATE")},
        "OPENCODE_DISABLE_MODELS_FETCH": "1",
    }
    return AgentSettings(variables, {path: json.dumps(config, indent=2)})


def _aider(server: Served, folder: Path) -> AgentSettings:
    name, path = f"openai/{server.model}", folder / "model-metadata.json"
    sizes = {"max_input_tokens": server.context_length, "max_tokens": server.context_length}
    metadata = {name: {**sizes, "litellm_provider": "openai", "mode": "chat"}}
    variables = {
        "OPENAI_API_BASE": f"{server.url}/v1",
        "OPENAI_API_KEY": server.key,
        "AIDER_MODEL": name,
        "AIDER_MODEL_METADATA_FILE": str(path),
        "AIDER_INPUT_HISTORY_FILE": str(folder / "aider.input.history"),
        "AIDER_CHAT_HISTORY_FILE": str(folder / "aider.chat.history.md"),
        "AIDER_TIMEOUT": str(PATIENCE_MS // 1000),
        "AIDER_ANALYTICS": "false",
        "AIDER_CHECK_UPDATE": "false",
    }
    return AgentSettings(variables, {path: json.dumps(metadata)})


CODING_AGENTS: Mapping[str, CodingAgent] = {
    agent.command: agent
    for agent in (
        CodingAgent(
            command="claude",
            install="npm install -g @anthropic-ai/claude-code",
            prompt_tokens=23_500,
            measured="Claude Code 2.1.197",
            settings=_claude,
            removed=("ANTHROPIC_", "CLAUDE_CODE_USE_", "CLAUDE_CODE_OAUTH_TOKEN", "CLAUDE_CODE_SUBAGENT_MODEL"),
        ),
        CodingAgent(
            command="codex",
            install="npm install -g @openai/codex",
            prompt_tokens=12_500,
            measured="Codex 0.171.0",
            settings=_codex,
        ),
        CodingAgent(
            command="opencode",
            install="npm install -g opencode-ai",
            prompt_tokens=7_700,
            measured="opencode 1.18.33",
            settings=_opencode,
            removed=("OPENCODE_CONFIG",),
        ),
        CodingAgent(
            command="aider",
            install="python -m pip install aider-install && aider-install",
            prompt_tokens=2_000,
            measured="aider 0.86.2",
            settings=_aider,
            removed=("OPENAI_", "AIDER_OPENAI_", "AIDER_WEAK_MODEL", "AIDER_EDITOR_MODEL"),
        ),
    )
}
