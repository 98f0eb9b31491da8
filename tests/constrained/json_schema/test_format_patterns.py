"""Formats as patterns: what a pattern allows is valid for jsonschema-rs, and texts as people write them are allowed."""

from __future__ import annotations

import re
from itertools import product

import jsonschema_rs
import pytest
from example_share import sample_of, share_of
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.constrained.json_schema.rewrite.formats import FORMATS
from plait.constrained.json_schema.rewrite.patterns.conversion import ecma_to_plain_pattern


class Patterns(dict[str, re.Pattern[str]]):
    """The pattern of each format, which is compiled when it is first asked for."""

    def __missing__(self, name: str) -> re.Pattern[str]:
        self[name] = re.compile(ecma_to_plain_pattern(f"^(?:{FORMATS[name]})$").pattern)
        return self[name]


PATTERNS = Patterns()
VALIDATORS = {
    name: jsonschema_rs.Draft202012Validator({"type": "string", "format": name}, validate_formats=True)
    for name in FORMATS
}
EXAMPLES = {
    "regex": r"^\d{3}-\d{2,4}$ (a|b(?:c)*)+? [^\]x-] [\w.-]+@x ^(?:[0-9]{1,3}\.){3}[0-9]{1,3}$ ^[A-Za-z_]\w*$ a{1,}"
    r" ^(?=.*\d)(?!.*[_])\w{8,}$ (?<!a)b(?<=[bc]x) (?:a(?=b|c))* [^/]+/[^/]+ ^(?<year>\d{4})-\d\d$ \p{Lu}\P{Ll}+"
    r" [a-fA-F0-9] [1-9]\d* ^[\p{L}_-]+$ \u0041\x41\u{1F600} \bword\b [一-龥]+ é+ a{10,12} [-a] x{0,255}"
    r" \p{Script=Latin} (?<=ab*)c",
    "uri-template": "/{a} http://x.org/{+p}{?b*,c:3}{&d} {#x,hello} {/var:1,var} %20 {;x,y} {a.b} {%41} /ü{x}",
    "uri": "http://localhost:11434 http://localhost:57367/ ssh://git@github.com/a.git git+ssh://git@github.com/a/b.git"
    " https://user:pw@github.com/x file:///etc/passwd http://[::1]:80/ HTTP://EXAMPLE.COM data:text/plain;base64,SGk="
    " data:, urn:isbn:1 mailto:a@b http://a_b/ http://a?b?c/#d?e/ a:/ http://a/%4f%4F//x http://[v1.a:b]/ a:b?c"
    " http://[::ffff:1.2.3.4]/ chrome-extension://abc/x tel:+1-2",
    "iri": "https://a.org/é?ü#ö http://a.org:80/ urn:x:y http://müller.de:99999/",
    "iri-reference": "/é a/b#ü //x.org/a ? # é/x:é",
    "uri-reference": "../a?x #f ?q /a//b a;b=c ///x ./a:b //a:99999/x a:b:c",
    "email": "te~st@example.com !#$%&'*+-/=?^_`{|}~@x.org a.b.c@x.y a@[127.0.0.1] a@[IPv6:::1] a@localhost"
    rf' "a\"b"@x.org {"a" * 64}@x.org a@a.b.c.d.e.f',
    "idn-email": "jörg@b.org a.b@c.d 実例@x.org a@müller.de",
    "hostname": f"a.b.c.d.e.f.g.h {'a' * 63} {'a' * 63}.{'b' * 63} a--b 1.2.3.4 A.B {'a' * 40}.s3.eu-west-1.a.com"
    " xn--bcher-kva.example www.xn--mller-kva.com xn--mnchen-3ya.de a.xn--caf-dma.b.c",
    "idn-hostname": f"müller.de straße.example 例え.テスト 실례.com пример.org a-b.c {'a' * 63}"
    " bundesärztekammer.de www.mail.bücher.co.uk nord-münchnerin.de mein-grüßgott.de xn--bcher-kva.example"
    " mail.google.internal.a-b.company.org",
    "ipv6": ":: ::1 1:: 1:2:3:4:5:6:7:: ::2:3:4:5:6:7:8 ::6666:6666:6666:6666:6666:6666 ::1.2.3.4 1:2:3:4:5:6:1.2.3.4"
    " 1:2:3:4:5::1.2.3.4 1::3:4:5:6:7:8 1:2:3:4:5:6:7:8 ::ffff:255.0.0.1 fe80::1",
    "date-time": "2024-01-01t10:00:00z 1998-12-31T23:59:60Z 1998-12-31T23:59:60.5+00:00 2024-02-29T00:00:00.123-23:59",
    "time": "10:00:00z 23:59:60Z 23:59:59.5+01:30",
}
MAY_BE_EMPTY = ("regex", "uri-template", "iri-reference", "uri-reference")


