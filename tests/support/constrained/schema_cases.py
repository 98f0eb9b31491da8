"""Hand-written schemas with valid and invalid values, which cover every supported keyword.

Each row is (schema, valid, invalid). test_accepted_values.py compares every row with
jsonschema-rs, so that an error of the table fails a test. `variants` embeds a row in other schemas.
"""

from __future__ import annotations

from typing import Any

Row = tuple[Any, list[Any], list[Any]]

OLD4 = {"$schema": "http://json-schema.org/draft-04/schema#"}
OLD7 = {"$schema": "http://json-schema.org/draft-07/schema#"}
PERSON = {"name": {"type": "string"}, "age": {"type": "integer"}}
CAT = {"type": "object", "properties": {"kind": {"const": "cat"}, "lives": {"type": "integer"}}, "required": ["kind"]}
DOG = {"type": "object", "properties": {"kind": {"const": "dog"}, "name": {"type": "string"}}, "required": ["kind"]}
KIND = {"required": ["kind"]}

ROWS: list[Row] = [
    # type
    (True, [1, "a", None, [], {}], []),
    ({}, [1.5, "a", True, [1], {"a": 1}], []),
    ({"type": "null"}, [None], [0, "", False, []]),
    ({"type": "boolean"}, [True, False], [0, 1, "true", None]),
    ({"type": "integer"}, [0, -7, 123456789], [1.5, "1", None, True]),
    ({"type": "number"}, [0, -1.25, 1000000], ["1", None, False]),
    ({"type": "string"}, ["", "a b", 'é日\n"\\'], [1, None, ["a"]]),
    ({"type": "array"}, [[], [1, "a", [None]]], [{}, "[]", 0]),
    ({"type": "object"}, [{}, {"a": 1, "b": {"c": []}}], [[], "{}", None]),
    ({"type": ["string", "null"]}, ["a", None], [1, False]),
    ({"type": ["integer", "object"]}, [3, {"a": 1}], [3.5, []]),
    ({"type": ["number", "integer"]}, [3, 3.5], ["3"]),
    # enum and const
    ({"enum": ["red", "green"]}, ["red", "green"], ["blue", "re", "reds", 1]),
    ({"enum": [1, "1", None, True]}, [1, "1", None, True], [2, "2", False]),
    ({"enum": [{"a": [1, 2]}, []]}, [{"a": [1, 2]}, []], [{"a": [1]}, {}, [1]]),
    ({"enum": [1, "a", 2], "type": "integer"}, [1, 2], ["a", 3]),
    ({"enum": ["aa", "b"], "minLength": 2}, ["aa"], ["b", "a"]),
    ({"enum": [1, 5, 9], "minimum": 4, "not": {"const": 9}}, [5], [1, 9]),
    ({"const": "x"}, ["x"], ["y", "", None]),
    ({"const": None}, [None], [0, "null"]),
    ({"const": {"a": {"b": [True]}}}, [{"a": {"b": [True]}}], [{"a": {"b": [False]}}, {}]),
    ({"const": 'a"b\\c\né'}, ['a"b\\c\né'], ["a", "ab"]),
    ({"const": 3, "type": ["string", "integer"]}, [3], ["3"]),
    ({"enum": ["a", "b"], "pattern": "^a"}, ["a"], ["b"]),
    ({"type": "boolean", "not": {"const": True}}, [False], [True]),
    # strings
    ({"type": "string", "minLength": 2}, ["ab", "日本", "abc"], ["", "a", "é"]),
    ({"type": "string", "maxLength": 2}, ["", "a", "日本"], ["abc", "日本語"]),
    ({"type": "string", "minLength": 1, "maxLength": 3}, ["a", '\n"\\'], ["", "abcd"]),
    ({"minLength": 2}, ["ab", 1, None, []], ["a"]),
    ({"type": "string", "pattern": "a"}, ["a", "bab", "xxa"], ["", "b"]),
    ({"type": "string", "pattern": "^a"}, ["a", "ab"], ["ba", ""]),
    ({"type": "string", "pattern": "a$"}, ["a", "ba"], ["ab"]),
    ({"type": "string", "pattern": "^[0-9]{3}$"}, ["123"], ["12", "1234", "a12"]),
    ({"type": "string", "pattern": "^(a|bc)+$"}, ["a", "abc", "bca"], ["b", ""]),
    ({"type": "string", "pattern": "^a|b$"}, ["a", "ax", "xb"], ["xa", "bx"]),
    ({"type": "string", "pattern": "^(a$|b)"}, ["a", "b", "bx"], ["ax", "c"]),
    ({"type": "string", "pattern": "^\\d+\\.\\d{2}$"}, ["1.50", "12.00"], ["1.5", "a.00", "١.00"]),
    ({"type": "string", "pattern": "^\\w+$"}, ["ab_1"], ["é", "a b", ""]),
    ({"type": "string", "pattern": "^\\S+\\s\\S+$"}, ["a b", "é x"], ["ab", "a "]),
    ({"type": "string", "pattern": "^[^\\s]$"}, ["a", "é"], [" ", "\u00a0", "\u2028"]),
    ({"type": "string", "pattern": "^.$"}, ["a", "日"], ["", "\n", "ab"]),
    ({"type": "string", "pattern": "^\\u0041\\x42\\/$"}, ["AB/"], ["AB", "ab/"]),
    ({"type": "string", "pattern": "^[\\w.-]+@[\\w-]+\\.[a-z]{2,}$"}, ["a.b@c-d.org"], ["a@b", "@b.org"]),
    ({"type": "string", "pattern": "^(?:x|y)?z{2,3}$"}, ["zz", "xzzz"], ["z", "xyzz"]),
    ({"type": "string", "pattern": "^[a\\]b]$"}, ["a", "]", "b"], ["c", "\\"]),
    ({"type": "string", "pattern": "^(?<year>[0-9]{4})$"}, ["2024"], ["24"]),
    ({"type": "string", "pattern": "", "maxLength": 1}, ["", "a"], ["ab"]),
    ({"type": "string", "pattern": "^a+$", "minLength": 2, "maxLength": 3}, ["aa", "aaa"], ["a", "aaaa", "ab"]),
    # formats
    ({"type": "string", "format": "date"}, ["2024-02-29", "1999-12-31"], ["2023-02-29", "2024-13-01", "2024-1-1", ""]),
    ({"type": "string", "format": "time"}, ["12:30:00Z", "23:59:59.5+01:00"], ["24:00:00Z", "12:30", "12:30:00"]),
    ({"type": "string", "format": "date-time"}, ["2024-02-29T12:30:00Z"], ["2024-02-30T12:30:00Z", "2024-02-29"]),
    ({"type": "string", "format": "duration"}, ["P1Y", "PT5M", "P3W", "P1DT2H"], ["P", "1Y", "PT", "P1H"]),
    ({"type": "string", "format": "email"}, ["a@b.org", "a.b+c@x-y.com"], ["a", "@b", "a@", "a b@c.d"]),
    ({"type": "string", "format": "hostname"}, ["a", "a-b.example.org"], ["-a", "a-", "a..b", ""]),
    ({"type": "string", "format": "ipv4"}, ["127.0.0.1", "255.255.255.255"], ["256.0.0.1", "1.2.3", "01.2.3.4"]),
    ({"type": "string", "format": "ipv6"}, ["::1", "1:2:3:4:5:6:7:8", "fe80::1:2"], ["1:2", ":::", "g::1"]),
    ({"type": "string", "format": "uuid"}, ["123e4567-e89b-12d3-a456-426614174000"], ["123e4567", ""]),
    ({"type": "string", "format": "uri"}, ["https://a.org/b?c=d#e", "urn:x:y"], ["a b", "//a.org", ""]),
    ({"type": "string", "format": "regex"}, ["^[a-z]+$", "(a|b){1,3}", ""], ["(", "a**", "[z-a]", "a{3,1}"]),
    ({"type": "string", "format": "uri-template"}, ["/a/{b}", "{?c*,d:3}"], ["{", "{a,}", "a b"]),
    ({"type": "string", "format": "iri"}, ["https://a.org/é?ü#ö"], ["a b", "/é", ""]),
    ({"type": "string", "format": "uri-reference"}, ["../a?b", "#c", "//a.org/d"], ["a b", "\u00e9"]),
    ({"type": "string", "format": "idn-email"}, ["jörg@b.org"], ["jörg", "a b@c.d"]),
    ({"type": "string", "format": "json-pointer"}, ["", "/a/b~0c~1d", "/"], ["a", "/~2"]),
    ({"format": "date"}, [1, None, "2024-01-01"], ["today"]),
    # numbers
    ({"type": "integer", "minimum": 3}, [3, 4, 100], [2, -3, 0]),
    ({"type": "integer", "maximum": -3}, [-3, -100], [-2, 0, 3]),
    ({"type": "integer", "minimum": -12, "maximum": 105}, [-12, 0, 99, 105], [-13, 106, 1000]),
    ({"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 6}, [4, 5], [3, 6]),
    ({"type": "number", "minimum": 0.5, "maximum": 2}, [0.5, 1, 1.75, 2], [0.4, 2.1, -1]),
    ({"type": "number", "exclusiveMinimum": 0}, [0.1, 3], [0, -1]),
    ({"minimum": 3}, [3, "a", None], [2, 2.5]),
    ({"type": "integer", "multipleOf": 5}, [0, 10, -15], [3, 11]),
    ({"type": "number", "multipleOf": 0.5}, [0.5, 2, 3.5], [0.3, 1.25]),
    ({"type": "integer", "multipleOf": 3, "minimum": 4, "maximum": 10}, [6, 9], [3, 5, 12]),
    ({**OLD4, "type": "integer", "minimum": 3, "exclusiveMinimum": True}, [4], [3]),
    ({**OLD4, "type": "integer", "maximum": 3, "exclusiveMaximum": False}, [3, 2], [4]),
    # arrays
    ({"type": "array", "items": {"type": "integer"}}, [[], [1, 2, 3]], [["a"], [1, None]]),
    ({"type": "array", "items": False}, [[]], [[1]]),
    ({"type": "array", "minItems": 2}, [[1, 2], [1, 2, 3]], [[], [1]]),
    ({"type": "array", "maxItems": 2}, [[], [1, 2]], [[1, 2, 3]]),
    ({"type": "array", "minItems": 1, "maxItems": 2, "items": {"enum": ["a"]}}, [["a"], ["a", "a"]], [[], ["b"]]),
    ({"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}]}, [[1, "a", None], [1], []], [["a"]]),
    ({"type": "array", "prefixItems": [{"const": 1}], "items": {"const": 2}}, [[1, 2, 2], [1]], [[2], [1, 1]]),
    ({"type": "array", "prefixItems": [{"const": 1}], "items": False}, [[1], []], [[1, 1]]),
    ({**OLD7, "type": "array", "items": [{"const": 1}], "additionalItems": False}, [[1], []], [[1, 2], [2]]),
    ({**OLD7, "type": "array", "items": [{"const": 1}]}, [[1, "x"], []], [[2]]),
    ({**OLD7, "items": {"const": 1}, "additionalItems": False}, [[1, 1], 3], [[2]]),
    ({"type": "array", "uniqueItems": True, "maxItems": 1}, [[], [1]], [[1, 2]]),
    ({"type": "array", "uniqueItems": False}, [[1, 1]], [{}]),
    ({"oneOf": [{"pattern": "a"}, {"pattern": "b$"}]}, ["a", "xb", "ba"], ["ab", "c", "", 7]),
    ({"maxLength": 2.0, "minItems": 1.0, "minProperties": 1.0}, ["ab", [1], {"a": 1}], ["abc", [], {}]),
    ({"not": {"pattern": "^[a-c]+$"}}, ["", "abd"], ["a", "cab", 3]),
    ({"if": {"pattern": "^a"}, "then": {"minLength": 3}, "type": "string"}, ["abc", "b", ""], ["a", "ab"]),
    (
        {"type": "array", "uniqueItems": True, "items": {"type": ["string", "object"]}},
        [["a", "b", {}, {"a": 1}]],
        [["a", "a"], [{"a": [1]}, "", {"a": [1]}]],
    ),
    ({"type": "array", "uniqueItems": True, "items": {"enum": ["a", "b", "c"]}}, [["a", "c"], []], [["a", "a"]]),
    (
        {"type": "array", "uniqueItems": True, "items": {"type": "boolean"}, "minItems": 1},
        [[True, False]],
        [[], [True, True]],
    ),
    ({"uniqueItems": True, "items": {"type": "null"}}, [[None], [], 3, {}], [[None, None], [1]]),
    ({"type": "array", "contains": {"const": 1}, "maxItems": 3}, [[1], [2, 1], [1, 2, 1]], [[], [2], [2, 2, 2]]),
    ({"type": "array", "contains": True}, [[1]], [[]]),
    ({"type": "array", "contains": {}, "minContains": 2, "maxContains": 3}, [[1, 2]], [[1], [1, 2, 3, 4]]),
    ({"contains": {"type": "string"}, "maxItems": 2}, [["a"], [1, "a"], 5, "x"], [[1], []]),
    ({"contains": {"const": 1}, "minContains": 0}, [[], [2]], []),
    ({"type": "array", "prefixItems": [{"const": 1}], "unevaluatedItems": False}, [[1], []], [[1, 2]]),
    (
        {"type": "array", "allOf": [{"prefixItems": [{"const": 1}]}], "unevaluatedItems": {"const": 2}},
        [[1, 2]],
        [[1, 3]],
    ),
    ({"type": "array", "items": {"type": "array", "items": {"type": "array", "maxItems": 0}}}, [[[[]], []]], [[[[1]]]]),
    # objects
    ({"type": "object", "properties": PERSON}, [{}, {"name": "a"}, {"name": "a", "age": 3}], [{"name": 1}]),
    ({"type": "object", "properties": PERSON, "required": ["name"]}, [{"name": "a"}], [{}, {"age": 3}]),
    ({"type": "object", "properties": PERSON, "additionalProperties": False}, [{"age": 1}], [{"x": 1}]),
    ({"type": "object", "properties": PERSON, "additionalProperties": {"type": "null"}}, [{"x": None}], [{"x": 1}]),
    ({"type": "object", "required": ["z"]}, [{"z": 1}], [{}, {"a": 1}]),
    ({"type": "object", "additionalProperties": {"type": "integer"}}, [{"a": 1, "b": 2}, {}], [{"a": "x"}]),
    ({"type": "object", "additionalProperties": False}, [{}], [{"a": 1}]),
    ({"properties": {"a": {"const": 1}}}, [{"a": 1}, 3, [], {"b": 1}], [{"a": 2}]),
    ({"type": "object", "properties": {"a": False}}, [{}, {"b": 1}], [{"a": 1}]),
    ({"type": "object", "properties": {'a/b~c"\n': {"const": 1}}}, [{'a/b~c"\n': 1}], [{'a/b~c"\n': 2}]),
    ({"type": "object", "properties": {"é": {"const": 1}}}, [{"é": 1}, {}], [{"é": 2}]),
    ({"type": "object", "patternProperties": {"^a": {"type": "integer"}}}, [{"ab": 1, "b": "x"}], [{"ab": "x"}]),
    ({"type": "object", "patternProperties": {"^a": {"const": 1}, "^b": {"const": 2}}}, [{"a": 1, "b": 2}], [{"b": 1}]),
    ({"type": "object", "patternProperties": {"^a": {}}, "additionalProperties": False}, [{"ax": 1}], [{"b": 1}]),
    (
        {"type": "object", "properties": {"ab": {"type": "integer"}}, "patternProperties": {"^a": {"minimum": 3}}},
        [{"ab": 3}, {"ac": 4}],
        [{"ab": 2}, {"ac": 1}],
    ),
    ({"type": "object", "patternProperties": {"a": {"const": 1}, "b": {"const": 1}}}, [{"ab": 1, "c": 3}], [{"ab": 2}]),
    ({"type": "object", "minProperties": 1}, [{"a": 1}], [{}]),
    ({"type": "object", "minProperties": 3}, [{"a": 1, "b": 1, "c": 1}], [{"a": 1, "b": 1}]),
    ({"type": "object", "maxProperties": 1}, [{}, {"a": 1}], [{"a": 1, "b": 2}]),
    ({"type": "object", "maxProperties": 0}, [{}], [{"a": 1}]),
    ({"type": "object", "properties": PERSON, "minProperties": 1}, [{"age": 1}, {"x": 1}], [{}]),
    ({"type": "object", "properties": PERSON, "additionalProperties": False, "minProperties": 1}, [{"age": 1}], [{}]),
    (
        {"type": "object", "properties": PERSON, "additionalProperties": False, "maxProperties": 1},
        [{"age": 1}, {}],
        [{"name": "a", "age": 1}],
    ),
    (
        {"type": "object", "properties": PERSON, "additionalProperties": False, "minProperties": 2},
        [{"name": "a", "age": 1}],
        [{"age": 1}],
    ),
    ({"type": "object", "required": ["a", "b"], "minProperties": 2}, [{"a": 1, "b": 1}], [{"a": 1}]),
    ({"type": "object", "required": ["a"], "minProperties": 2}, [{"a": 1, "b": 1}], [{"a": 1}]),
    ({"type": "object", "propertyNames": {"pattern": "^[a-z]+$"}}, [{"ab": 1}, {}], [{"A": 1}, {"": 1}]),
    ({"type": "object", "propertyNames": {"maxLength": 2}}, [{"ab": 1}], [{"abc": 1}]),
    (
        {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": {"type": "integer"}},
        [{"a": 1}],
        [{"c": 1}, {"a": "x"}],
    ),
    ({"propertyNames": {"const": "a"}}, [{"a": 1}, {}, 3], [{"b": 1}]),
    ({"propertyNames": False}, [{}, 3], [{"b": 1}]),
    ({"propertyNames": {"type": "integer"}}, [{}, 3], [{"1": 1}]),
    ({"propertyNames": {"type": ["string", "null"], "maxLength": 1}}, [{"b": 1}, {}], [{"bb": 1}]),
    (
        {"type": "object", "properties": {"a": {}, "B": {}}, "propertyNames": {"pattern": "^[a-z]"}},
        [{"a": 1, "c": 1}],
        [{"B": 1}],
    ),
    ({"dependentRequired": {"a": ["b"]}}, [{"b": 1}, {}, {"b": 1, "a": 1}, {"a": 1, "b": 1, "x": 2}, 3], [{"a": 1}]),
    (
        {
            "type": "object",
            "properties": {"n": {"type": "string"}},
            "dependentRequired": {"a": ["b", "c"]},
            "additionalProperties": {"type": "integer"},
        },
        [{"n": "x", "a": 1, "b": 1, "c": 1}, {"c": 1, "b": 2, "a": 3, "d": 4}, {"b": 1, "c": 2, "a": 3}, {"b": 1}],
        [{"a": 1}, {"a": 1, "b": 1}, {"a": "x", "b": 1, "c": 1}, {"b": "x"}],
    ),
    (
        {"type": "object", "properties": {"a": {}, "b": {}, "c": {}}, "dependentRequired": {"a": ["b"], "b": ["c"]}},
        [{"a": 1, "b": 1, "c": 1}, {"c": 1}],
        [{"a": 1, "b": 1}, {"b": 1}],
    ),
    (
        {**OLD7, "properties": {"a": {}, "b": {}}, "dependencies": {"a": ["b"]}},
        [{"a": 1, "b": 1}, {"b": 1}],
        [{"a": 1}],
    ),
    (
        {**OLD7, "properties": {"a": {}, "b": {}}, "dependencies": {"a": {"required": ["b"]}}},
        [{"a": 1, "b": 1}],
        [{"a": 1}],
    ),
    (
        {"properties": {"a": {}, "b": {}}, "dependentSchemas": {"a": {"properties": {"b": {"type": "integer"}}}}},
        [{"a": 1, "b": 1}, {"b": "x"}],
        [{"a": 1, "b": "x"}],
    ),
    ({"type": "object", "properties": PERSON, "unevaluatedProperties": False}, [{"age": 1}], [{"x": 1}]),
    (
        {
            "type": "object",
            "allOf": [{"properties": {"a": {"const": 1}}}],
            "properties": {"b": {}},
            "unevaluatedProperties": False,
        },
        [{"b": 1, "a": 1}],
        [{"c": 1}],
    ),
    # allOf, anyOf, oneOf, not, if
    ({"allOf": [{"type": "integer"}, {"minimum": 3}, {"maximum": 5}]}, [3, 5], [2, 6, "a"]),
    ({"allOf": [{"type": ["string", "integer"]}, {"type": ["integer", "null"]}]}, [3], ["a", None]),
    ({"allOf": [{"pattern": "^a"}, {"pattern": "b$"}], "type": "string"}, ["ab", "axb"], ["a", "b"]),
    (
        {
            "allOf": [
                {"required": ["a"], "properties": {"a": {"type": "integer"}}},
                {"properties": {"a": {"minimum": 2}}},
            ],
            "type": "object",
        },
        [{"a": 2}],
        [{"a": 1}, {}],
    ),
    ({"allOf": [{"minItems": 1}, {"items": {"const": 1}}], "type": "array"}, [[1], [1, 1]], [[], [2]]),
    ({"anyOf": [{"type": "string", "maxLength": 1}, {"type": "integer"}]}, ["a", 3], ["ab", None]),
    ({"anyOf": [{"minimum": 3}, {"multipleOf": 2}], "type": "integer"}, [3, 2, 4], [1]),
    ({"anyOf": [{"required": ["a"]}, {"required": ["b"]}], "type": "object"}, [{"a": 1}, {"b": 1}], [{}, {"c": 1}]),
    ({"anyOf": [{"type": "string"}, True]}, [1, "a"], []),
    ({"oneOf": [{"type": "string"}, {"type": "null"}]}, ["a", None], [1]),
    ({"oneOf": [{"type": "integer", "maximum": 3}, {"type": "integer", "minimum": 4}]}, [3, 4], ["a", 3.5]),
    ({"oneOf": [CAT, DOG]}, [{"kind": "cat", "lives": 9}, {"kind": "dog"}], [{"kind": "cow"}, {}]),
    (
        {"oneOf": [{"required": ["a"]}, {"required": ["b"]}], "type": "object", "properties": {"a": {}, "b": {}}},
        [{"a": 1}, {"b": 1}],
        [{"a": 1, "b": 1}, {}],
    ),
    (
        {"oneOf": [KIND | {"properties": {"kind": {"const": f"k{at}"}}} for at in range(70)]},
        [{"kind": "k0"}, {"kind": "k69"}],
        [3, "a", None, [], {}, {"kind": "x"}],
    ),
    ({"oneOf": [{"required": ["a"]}, {"type": "string"}]}, [{"a": 1}, 3, None], ["x", {}]),
    ({"oneOf": [{"pattern": "^a"}, {"pattern": "^b"}], "type": "string"}, ["ax", "bx"], ["c", ""]),
    ({"oneOf": [{"enum": ["a", "b"]}, {"enum": ["c"]}]}, ["a", "c"], ["d"]),
    ({"oneOf": [{"const": 1}, {"const": 2}, {"type": "string"}]}, [1, 2, "x"], [3]),
    ({"oneOf": [{"minLength": 3}, {"maxLength": 5}], "type": "string"}, ["a", "abcdef"], ["abc", "abcde"]),
    ({"oneOf": [{"type": "array", "minItems": 2}, {"type": "array", "maxItems": 1}]}, [[], [1, 2]], [3]),
    ({"oneOf": [{"type": "string"}]}, ["a"], [1]),
    (
        {
            "oneOf": [
                {"type": "object", "properties": {"t": {"enum": ["x", "y"]}}, "required": ["t"]},
                {"type": "object", "properties": {"t": {"const": "z"}}, "required": ["t"]},
            ]
        },
        [{"t": "x"}, {"t": "z"}],
        [{"t": "w"}],
    ),
    (
        {
            "oneOf": [
                {"type": "object", "properties": {"a": {}}, "required": ["a"], "additionalProperties": False},
                {"type": "object", "properties": {"b": {}}, "required": ["b"], "additionalProperties": False},
            ]
        },
        [{"a": 1}, {"b": 1}],
        [{}, {"a": 1, "b": 1}],
    ),
    ({"not": {"type": "string"}}, [1, None, []], ["a"]),
    ({"not": {"type": ["number", "null"]}}, ["a", {}], [1, 1.5, None]),
    ({"type": "object", "not": {"required": ["a"]}}, [{"b": 1}, {}], [{"a": 1}]),
    (
        {"type": "object", "not": {"required": ["a", "b"]}, "properties": {"a": {}, "b": {}}},
        [{"a": 1}, {"b": 1}, {}],
        [{"a": 1, "b": 1}],
    ),
    ({"type": "string", "not": {"enum": ["a", "bc"]}}, ["", "b", "bcd", "c", "ab"], ["a", "bc"]),
    ({"type": "string", "not": {"const": "admin"}}, ["adm", "admins", ""], ["admin"]),
    ({"type": "integer", "not": {"const": 3}}, [2, 4], [3]),
    ({"type": "string", "not": {"minLength": 3}}, ["ab", ""], ["abc"]),
    ({"type": "integer", "not": {"minimum": 3}}, [2, -1], [3, 4]),
    ({"type": "array", "not": {"maxItems": 1}}, [[1, 2]], [[1], []]),
    ({"not": {"not": {"type": "null"}}}, [None], [1]),
    ({"not": False}, [1, "a"], []),
    ({"not": {"anyOf": [{"type": "string"}, {"type": "null"}]}}, [1, []], ["a", None]),
    ({"type": "object", "not": {"properties": {"a": {"const": 1}}, "required": ["a"]}}, [{"a": 2}, {}], [{"a": 1}]),
    ({"if": {"type": "string"}, "then": {"minLength": 2}, "else": {"type": "integer"}}, ["ab", 3], ["a", None]),
    (
        {
            "type": "object",
            "properties": {"k": {"type": "string"}, "v": {}},
            "required": ["k"],
            "if": {"properties": {"k": {"const": "n"}}},
            "then": {"properties": {"v": {"type": "integer"}}},
            "else": {"properties": {"v": {"type": "string"}}},
        },
        [{"k": "n", "v": 1}, {"k": "s", "v": "x"}, {"k": "n"}],
        [{"k": "n", "v": "x"}, {"k": "s", "v": 1}],
    ),
    ({"type": "integer", "if": {"minimum": 10}, "then": {"multipleOf": 5}}, [9, 10, 15], [11]),
    (
        {"type": "object", "properties": {"a": {}, "b": {}}, "if": {"required": ["a"]}, "else": {"required": ["b"]}},
        [{"a": 1}, {"b": 1}],
        [{}],
    ),
    ({"then": {"type": "null"}}, [1, None], []),
    ({"if": {"type": "null"}}, [1, None], []),
    # numbers that are no integers
    ({"oneOf": [{"type": "integer"}, {"type": "number", "minimum": 3}]}, [2, -1, 3.5], [3, 2.5]),
    ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, [0.5, -12.25, 1e-07], [0, 3]),
    ({"type": ["number", "string"], "not": {"type": "integer"}}, [0.5, "a"], [1, None]),
    ({"type": "number", "not": {"type": "integer"}, "minimum": 1.5, "maximum": 2}, [1.5, 1.75], [2, 1.25, 1]),
    ({"type": "number", "not": {"type": "integer"}, "multipleOf": 0.25}, [1.5, 0.25], [2, 0.1]),
    ({"not": {"type": ["integer", "null"]}}, [1.5, "a", {}], [1, None]),
    ({"not": {"not": {"type": "integer"}}}, [1], [1.5, None]),
    ({"if": {"type": "integer"}, "then": {"minimum": 3}, "else": {"type": "number"}}, [3, 1.5], [2, "a"]),
    ({"enum": [1, 1.5, "a"], "not": {"type": "integer"}}, [1.5, "a"], [1]),
    ({"allOf": [{"enum": [1, 1.5, "a"]}, {"not": {"type": ["integer", "string"]}}]}, [1.5], [1, "a"]),
    ({"type": "array", "items": {"not": {"type": "integer"}}, "minItems": 1}, [[1.5], ["a", 0.5]], [[1]]),
    ({"allOf": [{"enum": [[1], {}, "a", 1.5, 2]}, {"not": {"type": "integer"}}]}, [[1], {}, "a", 1.5], [2]),
    ({"allOf": [{"enum": [2.5, 2.6, "a"]}, {"multipleOf": 0.25}]}, [2.5, "a"], [2.6]),
    (
        {
            "type": "array",
            "contains": {"type": "integer"},
            "maxContains": 1,
            "items": {"type": "number"},
            "maxItems": 3,
        },
        [[1], [1.5, 1]],
        [[1, 2], [1.5]],
    ),
    (
        {"properties": {"a": {"type": "number", "not": {"type": "integer"}, "minimum": 1, "maximum": 1}}},
        [{}],
        [{"a": 1}],
    ),
    # many forbidden patterns
    (
        {
            "type": "string",
            "pattern": "^[a-z_]*$",
            "allOf": [
                {"not": {"pattern": f"^{word}$"}} for word in ("a", "as", "[aA]nd", "if", "is", "in", "or", "x_.*")
            ],
        },
        ["", "an", "ands", "i", "x", "ass", "isin"],
        ["and", "as", "a", "in", "if", "x_", "x_y"],
    ),
    # control characters
    ({"type": "string", "not": {"enum": ["a", "\0"]}}, ["", "b", "ab"], ["a"]),
    ({"type": "string", "pattern": "^(\\x01b|[\\x7f]d|c)$"}, ["c"], ["b", "d", "cc"]),
    ({"patternProperties": {"^\\x1fb?$": False}}, [{"b": 1}, {"": 1}], []),
    ({"const": "\u0001"}, ["\u0001"], ["u0001", ""]),
    ({"enum": ["a\0b", "c\x7f", "\n", None, 3, False]}, ["a\0b", "c\x7f", "\n", None, 3, False], ["ab", "c", True]),
    ({"const": {"a\0": ["\x1f", {"\x7f": 1.5}]}}, [{"a\0": ["\x1f", {"\x7f": 1.5}]}], [{"a": []}]),
    ({"properties": {"a\0": {"minimum": 0.5}, "\x7f": {"minimum": 0.5}}}, [{"a\0": 1, "\x7f": 0.5}], [{"\x7f": 0.25}]),
    ({"allOf": [{"enum": ["\0", "a"]}, {"maxLength": 1, "pattern": "[^b]"}]}, ["\0", "a"], ["b"]),
    # references
    ({"$ref": "#/$defs/a", "$defs": {"a": {"type": "integer"}}}, [1], ["a"]),
    ({"$ref": "#/definitions/a%20b", "definitions": {"a b": {"const": 1}}}, [1], [2]),
    ({"$defs": {"a~b": {"const": 1}}, "items": {"$ref": "#/$defs/a~0b"}, "type": "array"}, [[1]], [[2]]),
    ({"$ref": "#/$defs/a", "minimum": 3, "$defs": {"a": {"type": "integer"}}}, [3], [2]),
    ({"$ref": "#x", "$defs": {"a": {"$anchor": "x", "type": "null"}}}, [None], [1]),
    (
        {
            "type": "object",
            "properties": {"v": {"type": "integer"}, "next": {"$ref": "#"}},
            "additionalProperties": False,
        },
        [{"v": 1, "next": {"next": {}}}, {}],
        [{"next": {"x": 1}}],
    ),
    (
        {
            "$ref": "#/$defs/t",
            "$defs": {"t": {"anyOf": [{"type": "integer"}, {"type": "array", "items": {"$ref": "#/$defs/t"}}]}},
        },
        [1, [[1], []]],
        ["a", [["a"]]],
    ),
    ({"$id": "http://x.org/s", "$ref": "#/$defs/a", "$defs": {"a": {"type": "integer"}}}, [1], ["a"]),
    ({"properties": {"a": {"type": "integer"}, "b": {"$ref": "#/properties/a"}}}, [{"a": 1, "b": 2}], [{"b": "x"}]),
    # annotations
    ({"title": "t", "description": "d", "default": 1, "examples": [1], "$comment": "c", "type": "integer"}, [1], ["a"]),
    ({"readOnly": True, "writeOnly": False, "deprecated": True, "type": "null"}, [None], [1]),
    ({"x-thing": {"type": "null"}, "displayOrder": 3, "type": "integer"}, [1], ["a"]),
    ({"type": "string", "contentEncoding": "base64", "contentMediaType": "text/plain"}, ["YQ=="], [1]),
]

REFUSED: list[tuple[Any, str, str]] = [
    ({"oneOf": [{"pattern": "a"}, {"pattern": "x{200}"}], "type": "string"}, "/oneOf", "may share"),
    ({"type": "string", "pattern": "(a)\\1(?!b)"}, "/pattern", "backreference"),
    ({"type": "string", "pattern": "(?<=(?=a)a)c"}, "/pattern", "within lookbehind"),
    ({"type": "string", "pattern": "("}, "/pattern", "wrong|missing|group"),
    ({"type": "string", "pattern": "\\p{Script=Greek}"}, "/pattern", "Unicode property"),
    ({"minLenght": 1}, "/minLenght", "minLength"),
    ({"type": "string", "nullable": True}, "/nullable", "null in it"),
    ({"type": "strin"}, "/type", "wrong type or range"),
    ({"minLength": -1}, "/minLength", "wrong type or range"),
    ({"properties": {"a": []}}, "/properties", "wrong type or range"),
    ({"$ref": "http://example.org/x"}, "/$ref", "nothing is fetched"),
    ({"$ref": "other.json"}, "/$ref", "nothing is fetched"),
    ({"$ref": "#/$defs/none"}, "/$ref", "nothing"),
    ({"$ref": "#"}, "/$ref", "leads back to itself"),
    ({"$dynamicRef": "#x"}, "/$dynamicRef", "dynamic"),
    ({"x-guidance": {"lenient": True}, "type": "string"}, "/x-guidance", "not accepted"),
    ({"not": {"uniqueItems": True}}, "/not", "complement"),
    ({"oneOf": [{"type": "string", "format": "email"}, {"type": "string"}]}, "/oneOf", "may share"),
    ({"if": {"uniqueItems": True}, "then": False}, "/if", "complement"),
    (
        {"type": "object", "patternProperties": {"x{200}": {"const": 1}, "b": {"const": 2}}},
        "/patternProperties",
        "too large",
    ),
    ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "/allOf", "no value|Unsatisfiable"),
    (False, "", "no value"),
    ({"enum": []}, "", "no value"),
    ({"$schema": "http://json-schema.org/draft-03/schema#"}, "/$schema", "draft"),
    (
        {
            "unevaluatedProperties": False,
            "allOf": [{"anyOf": [{"properties": {f"{a}{b}": {}}} for b in range(9)]} for a in "ab"],
        },
        "/unevaluatedProperties",
        "too many alternatives",
    ),
]


def variants(row: Row) -> list[tuple[str, Row]]:
    """The row itself, and inside an array, a property, a reference and an alternative."""
    schema, valid, invalid = row
    if not isinstance(schema, dict):
        return [("itself", row)]
    head = {name: schema[name] for name in ("$schema",) if name in schema}
    rows: list[tuple[str, Row]] = [("itself", row)]
    if "$ref" in str(schema):
        return rows
    inner = {name: value for name, value in schema.items() if name != "$schema"}
    array = {**head, "type": "array", "items": inner, "minItems": 1}
    rows.append(("items", (array, [[value] for value in valid], [[value] for value in invalid] + [[]])))
    property_schema = {**head, "type": "object", "properties": {"in": inner}, "required": ["in"]}
    rows.append(("property", (property_schema, [{"in": v} for v in valid], [{"in": v} for v in invalid] + [{}])))
    referred = {**head, "definitions": {"d": inner}, "allOf": [{"$ref": "#/definitions/d"}]}
    rows.append(("reference", (referred, valid, invalid)))
    marked = {"type": "object", "properties": {"m": {"const": 7}}, "required": ["m"], "additionalProperties": False}
    either = {**head, "type": "object", "properties": {"v": {"anyOf": [marked, inner]}}, "required": ["v"]}
    rows.append(("either", (either, [{"v": v} for v in [*valid, {"m": 7}]], [])))
    return rows
