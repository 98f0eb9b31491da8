"""Sandbox escapes that Jinja, vLLM and SGLang had: a model's chat template reads nothing but its messages."""

from __future__ import annotations

import pytest
from chat_templates import messages, template

from plait.runtime.errors import PlaitError

ESCAPES = {
    # CVE-2016-10745, CVE-2019-10906: str.format and str.format_map read attributes
    "format": "{{ '{0.__class__}'.format(messages) }}",
    "format_map": "{{ '{a.__class__}'.format_map({'a': messages}) }}",
    # CVE-2024-56326: a stored reference to the method, called by a filter
    "stored format": "{% set f = '{0.__class__}'.format %}{{ f(messages) }}",
    "mapped format": "{{ (['{0.__class__}'] | map(attribute='format') | first)(messages) }}",
    # CVE-2025-27516: the filter attr
    "attr": "{{ ('{0.__class__}' | attr('format'))(messages) }}",
    "attr of a dunder": "{{ messages | attr('__class__') }}",
    # llama-cpp-python CVE-2024-34359 and SGLang CVE-2026-5760: a template outside of a sandbox
    "subclasses": "{{ ().__class__.__base__.__subclasses__() }}",
    "globals of a function": "{{ strftime_now.__globals__ }}",
    "globals of a macro": "{% macro m() %}{% endmacro %}{{ m.__init__.__globals__ }}",
    "globals of the loop": "{% for x in [1] %}{{ loop.__init__.__globals__ }}{% endfor %}",
    "cycler": "{{ cycler('a').__init__.__globals__.os }}",
    "lipsum": "{{ lipsum.__globals__['os'].popen('id').read() }}",
    "code of a generator": "{{ (messages | map('string')).gi_frame.f_globals }}",
    "the context": "{{ self.__init__.__globals__ }}",
    "grouped by an attribute": "{{ messages | groupby('__class__') }}",
}
LEAKS = ("<class", "<module", "<built-in", "function ", "<generator", "/bin", "uid=")


@pytest.mark.parametrize("name", ESCAPES)
def test_a_template_reads_no_attribute_of_python(name: str) -> None:
    try:
        text = template(ESCAPES[name]).render(messages(["user"], ["hi"]))
    except PlaitError:
        return
    assert not any(leak in text for leak in LEAKS), text
