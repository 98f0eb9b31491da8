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
FORMATS |= {"idn-email": FORMATS["email"], "idn-hostname": FORMATS["hostname"]}
FORMATS |= {"iri": FORMATS["uri"], "uri-reference": FORMATS["uri"], "iri-reference": FORMATS["uri"]}
