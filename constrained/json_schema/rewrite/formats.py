"""The supported formats, each as a pattern of the whole text.

A pattern may refuse rare forms that its RFC allows, but never allows what the RFC forbids. docs/json-schema.md lists
the forms that are refused.
"""

from __future__ import annotations

# -- dates and times: RFC 3339 --------------------------------------------------------------------

_YEAR = r"(?:[0-9]{4})"
_LEAP = r"(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_LONG, _SHORT = r"(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])", r"(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
_DAYS = rf"(?:{_LONG}|{_SHORT}|02-(?:0[1-9]|1[0-9]|2[0-8]))"
_DATE = rf"(?:{_YEAR}-{_DAYS}|{_LEAP}-02-29)"
_CLOCK_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]"
_OFFSET = r"(?:[Zz]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_TIME = rf"(?:{_CLOCK_TIME}(?:\.[0-9]{{1,9}})?{_OFFSET}|23:59:60(?:\.[0-9]{{1,9}})?(?:[Zz]|[+-]00:00))"
_PERIOD = "(?:[0-9]{1,9}Y(?:[0-9]{1,9}M(?:[0-9]{1,9}D)?)?|[0-9]{1,9}M(?:[0-9]{1,9}D)?|[0-9]{1,9}D)"
_CLOCK = "T(?:[0-9]{1,9}H(?:[0-9]{1,9}M(?:[0-9]{1,9}S)?)?|[0-9]{1,9}M(?:[0-9]{1,9}S)?|[0-9]{1,9}S)"

# -- hosts: RFC 1123, RFC 4291 with the grammar of RFC 3986 ---------------------------------------


def _label(max_length: int) -> str:
    """Returns a pattern of labels of letters, digits and hyphens. No hyphens are third and fourth, as in "xn--"."""
    x, y = "[A-Za-z0-9]", "[A-Za-z0-9-]"
    return rf"{x}(?:{y}?{x}|{y}{y}{x}|{y}(?:{x}{y}|-{x}){y}{{0,{max_length - 5}}}{x})?"


# The first alternative adds no label: where a text may go on with a repeat of letters, a mask admits all words at once.
_ANY_LABEL = f"(?:[A-Za-z0-9]{{1,63}}|{_label(63)})"


_PUNYCODE_DIGITS = "abcdefghijklmnopqrstuvwxyz0123456789"
_NOT_ASCII = ((0xDF, 0xF6), (0xF8, 0xFF))  # the small letters of Latin-1


def _punycode_label(max_letters: int) -> str:
    """Returns a pattern of the A-labels of words with one letter of Latin-1 beside up to `max_letters` of ASCII.

    RFC 3492: behind the hyphen stands (letter - 128) (n + 1) + place, for n letters of ASCII, in digits of which the
    first one counts 1, the second 35 and the third 1225, each of the first two from 1 on unless it is the last.
    """
    words = list[str]()
    for count in range(1, max_letters + 1):
        ends = dict[str, list[int]]()
        for low, high in _NOT_ASCII:
            for delta in range((low - 128) * (count + 1), (high - 127) * (count + 1)):
                second, first = divmod(delta - 1, 35)
                third, second = divmod(second - 1, 35)
                ends.setdefault(_PUNYCODE_DIGITS[second + 1] + _PUNYCODE_DIGITS[third], []).append(first + 1)
        codes = [f"[{''.join(map(_PUNYCODE_DIGITS.__getitem__, sorted(firsts)))}]{end}" for end, firsts in ends.items()]
        words.append(f"[a-z0-9]{{{count}}}-(?:{'|'.join(codes)})")
    return f"xn--(?:{'|'.join(words)})"


# At most 64 + 8 x 15 + 63 = 247 characters of the 253 that RFC 1035 allows.
_HOST = rf"{_ANY_LABEL}(?:(?:\.{_label(14)}){{0,8}}\.{_ANY_LABEL})?"
_LONG_LABEL = f"(?:{_ANY_LABEL}|{_punycode_label(14)})"
_HOST_NAME = rf"{_LONG_LABEL}(?:(?:\.(?:{_label(14)}|{_punycode_label(6)})){{0,8}}\.{_LONG_LABEL})?"
_OCTET = r"(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"{_OCTET}(?:\.{_OCTET}){{3}}"
_GROUP = r"[0-9a-fA-F]{1,4}"
_LAST_32_BITS = rf"(?:{_GROUP}:{_GROUP}|{_IPV4})"


def _ipv6() -> str:
    """Returns RFC 3986's IPv6address: all eight groups, or "::" behind at most n groups and before the others."""
    forms = [rf"(?:{_GROUP}:){{6}}{_LAST_32_BITS}"]
    ends = [rf"(?:{_GROUP}:){{{n}}}{_LAST_32_BITS}" for n in range(5, -1, -1)] + [_GROUP, ""]
    for max_before, end in enumerate(ends):
        before = rf"(?:(?:{_GROUP}:){{0,{max_before - 1}}}{_GROUP})?" if max_before else ""
        forms.append(f"{before}::{end}")
    return f"(?:{'|'.join(forms)})"