def with_few_characters(written: re.Match[str]) -> str:
    """A range of a class with 200 of its characters at most, its ends among them: Hypothesis lists them all."""
    first, last = (int(code, 16) for code in written.groups())
    if last - first < 200:
        return written[0]
    return "".join(f"\\U{first + (last - first) * place // 199:08x}" for place in range(200))


@pytest.mark.parametrize("name", sample_of([name for name in FORMATS if "json-pointer" not in name], least=8))  # slow
def test_what_a_pattern_allows_is_valid(name) -> None:
    pattern = re.sub(r"\\U(\w{8})-\\U(\w{8})", with_few_characters, PATTERNS[name].pattern)

    @settings(max_examples=share_of(30), deadline=None)
    @given(st.from_regex(pattern, fullmatch=True))
    def check(text: str) -> None:
        assert VALIDATORS[name].is_valid(text), text

    check()


@pytest.mark.parametrize(("name", "texts"), EXAMPLES.items())
def test_common_texts_are_allowed(name, texts) -> None:
    for text in (*texts.split(), *([""] if name in MAY_BE_EMPTY else [])):
        assert PATTERNS[name].fullmatch(text), text
        assert VALIDATORS[name].is_valid(text), text


def _is_written_label(label: str, most: int) -> bool:
    return 0 < len(label) <= most and "-" not in (label[0], label[-1]) and label[2:4] != "--"


def _is_written_host(text: str) -> bool:
    first, *labels = text.split(".")
    middle, last = labels[:-1], labels[-1:]
    ends = all(_is_written_label(label, 63) for label in (first, *last))
    return ends and len(middle) <= 8 and all(_is_written_label(label, 14) for label in middle)


def _is_written_name(text: str) -> bool:
    names = text.split(".")
    return all(names) and len("".join(names)) <= (32 if names[1:] else 64)


LABELS = {
    (kind * 64)[:count] for kind in ("a", "a-b", "a--b", "-a", "aa--") for count in (0, 1, 2, 3, 4, 5, 14, 15, 63, 64)
}
HOSTS = [pattern.format(label) for label in LABELS for pattern in ("{}", "{}.a", "a.{}", "a.{}.a", "a.b.{0}.b.{0}.{0}")]
NAMES = ["a" * count for count in (0, 1, 15, 16, 17, 30, 31, 32, 63, 64, 65)]


@pytest.mark.parametrize("name", ["email", "hostname"])
def test_hosts_are_exactly_those_of_the_page(name: str) -> None:
    begin = "a@" if name == "email" else ""
    for host in (*HOSTS, *(".".join("a" * count) for count in (9, 10, 11))):
        assert bool(PATTERNS[name].fullmatch(begin + host)) is _is_written_host(host), host


def test_names_of_mail_addresses_are_exactly_those_of_the_page() -> None:
    for count in (1, 2, 3):
        for names in map(".".join, product(NAMES, repeat=count)):
            assert bool(PATTERNS["email"].fullmatch(f"{names}@a")) is _is_written_name(names), names


@pytest.mark.parametrize("count", range(1, 15))
def test_a_labels_with_one_letter_of_latin_1(count: int) -> None:
    """All of them for words of so many letters of ASCII, by Python's codec, and none with other digits."""
    letters = [chr(code) for code in (*range(0xDF, 0xF7), *range(0xF8, 0x100))]
    words = ["b" * at + letter + "b" * (count - at) for letter in letters for at in range(count + 1)]
    labels = {f"xn--{word.encode('punycode').decode()}" for word in words}
    codes = map("".join, product("abcdefghijklmnopqrstuvwxyz0123456789", "abyz0189", "abz0"))
    others = {f"xn--{'b' * count}-{code}" for code in codes} - labels
    assert all(PATTERNS["hostname"].fullmatch(label) and VALIDATORS["hostname"].is_valid(label) for label in labels)
    assert not any(PATTERNS["hostname"].fullmatch(label) for label in others)


def test_the_longest_international_labels_fit() -> None:
    for one, other in product("\xdf\xff\u3041\u4e00\ud7a3", repeat=2):
        label = f"zzzz-{'z' * 12}{one}{'z' * 12}{other}{'z' * 12}-zzzz"
        assert PATTERNS["idn-hostname"].fullmatch(label) and VALIDATORS["idn-hostname"].is_valid(label)
        assert 50 < len(f"xn--{label.encode('punycode').decode()}") <= 63


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=100, deadline=None)
@given(text=st.text(alphabet='aZ09é{}()[]*+?|\\^$.,:;/#%&=@~<>" -xnpu', max_size=8))
def test_texts_that_are_not_valid_are_not_allowed(name, text) -> None:
    if PATTERNS[name].fullmatch(text):
        assert VALIDATORS[name].is_valid(text), text
