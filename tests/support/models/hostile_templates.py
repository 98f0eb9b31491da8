"""Chat templates that would run too long or escape from the sandbox, and what an escape would show."""

from __future__ import annotations

from plait.runtime.tokenizer.chat_template import MAX_SOURCE


def repeat_doubling(step: str) -> str:
    start = "{% set ns = namespace(s='ab') %}{% for i in range(60) %}"
    return start + step + "{% endfor %}{{ ns.s | string | length }}"


HARMFUL = {
    "nested loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "range": "{% for i in range(10 ** 9) %}{% endfor %}",
    "repeat": "{{ 'a' * 1000000000 }}",
    "repeat list": "{{ [1] * 1000000000 }}",
    "repeat from the right": "{{ 1000000000 * 'a' }}",
    "tilde": repeat_doubling("{% set ns.s = ns.s ~ ns.s %}"),
    "plus": repeat_doubling("{% set ns.s = ns.s + ns.s %}"),
    "append": repeat_doubling("{% set _ = ns.s.append(ns.s) %}").replace("'ab'", "[1]"),
    "join filter": repeat_doubling("{% set ns.s = [ns.s, ns.s] | join %}"),
    "join method": repeat_doubling("{% set ns.s = ''.join([ns.s, ns.s]) %}"),
    "join separator": repeat_doubling("{% set ns.s = range(100) | join(ns.s) %}"),
    "block": repeat_doubling("{% set x %}{{ ns.s }}{{ ns.s }}{% endset %}{% set ns.s = x %}"),
    "macro": repeat_doubling("{% macro f(a) %}{{ a }}{{ a }}{% endmacro %}{% set ns.s = f(ns.s) %}"),
    "replace filter": repeat_doubling("{% set ns.s = ns.s | replace('a', ns.s) %}"),
    "replace method": repeat_doubling("{% set ns.s = ns.s.replace('', ns.s) %}"),
    "format": repeat_doubling("{% set ns.s = '{0}{0}'.format(ns.s) %}"),
    "percent": repeat_doubling("{% set ns.s = '%s%s' % (ns.s, ns.s) %}"),
    "format filter": repeat_doubling("{% set ns.s = '%s%s' | format(ns.s, ns.s) %}"),
    "nested lists": repeat_doubling("{% set ns.s = [ns.s, ns.s] %}"),
    "nested tuples": repeat_doubling("{% set ns.s = (ns.s, ns.s) %}"),
    "nested dicts": repeat_doubling("{% set ns.s = {'a': ns.s, 'b': ns.s} %}"),
    "nested calls": repeat_doubling("{% set ns.s = dict(a=ns.s, b=ns.s) %}"),
    "numbers": "{% set ns = namespace(n=99) %}{% for i in range(60) %}{% set ns.n = ns.n * ns.n %}{% endfor %}",
    "power": "{{ 9 ** 9 ** 9 }}",
    "wide format": "{{ '{:999999999}'.format(1) }}",
    "wide percent": "{{ '%999999999d' % 1 }}",
    "starred percent": "{{ '%*d' % (999999999, 1) }}",
    "center": "{{ 'a'.center(999999999) }}",
    "ljust": "{{ 'a'.ljust(999999999) }}",
    "zfill": "{{ 'a'.zfill(width=999999999) }}",
    "indent": "{{ 'a\n' | indent(999999999) }}",
    "tojson": "{{ [[1]] | tojson(indent=999999999) }}",
    "round": "{{ 1.5 | round(999999999, 'ceil') }}",
    "recursion": "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "two recursions": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(99) }}",
    "much text": "{% for i in range(99999) %}{{ 'a' * 9999 }}{% endfor %}",
    "slow steps": "{% set s = 'ab' * 999999 %}{% for i in range(99999) %}{% set x = s | upper %}{% endfor %}",
    "lazy filters": "{% set s = range(99999) %}{% for i in s %}{{ s | map('string') | join | length }}{% endfor %}",
    "classes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ raise_exception.__globals__['sys'] }}",
    "mutation": "{{ messages.append(1) }}",
    "include": "{% include '/etc/passwd' %}",
    "unknown filter": "{{ 'a' | center(10) }}",
    "syntax": "{% for %}",
    "deep source": "{{ " + "(" * 20000 + "1" + ")" * 20000 + " }}",
    "deep loops": "{% for i in [1] %}" * 40 + "{% endfor %}" * 40,
    "long source": "a" * (MAX_SOURCE + 1),
    "long date": "{{ strftime_now('%999999999d') }}",
}

# Escapes that Jinja, vLLM and SGLang had.
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
