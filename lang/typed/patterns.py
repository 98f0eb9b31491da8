"""Regular expressions for numbers, dates and the like. They mean the same in Python and in a JSON schema.

Every text that matches can be parsed: no year 0, no 30th of February, no number outside the range of a float.
"""

from __future__ import annotations

INTEGER = r"-?(?:0|[1-9][0-9]{0,17})"
NUMBER = r"-?(?:0|[1-9][0-9]{0,14})(?:\.[0-9]{1,12})?"

_YEAR = "[1-9][0-9]{3}"
_LEAP_YEAR = "(?:[1-9][0-9](?:0[48]|[2468][048]|[13579][26])|(?:[2468][048]|[13579][26])00)"
_LONG_MONTH = "(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
_SHORT_MONTH = "(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
_CLOCK = "(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]"

DATE = f"(?:{_YEAR}-(?:{_LONG_MONTH}|{_SHORT_MONTH}|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
TIME = _CLOCK
NAIVE_DATETIME = f"{DATE}T{_CLOCK}"
DATETIME = f"{NAIVE_DATETIME}(?:Z|[+-](?:0[0-9]|1[0-4]):[0-5][0-9])"
DURATION = "P(?:[0-9]{1,5}D(?:T[0-9]{1,2}H)?|T(?:[0-9]{1,4}H(?:[0-9]{1,2}M)?|[0-9]{1,5}M|[0-9]{1,6}S))"
UUID = "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"
_UUID_VERSION = "[0-9a-f]{{8}}-[0-9a-f]{{4}}-{version}[0-9a-f]{{3}}-[89ab][0-9a-f]{{3}}-[0-9a-f]{{12}}"
COMPLEX = rf"{NUMBER}[+-]{NUMBER.removeprefix('-?')}j"
FRACTION = r"-?(?:0|[1-9][0-9]{0,14})(?:/[1-9][0-9]{0,8})?"

_LABEL = "[a-z](?:-?[a-z0-9]){0,30}"  # begins with a letter, so that no name looks like an IP address
_HOST = rf"{_LABEL}(?:\.{_LABEL}){{0,3}}(?::[1-9][0-9]{{0,3}})?"
_PATH = r"(?:/[A-Za-z0-9._~-]{0,60}){0,8}(?:\?[A-Za-z0-9._~=&+-]{0,120})?(?:#[A-Za-z0-9._~-]{0,60})?"
_MAIL = r"[a-z0-9](?:[._+-]?[a-z0-9]){0,30}@(?:[a-z](?:-?[a-z0-9]){0,30}\.){1,3}(?:com|org|net|edu|gov|int|[a-z]{2})"
_OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"{_OCTET}(?:\.{_OCTET}){{3}}"
_IPV4_NETWORK = (
    rf"{_OCTET}\.0\.0\.0/8|{_OCTET}\.{_OCTET}\.0\.0/16|(?:{_OCTET}\.){{3}}0/24|{_IPV4}/32"  # no bits of a host
)
_GROUP = "(?:0|[1-9a-f][0-9a-f]{0,3})"
_IPV6 = rf"(?:{_GROUP}:){{7}}{_GROUP}|(?:{_GROUP}:){{1,6}}:{_GROUP}|::{_GROUP}"
_IPV6_NETWORK = rf"(?:{_GROUP}:){{1,2}}:/32|(?:{_GROUP}:){{3}}:/48|(?:{_GROUP}:){{4}}:/64|(?:{_IPV6})/128"
_IPV4_INTERFACE, _IPV6_INTERFACE = rf"{_IPV4}/(?:[12]?[0-9]|3[0-2])", rf"(?:{_IPV6})/(?:[1-9]?[0-9]|1[01][0-9]|12[0-8])"

FORMATS = {
    "date": DATE,
    "time": TIME,
    "date-time": DATETIME,
    "duration": DURATION,
    "decimal": NUMBER,
    "fraction": FRACTION,
    "uuid": UUID,
    **{f"uuid{version}": _UUID_VERSION.format(version=version) for version in range(1, 9)},
    "email": _MAIL,
    "name-email": _MAIL,
    "ipv4": _IPV4,
    "ipv4interface": _IPV4_INTERFACE,
    "ipv4network": _IPV4_NETWORK,
    "ipv6": _IPV6,
    "ipv6interface": _IPV6_INTERFACE,
    "ipv6network": _IPV6_NETWORK,
    "ipvanyaddress": f"{_IPV4}|{_IPV6}",
    "ipvanyinterface": f"{_IPV4_INTERFACE}|{_IPV6_INTERFACE}",
    "ipvanynetwork": f"{_IPV4_NETWORK}|{_IPV6_NETWORK}",
}
"""The `format` names of JSON Schema and of Pydantic that are replaced by a pattern."""
FREE_FORMATS = frozenset(("path", "password"))
"""The `format` names of types that can be read from any text."""


def url(schemes: list[str] | None) -> str:
    """Returns the pattern of URLs of these schemes, or of http and https; at most 1,000 characters.

    >>> url(["file"])[:20]
    '(?:file)://(?:/[A-Za'
    """
    names = [scheme.replace("+", r"\+").replace(".", r"\.") for scheme in schemes or ("https", "http")]
    host = "" if schemes == ["file"] else _HOST
    return f"(?:{'|'.join(names)})://{host}{_PATH}"


def decimal(max_digits: int | None, decimal_places: int | None) -> str:
    """Returns the pattern of decimal numbers with at most so many digits, and so many of them after the point.

    >>> decimal(4, 1)
    '-?(?:0|[1-9][0-9]{0,2})(?:\\\\.[0-9]{1,1})?'
    """
    places = 12 if decimal_places is None else decimal_places
    if max_digits is not None:
        places = min(places, max_digits if decimal_places is not None else max_digits // 2)
    digits = 15 if max_digits is None else min(max_digits - places, 15)
    whole = "0" if digits <= 0 else f"(?:0|[1-9][0-9]{{0,{digits - 1}}})"
    if not places:
        return f"-?{whole}"
    return rf"-?{whole}(?:\.[0-9]{{1,{places}}}){'?' if digits > 0 else ''}"


def text_schema(pattern: str) -> dict[str, str]:
    """Returns the JSON schema of a string that matches `pattern` as a whole."""
    return {"type": "string", "pattern": f"^(?:{pattern})$"}
