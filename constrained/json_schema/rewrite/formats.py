"""The supported formats, each as a pattern of the whole text.

A pattern may refuse rare forms that its RFC allows, but never allows what the RFC forbids. docs/constraints.md lists
the forms that are refused.
"""

from __future__ import annotations

_YEAR = r"(?:[0-9]{4})"
_LEAP = r"(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_LONG, _SHORT = r"(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])", r"(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
_DAYS = rf"(?:{_LONG}|{_SHORT}|02-(?:0[1-9]|1[0-9]|2[0-8]))"
_DATE = rf"(?:{_YEAR}-{_DAYS}|{_LEAP}-02-29)"
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_LABEL = r"[A-Za-z0-9](?:-?[A-Za-z0-9]){0,30}"
_HOST = rf"{_LABEL}(?:\.{_LABEL}){{0,3}}"
_OCTET = r"(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"{_OCTET}(?:\.{_OCTET}){{3}}"
_H = r"[0-9a-fA-F]{1,4}"
_CUT = [rf"(?:{_H}(?::{_H}){{0,{n - 1}}})?::(?:{_H}(?::{_H}){{0,{5 - n}}})?" for n in range(1, 6)]
_IPV6 = f"(?:{'|'.join([rf'(?:{_H}:){{7}}{_H}', *_CUT])})"
_CHAR = r"(?:[A-Za-z0-9._~!$&'()*+,;=:@-]|%[0-9A-F]{2})"
_TAIL = rf"(?:/{_CHAR}*)*(?:\?(?:{_CHAR}|[/?])*)?(?:#(?:{_CHAR}|[/?])*)?"
_URI = rf"(?:[a-z][a-z0-9+.-]*://{_HOST}(?::[0-9]{{1,4}})?{_TAIL}|(?:mailto|urn|tel|data):{_CHAR}+)"
_NO_COLON = _CHAR.replace("=:@", "=@")
_QUERY = rf"(?:\?(?:{_CHAR}|[/?])*)?(?:#(?:{_CHAR}|[/?])*)?"
_PATH = rf"//{_HOST}(?::[0-9]{{1,4}})?(?:/{_CHAR}*)*|/(?:{_CHAR}+(?:/{_CHAR}*)*)?|{_NO_COLON}+(?:/{_CHAR}*)*"
_URI_REFERENCE = rf"(?:{_URI}|(?:{_PATH})?{_QUERY})"
_UCSCHAR = r"\u00a0-\ud7ff\uf900-\ufdcf\ufdf0-\uffef"  # RFC 3987, without the planes above 0
_LETTERS = r"\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u02af\u0400-\u0481\u4e00-\u9fa5"  # of local parts of mail addresses


def _international(pattern: str) -> str:
    """Returns a pattern of URIs as one of IRIs, with international characters in paths, queries and fragments."""
    plain = "[A-Za-z0-9._~!$&'()*+,;=:@-]", "[A-Za-z0-9._~!$&'()*+,;=@-]"
    for characters in plain:
        pattern = pattern.replace(characters, f"{characters[:-1].removesuffix('-')}{_UCSCHAR}-]")
    return pattern


_VAR_CHAR = r"(?:[A-Za-z0-9_]|%[0-9A-Fa-f]{2})"
_VAR = rf"{_VAR_CHAR}(?:\.?{_VAR_CHAR})*(?:\*|:[1-9][0-9]{{0,3}})?"
_URI_TEMPLATE = rf"(?:[A-Za-z0-9._~:/?#\[\]@!$&()*+,;=-]|%[0-9A-Fa-f]{{2}}|\{{[+#./;?&]?{_VAR}(?:,{_VAR}){{0,30}}\}})*"
# Labels of precomposed letters that RFC 5892 allows, from left to right; the Punycode of 10 fits into 63 characters.
_IDN_LETTERS = (
    r"\u00df-\u00f6\u00f8-\u00ff\u03ac-\u03ce\u0430-\u045f"
    r"\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fa5\uac00-\ud7a3"
)
_IDN_LABEL = rf"(?:{_LABEL}|[a-z0-9{_IDN_LETTERS}](?:-?[a-z0-9{_IDN_LETTERS}]){{0,9}})"
# Regular expressions that ECMA 262 and Python allow alike: ASCII, groups nested up to two deep, simple lookbehind.
_ESCAPE = r"\\[dDwWsSnrtfv^$.*+?()\[\]{}|/\\]"
_RANGE = rf"(?:a-z|A-Z|0-9|[A-Za-z0-9_ .,:;=!@#%*+?/'()$]|{_ESCAPE})"
_TIMES = r"(?:[*+?]|\{(?:[0-9]{1,2},?|[01],[1-9][0-9]?|2,(?:[2-9]|[1-9][0-9])|3,(?:[3-9]|[1-9][0-9]))\})\??"
_ATOM = rf"(?:[A-Za-z0-9_ ,:;=!@#%&~'<>\"-]|\.|\[\^?{_RANGE}+-?\]|{_ESCAPE})"


def _alternatives(atom: str, group: str = "") -> str:
    """Returns a pattern of regular expressions of atoms, groups of `group`, lookahead of `group`, and lookbehind."""
    bare = rf"[|^$]|\(\?<[=!]{_ATOM}{{1,20}}\)"  # takes no quantifier
    if group:
        atom = rf"(?:{atom}|\((?:\?:)?{group}\))"
        bare += rf"|\(\?[=!]{group}\)"
    return rf"(?:{atom}(?:{_TIMES})?|{bare})*"


_STEP = r"/(?:[^~/\u0000-\u001f]|~[01])*"
_PERIOD = "(?:[0-9]{1,9}Y(?:[0-9]{1,9}M(?:[0-9]{1,9}D)?)?|[0-9]{1,9}M(?:[0-9]{1,9}D)?|[0-9]{1,9}D)"
_CLOCK = "T(?:[0-9]{1,9}H(?:[0-9]{1,9}M(?:[0-9]{1,9}S)?)?|[0-9]{1,9}M(?:[0-9]{1,9}S)?|[0-9]{1,9}S)"

FORMATS: dict[str, str] = {
    "date": _DATE,
    "time": _TIME,
    "date-time": rf"{_DATE}T{_TIME}",
    "duration": rf"P(?:{_PERIOD}(?:{_CLOCK})?|{_CLOCK}|[0-9]{{1,9}}W)",
    "email": rf"[A-Za-z0-9_+](?:[.-]?[A-Za-z0-9_+]){{0,31}}@{_HOST}",
    "hostname": _HOST,
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "uuid": r"[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}",
    "uri": _URI,
    "json-pointer": rf"(?:{_STEP})*",
    "relative-json-pointer": rf"(?:0|[1-9][0-9]{{0,8}})(?:#|(?:{_STEP})*)",
}
"""ECMA patterns, to be matched against the whole text."""
FORMATS |= {
    "idn-email": rf"[A-Za-z0-9_+{_LETTERS}](?:[.-]?[A-Za-z0-9_+{_LETTERS}]){{0,31}}@{_HOST}",
    "idn-hostname": rf"{_IDN_LABEL}(?:\.{_IDN_LABEL}){{0,3}}",
    "iri": _international(_URI),
    "uri-reference": _URI_REFERENCE,
    "iri-reference": _international(_URI_REFERENCE),
    "uri-template": _URI_TEMPLATE,
    "regex": _alternatives(_ATOM, _alternatives(_ATOM, _alternatives(_ATOM))),
}
