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
DATETIME = f"{DATE}T{_CLOCK}(?:Z|[+-](?:0[0-9]|1[0-4]):[0-5][0-9])"
DURATION = "P(?:[0-9]{1,5}D(?:T[0-9]{1,2}H)?|T(?:[0-9]{1,4}H(?:[0-9]{1,2}M)?|[0-9]{1,5}M|[0-9]{1,6}S))"
UUID = "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"

FORMATS = {"date": DATE, "time": TIME, "date-time": DATETIME, "duration": DURATION, "decimal": NUMBER}
"""The `format` names of JSON Schema that are replaced by a pattern."""


def text_schema(pattern: str) -> dict[str, str]:
    """Returns the JSON schema of a string that matches `pattern` as a whole."""
    return {"type": "string", "pattern": f"^(?:{pattern})$"}