_IPV6 = _ipv6()

# -- mail addresses: RFC 5321, RFC 6531 -----------------------------------------------------------

_ATEXT = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]"
_UTF8_TEXT = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~\u00a1-\ud7ff\uf900-\ufdcf\ufdf0-\uffef-]"


def _mailbox(atext: str, host: str) -> str:
    """Returns a pattern of mail addresses: a dot-string or a quoted string of at most 64 characters, and a host."""
    quoted = atext.replace("[", "[ ()<>,:;@.").replace("-]", r"\[\]-]")
    names = rf"{atext}{{1,64}}|{atext}(?:\.?{atext}){{0,31}}"
    names += rf"|{atext}{{1,16}}\.{atext}{{1,15}}"  # adds no name, as in _ANY_LABEL
    local = rf'(?:{names}|"(?:{quoted}|\\[ -~]){{0,31}}")'
    return rf"{local}@(?:{host}|\[{_IPV4}\]|\[IPv6:{_IPV6}\])"


# -- URIs: RFC 3986; IRIs: RFC 3987, without the planes above 0 -----------------------------------

_UCSCHAR = r"\u00a0-\ud7ff\uf900-\ufdcf\ufdf0-\uffef"
_IPRIVATE = r"\ue000-\uf8ff"


def _uri(further: str = "", private: str = "") -> tuple[str, str]:
    """Returns the patterns of a URI and of a URI reference.

    further: ranges of characters that stand where letters do, but not in the scheme; private: also in the query.
    """
    escape, plain = "%[0-9A-Fa-f]{2}", rf"A-Za-z0-9._~!$&'()*+,;={further}"
    name = rf"(?:[{plain}-]|{escape})*"
    info, char = rf"(?:[{plain}:-]|{escape})*", rf"(?:[{plain}:@-]|{escape})"
    literal = rf"\[(?:{_IPV6}|v[0-9A-Fa-f]+\.[A-Za-z0-9._~!$&'()*+,;=:-]+)\]"
    authority = rf"(?:{info}@)?(?:{literal}|{name})(?::[0-9]*)?"
    segments, rooted = rf"(?:/{char}*)*", rf"/(?:{char}+(?:/{char}*)*)?"
    tail = rf"(?:\?(?:[{plain}{private}:@/?-]|{escape})*)?(?:#(?:[{plain}:@/?-]|{escape})*)?"
    path = rf"(?://{authority}{segments}|{rooted}|{char}+{segments})?"
    relative = rf"(?://{authority}{segments}|{rooted}|(?:[{plain}@-]|{escape})+{segments})?"
    uri = rf"[A-Za-z]+[A-Za-z0-9+.-]*:{path}{tail}"
    return uri, rf"(?:{uri}|{relative}{tail})"


_URI, _URI_REFERENCE = _uri()
_IRI, _IRI_REFERENCE = _uri(_UCSCHAR, _IPRIVATE)

# -- URI templates: RFC 6570 ----------------------------------------------------------------------

_VAR_CHAR = r"(?:[A-Za-z0-9_]|%[0-9A-Fa-f]{2})"
_VAR = rf"{_VAR_CHAR}(?:\.?{_VAR_CHAR})*(?:\*|:[1-9][0-9]{{0,3}})?"
_LITERAL = rf"[A-Za-z0-9._~:/?#\[\]@!$&()*+,;={_UCSCHAR}{_IPRIVATE}-]"
_URI_TEMPLATE = rf"(?:{_LITERAL}|%[0-9A-Fa-f]{{2}}|\{{[+#./;?&]?{_VAR}(?:,{_VAR}){{0,30}}\}})*"

# -- international host names: RFC 5892 -----------------------------------------------------------

# Labels of precomposed letters, from left to right; the Punycode of 10 fits into 63 characters.
_IDN_LETTERS = (
    r"\u00df-\u00f6\u00f8-\u00ff\u03ac-\u03ce\u0430-\u045f"
    r"\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fa5\uac00-\ud7a3"
)
# Others have up to two letters beyond ASCII, each of at most 5 digits: 4 + 3 x 12 + 2 x 5 + 1 + 2 x 5 = 61 characters.
_ASCII_PART, _HYPHENATED = "[a-z0-9]{0,12}", "[a-z0-9]{1,4}"
_MIXED = rf"(?:{_HYPHENATED}-)?(?:{_ASCII_PART}[{_IDN_LETTERS}]){{1,2}}{_ASCII_PART}(?:-{_HYPHENATED})?"
_IDN_LABEL = rf"(?:{_LONG_LABEL}|[a-z0-9{_IDN_LETTERS}](?:-?[a-z0-9{_IDN_LETTERS}]){{0,9}}|{_MIXED})"
_IDN_HOST = rf"(?:{_label(14)}\.){{0,3}}{_IDN_LABEL}(?:\.{_IDN_LABEL}){{0,2}}"  # 3 x 15 + 3 x 64 = 237 characters

