"""Small chat templates of our own, one for each way in which models write tool calls."""

# ruff: noqa: E501

from __future__ import annotations

import functools
from typing import NamedTuple

from plait.runtime.chat.derivation.model_formats import ModelFormats, find_formats
from plait.runtime.chat.formats.call_format import CallFormat, JsonArguments, KeywordArguments, NotationArguments
from plait.runtime.tokenizer.chat_template import ChatTemplate

_TURNS = """{%- if tools %}<|im_start|>system
Tools:{% for t in tools %} {{ t | tojson }}{% endfor %}<|im_end|>
{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}@CALLS@<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
_EACH = "{% for c in m.tool_calls or [] %}@ONE@{% endfor %}"
_LIST = "{% if m.tool_calls %}@BEGIN@{% for c in m.tool_calls %}@ONE@{% if not loop.last %}@SEP@{% endif %}{% endfor %}@END@{% endif %}"
_LINE = "{{ '\\n' }}"  # a line's end behind a block tag is not written
_VALUE = "{{ v if v is string else v | tojson }}"


class CallTemplate(NamedTuple):
    """A template and the format that is derived from it, as `describe` writes it."""

    source: str
    described: str


def describe(call_format: CallFormat) -> str:
    """Returns the format as one line: its texts around the form of the arguments.

    >>> describe(CallFormat("<call>{name}", "</call>"))
    '<call>{name}{json}</call>'
    """
    form = call_format.arguments
    if isinstance(form, JsonArguments):
        text = "{json}" if form.style == "spaced" else f"{{json {form.style}}}"
    elif isinstance(form, KeywordArguments):
        text = "{keywords in single quotes}" if form.single_quotes else "{keywords}"
    elif isinstance(form, NotationArguments):
        text = f"{{notation {form.quote}text{form.quote}, {form.null}{', sorted' if form.is_sorted else ''}}}"
    else:
        value = f"{{value in python: {form.python}}}" if form.python else "{value}"
        text = f"{{{form.open}{value}{form.close}{form.separator}}}"
    text = f"{call_format.head}{text}{call_format.tail}"
    if call_format.begin or call_format.end or call_format.separator:
        text = f"{call_format.begin}({text})*{call_format.separator}{call_format.end}"
    return repr(text)[1:-1]


def _each(one: str) -> str:
    return _TURNS.replace("@CALLS@", _EACH.replace("@ONE@", one))


def _list(begin: str, one: str, separator: str, end: str) -> str:
    calls = _LIST.replace("@BEGIN@", begin).replace("@ONE@", one).replace("@SEP@", separator).replace("@END@", end)
    return _TURNS.replace("@CALLS@", calls)


def _items(one: str) -> str:
    return "{% for k, v in c.function.arguments.items() %}" + one + "{% endfor %}"


def _notation(quote: str, members: str, null: str) -> str:
    """A macro of values whose names stand bare and whose strings stand between quotes."""
    return (
        "{%- macro put(v) -%}{% if v is string %}@{{ v }}@{% elif v is none %}"
        + null
        + "{% elif v is mapping %}{{ '{' }}"
        "{% for k, x in " + members + " %}{{ k }}:{{ put(x) }}{{ ',' if not loop.last }}{% endfor %}}"
        "{% elif v is sequence %}[{% for x in v %}{{ put(x) }}{{ ',' if not loop.last }}{% endfor %}]"
        "{% else %}{{ v | tojson }}{% endif %}{%- endmacro -%}"
    ).replace("@", quote)


NAME, ARGUMENTS = "{{ c.function.name }}", "{{ c.function.arguments | tojson }}"
CALL_TEMPLATES = {
    "json in tags": CallTemplate(
        _each(_LINE + '<tool_call>\n{"name": "' + NAME + '", "arguments": ' + ARGUMENTS + "}\n</tool_call>"),
        r'(<tool_call>\n{"name": "{name}", "arguments": {json}}\n</tool_call>)*\n',
    ),
    "json as given": CallTemplate(
        _each(
            "<call>"
            + NAME
            + " {{ c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}</call>"
        ),
        r"<call>{name} {json}</call>",
    ),
    "compact json": CallTemplate(
        _each("<call>" + NAME + " {{ c.function.arguments | tojson(separators=(',', ':')) }}</call>"),
        r"<call>{name} {json compact}</call>",
    ),
    "list": CallTemplate(
        _list("<|calls|>[", '{"name": "' + NAME + '", "arguments": ' + ARGUMENTS + "}", ", ", "]"),
        r'<|calls|>[({"name": "{name}", "arguments": {json}})*, ]',
    ),
    "list with ids": CallTemplate(
        _list("[CALLS][", '{"name": "' + NAME + '", "arguments": ' + ARGUMENTS + ', "id": "{{ c.id }}"}', ", ", "]"),
        r'[CALLS][({"name": "{name}", "arguments": {json}, "id": "{id}"})*, ]',
    ),
    "id before the arguments": CallTemplate(
        _each(
            "{% if c.id | length != 9 %}{{ raise_exception('an id has nine letters') }}{% endif %}"
            "[CALLS]" + NAME + "[ID]{{ c.id }}[ARGS]" + ARGUMENTS
        ),
        r"[CALLS]{name}[ID]{id}[ARGS]{json}",
    ),
    "counted calls": CallTemplate(
        _list(
            "<calls>", "<call>functions." + NAME + ":{{ loop.index0 }}<args>" + ARGUMENTS + "</call>", "", "</calls>"
        ),
        r"<calls>(<call>functions.{name}:{id}<args>{json}</call>)*</calls>",
    ),
    "calls counted on": CallTemplate(
        "{%- set n = namespace(calls=0) %}"
        + _list(
            "<calls>[",
            '{"id": "{{ n.calls }}", "name": "'
            + NAME
            + '", "arguments": '
            + ARGUMENTS
            + "}{% set n.calls = n.calls + 1 %}",
            ", ",
            "]</calls>",
        ),
        r'<calls>[({"id": "{id}", "name": "{name}", "arguments": {json}})*, ]</calls>',
    ),
    "section": CallTemplate(
        _list("<|calls:begin|>", "<|call:begin|>" + NAME + "<|sep|>" + ARGUMENTS + "<|call:end|>", "", "<|calls:end|>"),
        r"<|calls:begin|>(<|call:begin|>{name}<|sep|>{json}<|call:end|>)*<|calls:end|>",
    ),
    "lines in a section": CallTemplate(
        _list("<calls>\n", '{"name": "' + NAME + '", "arguments": ' + ARGUMENTS + "}\n", "", "</calls>"),
        r'<calls>\n({"name": "{name}", "arguments": {json}}\n)*</calls>',
    ),
    "name as a key": CallTemplate(
        _list("<calls>[", '{"' + NAME + '": ' + ARGUMENTS + "}", ", ", "]</calls>"),
        r'<calls>[({"{name}": {json}})*, ]</calls>',
    ),
    "bare json": CallTemplate(
        _each(
            "{% if m.tool_calls | length > 1 %}{{ raise_exception('one call') }}{% endif %}"
            '{"name": "' + NAME + '", "parameters": ' + ARGUMENTS + "}"
        ),
        r'{"name": "{name}", "parameters": {json}}',
    ),
    "elements": CallTemplate(
        _each(
            _LINE
            + "<tool_call>\n<function="
            + NAME
            + ">\n"
            + _items(
                "<parameter={{ k }}>\n{{ v | tojson if v is mapping or (v is sequence and v is not string) else v | string }}\n</parameter>\n"
            )
            + "</function>\n</tool_call>"
        ),
        r"(<tool_call>\n<function={name}>\n{<parameter={name}>\n{value in python: scalars}\n</parameter>\n}</function>\n</tool_call>)*\n",
    ),
    "keys and values": CallTemplate(
        _each(
            _LINE
            + "<tool_call>"
            + NAME
            + "\n"
            + _items("<key>{{ k }}</key>\n<value>" + _VALUE + "</value>\n")
            + "</tool_call>"
        ),
        r"(<tool_call>{name}\n{<key>{name}</key>\n<value>{value}</value>\n}</tool_call>)*\n",
    ),
    "keys and values in one line": CallTemplate(
        _each("<tool_call>" + NAME + _items("<key>{{ k }}</key><value>" + _VALUE + "</value>") + "</tool_call>"),
        r"<tool_call>{name}{<key>{name}</key><value>{value}</value>}</tool_call>",
    ),
    "typed elements": CallTemplate(
        _list(
            "<calls>\n",
            '<invoke name="'
            + NAME
            + '">\n'
            + _items(
                '<parameter name="{{ k }}" string="{{ "true" if v is string else "false" }}">'
                + _VALUE
                + "</parameter>\n"
            )
            + "</invoke>\n",
            "",
            "</calls>",
        ),
        r'<calls>\n(<invoke name="{name}">\n{<parameter name="{name}" string="{type}">{value}</parameter>\n}</invoke>\n)*</calls>',
    ),
    "keywords": CallTemplate(
        _list(
            "<calls>[",
            NAME
            + "({% for k, v in c.function.arguments.items() %}{{ k }}={{ '\"' + v + '\"' if v is string else v }}"
            + "{% if not loop.last %}, {% endif %}{% endfor %})",
            ", ",
            "]</calls>",
        ),
        r"<calls>[({name}({keywords}))*, ]</calls>",
    ),
    "keywords in single quotes": CallTemplate(
        _list(
            "<calls>[",
            NAME
            + '({% for k, v in c.function.arguments.items() %}{{ k }}={{ "\'" + v + "\'" if v is string else v }}'
            + "{% if not loop.last %}, {% endif %}{% endfor %})",
            ", ",
            "]</calls>",
        ),
        r"<calls>[({name}({keywords in single quotes}))*, ]</calls>",
    ),
    "elements with sections": CallTemplate(
        _each(
            '<f name="'
            + NAME
            + '">'
            + _items(
                "<p name=\"{{ k }}\">{% if v is string and ('<' in v or '&' in v or '\\n' in v) %}<![CDATA[{{ v }}]]>"
                "{% else %}" + _VALUE + "{% endif %}</p>"
            )
            + "</f>"
        ),
        r'<f name="{name}">{<p name="{name}">{value}</p>}</f>',
    ),
    "notation": CallTemplate(
        _notation('<|"|>', "v | dictsort", "None")
        + _each("<call>call:" + NAME + "{{ put(c.function.arguments) }}</call>"),
        r'<call>call:{name}{notation <|"|>text<|"|>, None, sorted}</call>',
    ),
    "notation in the given order": CallTemplate(
        _notation("<q>", "v.items()", "null")
        + _list("<calls>", NAME + "{{ put(c.function.arguments) }}", ";", "</calls>"),
        r"<calls>({name}{notation <q>text<q>, null})*;</calls>",
    ),
    "elements that python writes": CallTemplate(
        _each('<f name="' + NAME + '">' + _items('<p name="{{ k }}">{{ v }}</p>') + "</f>"),
        r'<f name="{name}">{<p name="{name}">{value in python: values}</p>}</f>',
    ),
}
# The marks are control tokens of SmolLM2, which the model writes as single tokens.
CONTROL_TEMPLATE = CallTemplate(
    _list("<repo_name>", "<reponame>" + NAME + "<file_sep>" + ARGUMENTS + "<filename>", "", "<gh_stars>"),
    r"<repo_name>(<reponame>{name}<file_sep>{json}<filename>)*<gh_stars>",
)

CONTROL_NOTATION = CallTemplate(
    _notation("<jupyter_text>", "v | dictsort", "None")
    + _each("<repo_name>call:" + NAME + "{{ put(c.function.arguments) }}<filename>"),
    r"<repo_name>call:{name}{notation <jupyter_text>text<jupyter_text>, None, sorted}<filename>",
)


@functools.cache  # several files ask for all of them when they are collected
def formats_of(kind: str) -> ModelFormats:
    """The formats that are found in the template of CALL_TEMPLATES of that name."""
    return find_formats(ChatTemplate(CALL_TEMPLATES[kind].source, "", ""))