# -- regular expressions: ECMA 262, with groups nested up to two deep ------------------------------

_NON_ASCII = r"\u00a1-\ud7ff\uf900-\ufdcf\ufdf0-\uffef"
_HEX = "[0-9A-Fa-f]"
_CATEGORY = "[CLMNPSZ]|C[cfnos]|L[lmotu]|M[cen]|N[dlo]|P[cdefios]|S[ckmo]|Z[lps]|Letter"
_SCRIPT = "(?:Script|sc)=(?:Arabic|Cyrillic|Devanagari|Greek|Han|Hangul|Hebrew|Hiragana|Katakana|Latin|Thai)"
_PROPERTY = rf"[pP]\{{(?:{_CATEGORY}|Emoji|ASCII|Any|{_SCRIPT})\}}"
_CODE = rf"x{_HEX}{{2}}|u{_HEX}{{4}}|u\{{(?:10|{_HEX})?{_HEX}{{1,4}}\}}|c[A-Za-z]"
_ESCAPE = rf"\\(?:[dDwWsSnrtfv^$.*+?()\[\]{{}}|/\\]|{_CODE}|{_PROPERTY})"


def _ranges(characters: str) -> str:
    """Returns a pattern of the ranges of two of `characters`, which are in order."""
    return "|".join(f"{low}-[{characters[position:]}]" for position, low in enumerate(characters))


_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_LETTER_RANGES = f"{_ranges('0123456789')}|{_ranges(_LETTERS)}|{_ranges(_LETTERS.upper())}"
_FURTHER_RANGES = r"à-ÿ|À-Þ|а-я|А-Я|ぁ-ん|ァ-ヶ|一-龥|\\u4e00-\\u9f(?:a5|ff)|\\u00c0-\\u00ff|\\u0400-\\u04ff"
_SINGLE = rf"[A-Za-z0-9_ .,:;=!@#%*+?/'()$&{{}}|<>~\"{_NON_ASCII}]|{_ESCAPE}|\\-"
_CLASS = rf"\[\^?-?(?:(?:{_LETTER_RANGES}|{_FURTHER_RANGES}|{_SINGLE})\^*)+-?\]"
_COUNTS = "|".join(f"{low},(?:[{low}-9]|[1-9][0-9]{{1,2}})" for low in range(10))
_COUNTS += "|" + "|".join(f"{tens}0,(?:{tens}[0-9]|[{tens + 1}-9][0-9]|[1-9][0-9]{{2}})" for tens in range(1, 9))
_TIMES = rf"(?:[*+?]|\{{(?:[0-9]{{1,3}},?|{_COUNTS})\}})\??"
_ATOM = rf"(?:[A-Za-z0-9_ ,:;=!@#%&~'<>/\"{_NON_ASCII}-]|\.|{_CLASS}|{_ESCAPE})"


def _alternatives(atom: str, group: str = "") -> str:
    """Returns a pattern of regular expressions of atoms, groups of `group`, and lookaround of `group`."""
    bare = r"[|^$]|\\[bB]"  # takes no quantifier
    if group:
        atom = rf"(?:{atom}|\((?:\?:)?{group}\))"
        bare += rf"|\(\?<?[=!]{group}\)"
    return rf"(?:{atom}(?:{_TIMES})?|{bare})*"


_FLAT = _alternatives(_ATOM)
_NAMED_GROUP = rf"\(\?<[A-Za-z_][A-Za-z0-9_]{{0,31}}>{_FLAT}\)(?:{_TIMES})?"  # one, since two names must differ
_REGEX = rf"{_alternatives(_ATOM, _alternatives(_ATOM, _FLAT))}(?:{_NAMED_GROUP}{_FLAT})?"

# -- JSON pointers: RFC 6901 ----------------------------------------------------------------------

_STEP = r"/(?:[^~/\u0000-\u001f]|~[01])*"

FORMATS: dict[str, str] = {
    "date": _DATE,
    "time": _TIME,
    "date-time": rf"{_DATE}[Tt]{_TIME}",
    "duration": rf"P(?:{_PERIOD}(?:{_CLOCK})?|{_CLOCK}|[0-9]{{1,9}}W)",
    "email": _mailbox(_ATEXT, _HOST),
    "hostname": _HOST_NAME,
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "uuid": r"[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}",
    "uri": _URI,
    "json-pointer": rf"(?:{_STEP})*",
    "relative-json-pointer": rf"(?:0|[1-9][0-9]{{0,8}})(?:#|(?:{_STEP})*)",
    "idn-email": _mailbox(_UTF8_TEXT, f"(?:{_HOST}|{_IDN_HOST})"),
    "idn-hostname": _IDN_HOST,
    "iri": _IRI,
    "uri-reference": _URI_REFERENCE,
    "iri-reference": _IRI_REFERENCE,
    "uri-template": _URI_TEMPLATE,
    "regex": _REGEX,
}
"""ECMA patterns, to be matched against the whole text."""
