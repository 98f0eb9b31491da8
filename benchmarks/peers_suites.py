"""How right plait, llguidance, xgrammar and outlines-core are: on the official test suite, on the strings of xgrammar's
own tests, and on published schemas.

python benchmarks/peers_suites.py FOLDER [--corpus CORPUS.jsonl] [--deadline 2] [--only plait,llguidance]

FOLDER is where the suites are, or are put: the source distributions of jsonschema, which has the official suite (MIT),
and of xgrammar (Apache License 2.0), from the package index, and the strings that xgrammar_strings.py records. CORPUS
is what schema_corpus.py writes. Every library gets each schema as it is and a vocabulary of bytes, and texts in which
white space may stand anywhere; xgrammar is told to leave objects open, as the specification does. A text is right to
accept if it is JSON whose value is valid for jsonschema-rs, formats asserted. Libraries that are not installed are left
out; the tests of xgrammar need pytest, transformers and torch. Each schema is compiled and tried in a child process.
"""

from __future__ import annotations

import collections
import importlib.metadata
import importlib.util
import itertools
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema_rs
import llguidance
import numpy as np
import outlines_core
from common.child_runs import in_children
from common.options import parsed

try:
    import xgrammar  # here, since it takes seconds
except ImportError:
    xgrammar = None
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support" / "constrained"))
from schema_strategies import BYTE_VOCABULARY, EOS_ID

from plait.constrained import JsonSchema, Matcher, mask_words
from plait.constrained.compiler import build_grammar, compile_spec
from plait.constrained.guidance.inner_matcher import tokenizer_of

SCHEMA_URIS = {
    "draft7": "http://json-schema.org/draft-07/schema#",
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
}
SUITE, STRINGS = "jsonschema==4.26.0", "xgrammar==0.2.9"
TEST_FILES = [f"json_schema_{name}" for name in ("converter", "direct_converter", "excludes")]
TEST_FILES += ["grammar_matcher_json_schema"]
MAX_STEPS = 400  # bytes of a random text
MAX_ORDERS = 24  # of the names of a value
WALKS = 3
WIDTH = len(BYTE_VOCABULARY)


class Text(NamedTuple):
    """One text under a compiled schema, byte by byte."""

    accept: Callable[[int], bool]
    mask: Callable[[], Any]
    is_complete: Callable[[], bool]


Compiled = Callable[[], Text]
"""Returns a new text."""


def with_plait(schema: Any) -> Compiled:
    spec = JsonSchema(schema, whitespace=True, annotations=True)
    grammar = build_grammar(compile_spec(spec, BYTE_VOCABULARY), BYTE_VOCABULARY)
    row = np.zeros(mask_words(WIDTH), np.int32)

    def begin() -> Text:
        matcher: Matcher = grammar.matcher()
        return Text(matcher.accept, lambda: (matcher.fill_mask(row), row)[1], lambda: matcher.is_accepting)

    return begin


def with_llguidance(schema: Any) -> Compiled:
    text = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema))
    first = llguidance.LLMatcher(tokenizer_of(BYTE_VOCABULARY), text, log_level=0)
    if first.is_error():
        raise ValueError(first.get_error())

    def begin() -> Text:
        matcher = first.deep_copy()

        def accept(token: int) -> bool:
            return matcher.validate_tokens([token]) == 1 and bool(matcher.consume_token(token))

        return Text(accept, lambda: np.frombuffer(matcher.compute_bitmask(), np.int32), matcher.is_accepting)

    return begin


def with_outlines(schema: Any) -> Compiled:
    pattern = outlines_core.json_schema.build_regex_from_schema(json.dumps(schema))
    tokens = {text: [token] for token, text in enumerate(BYTE_VOCABULARY.token_bytes) if text}
    index = outlines_core.Index(pattern, outlines_core.Vocabulary(EOS_ID, tokens))

    def begin() -> Text:
        guide = outlines_core.Guide(index)

        def accept(token: int) -> bool:
            if token not in guide.get_tokens():
                return False
            guide.advance(token)
            return True

        def mask() -> Any:
            bits = np.zeros(32 * mask_words(WIDTH), np.uint8)
            bits[guide.get_tokens()] = 1
            return np.packbits(bits, bitorder="little").view(np.int32)

        return Text(accept, mask, lambda: guide.is_finished() or EOS_ID in guide.get_tokens())

    return begin


def with_xgrammar(schema: Any) -> Compiled:
    tokens = [b"</s>", *BYTE_VOCABULARY.token_bytes[1:]]
    information = xgrammar.TokenizerInfo(tokens, stop_token_ids=[EOS_ID])
    compiler = xgrammar.GrammarCompiler(information, max_threads=1)
    compiled = compiler.compile_json_schema(json.dumps(schema), strict_mode=False)
    row = xgrammar.allocate_token_bitmask(1, WIDTH)

    def begin() -> Text:
        matcher = xgrammar.GrammarMatcher(compiled)

        def mask() -> Any:
            matcher.fill_next_token_bitmask(row)
            return row[0].numpy()

        return Text(matcher.accept_token, mask, matcher.is_completed)

    return begin


LIBRARIES = {
    "plait": with_plait,
    "llguidance": with_llguidance,
    "xgrammar": with_xgrammar,
    "outlines-core": with_outlines,
}


def accepts(begin: Compiled, text: str) -> bool:
    state = begin()
    return all(state.accept(1 + byte) for byte in text.encode()) and state.is_complete()


def is_valid(judge: Any, text: str) -> bool | None:
    """Returns whether a text is JSON of a valid value.

    None if the judge cannot tell: a number overflows a double, or a text has half of a surrogate pair.
    """
    try:
        value = json.loads(text, parse_constant=lambda name: int(name))  # NaN is no JSON
    except (ValueError, RecursionError):
        return False
    try:
        return None if "inf" in repr(value).lower() else bool(judge.is_valid(value))
    except UnicodeEncodeError:
        return None


# -- what is asked of each schema, in a child process --------------------------------------------------


def try_group(library: Callable[[Any], Compiled], group: Any) -> str:
    begin = library(group["schema"])
    answers = [(test["valid"], accepts_some_order(partial(accepts, begin), test["data"])) for test in group["tests"]]
    if (False, True) in answers:
        return "accepts an invalid value"
    return "leaves out a valid value" if (True, False) in answers else "right"


def try_texts(library: Callable[[Any], Compiled], case: tuple[Any, list[str]]) -> list[bool]:
    begin = library(case[0])
    return [accepts(begin, text) for text in case[1]]


def try_walks(library: Callable[[Any], Compiled], schema: Any) -> list[str]:
    begin, rng = library(schema), random.Random(json.dumps(schema))
    return [text for _ in range(WALKS) if (text := walk(begin(), rng)) is not None]


def walk(state: Text, rng: random.Random) -> str | None:
    """Returns a random text under the masks, which often ends what it has begun; None if it does not end in time."""
    text = bytearray()
    for _ in range(MAX_STEPS):
        if state.is_complete():
            return text.decode(errors="replace")
        row = np.ascontiguousarray(state.mask()).view(np.uint8)
        allowed = [
            token for token in np.flatnonzero(np.unpackbits(row, bitorder="little")).tolist() if 0 < token < WIDTH
        ]
        if not allowed:
            return None
        ends = [token for token in allowed if chr(token - 1) in '"}]']
        token = rng.choice(ends if ends and rng.random() < 0.5 else allowed)
        if not state.accept(token):
            return None
        text.append(token - 1)
    return None


# -- the suites ----------------------------------------------------------------------------------------


def official(folder: Path, libraries: dict[str, Any], deadline_s: float) -> None:
    listed = list(groups(folder))
    print(f"official suite, drafts 7 and 2020-12: {len(listed)} schemas")
    for name, library in libraries.items():
        found = in_children(partial(try_group, library), listed, deadline_s)
        verdicts = collections.Counter(
            verdict or ("refused" if any(test["valid"] for test in group["tests"]) else "right")  # it has no value
            for group, verdict in zip(listed, found, strict=True)
        )
        show(name, verdicts, len(listed))


def groups(folder: Path) -> Iterator[Any]:
    """Yields the group of tests of each schema of the suite that names no other document, `$schema` included.

    The tests of format.json say that a format is not asserted. Their values are judged with formats asserted instead.
    """
    for draft, uri in SCHEMA_URIS.items():
        for path in sorted((folder / draft).glob("*.json")):
            for group in json.loads(path.read_text()):
                schema = group["schema"]
                if "localhost:1234" in json.dumps(schema):
                    continue
                if isinstance(schema, dict):
                    schema.setdefault("$schema", uri)
                if path.stem == "format":
                    judge = jsonschema_rs.validator_for(schema, validate_formats=True)
                    group["tests"] = [{**test, "valid": judge.is_valid(test["data"])} for test in group["tests"]]
                yield group


def accepts_some_order(accepts_text: Callable[[str], bool], value: Any) -> bool:
    texts = (json.dumps(v, ensure_ascii=False, separators=(",", ":")) for v in orders(value))
    return any(accepts_text(text) for text in itertools.islice(texts, MAX_ORDERS))


def orders(value: Any) -> Iterator[Any]:
    """Yields a value with the names of its objects in every order; 1.0 becomes 1."""
    if isinstance(value, dict):
        for names in itertools.permutations(value):
            for items in itertools.product(*(list(itertools.islice(orders(value[name]), 6)) for name in names)):
                yield dict(zip(names, items, strict=True))
    elif isinstance(value, list):
        yield from map(list, itertools.product(*(list(itertools.islice(orders(item), 6)) for item in value)))
    elif isinstance(value, float) and value.is_integer() and abs(value) <= 1 << 53:
        yield int(value)
    else:
        yield value


def strings(path: Path, libraries: dict[str, Any], deadline_s: float) -> None:
    """The tests close objects that list properties, unless the schema says something else of others (strict_mode)."""
    texts: dict[str, list[str]] = collections.defaultdict(list)
    for line in map(json.loads, path.open()):
        texts[line["source"]].append(line["text"])
    cases: list[tuple[Any, list[str]]] = []
    valid: list[bool | None] = []
    for source, listed in texts.items():
        schema = closed(json.loads(source))
        try:
            judge = jsonschema_rs.validator_for(schema, validate_formats=True, offline=True)
        except ValueError:
            continue  # no valid schema
        cases.append((schema, listed))
        valid += [is_valid(judge, text) for text in listed]
    print(f"strings of xgrammar's tests: {len(valid)} of {len(cases)} schemas; {valid.count(True)} are valid")
    for name, library in libraries.items():
        found = in_children(partial(try_texts, library), cases, deadline_s)
        answers = [
            answer
            for (_, listed), of_schema in zip(cases, found, strict=True)
            for answer in of_schema or [None] * len(listed)
        ]
        show(name, collections.Counter(map(verdict_of, valid, answers)), len(valid))


def closed(schema: Any) -> Any:
    if isinstance(schema, list):
        return [closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: part if name in ("enum", "const", "default") else closed(part) for name, part in schema.items()}
    properties = schema.get("properties")
    is_schema = isinstance(properties, dict) and all(isinstance(part, dict | bool) for part in properties.values())
    if is_schema and schema.keys().isdisjoint(("additionalProperties", "patternProperties", "unevaluatedProperties")):
        found["additionalProperties"] = False
    return found


def verdict_of(is_right: bool | None, answer: bool | None) -> str:
    if answer is None:
        return "refused"
    if is_right is None or answer is is_right:
        return "right"
    return "accepts an invalid value" if answer else "leaves out a valid value"


def published(path: Path, libraries: dict[str, Any], deadline_s: float) -> None:
    schemas = [json.loads(line)["schema"] for line in path.open()]
    print(f"published schemas: {len(schemas)}, {WALKS} random texts of each")
    for name, library in libraries.items():
        found = in_children(partial(try_walks, library), schemas, deadline_s)
        wrong = []
        for schema, texts in zip(schemas, found, strict=True):
            judge = jsonschema_rs.validator_for(schema, validate_formats=True, offline=True)
            wrong.append(sum(is_valid(judge, text) is False for text in texts or ()))
        taken, num_texts = sum(texts is not None for texts in found), sum(len(texts or ()) for texts in found)
        invalid = f"invalid {sum(wrong)}, under {sum(map(bool, wrong))} schemas"
        print(f"  {name:14} compiles {taken} ({taken / len(schemas):.1%}); texts {num_texts}, {invalid}", flush=True)


def show(name: str, verdicts: collections.Counter[str], total: int) -> None:
    others = ", ".join(
        f"{verdict} {count} ({count / total:.1%})" for verdict, count in sorted(verdicts.items()) if verdict != "right"
    )
    print(f"  {name:14} right {verdicts['right']} ({verdicts['right'] / total:.1%}); {others}", flush=True)


# -- fetching ------------------------------------------------------------------------------------------


def fetched(folder: Path, requirement: str) -> Path:
    """Returns the unpacked source distribution of a package, which is downloaded if it is not there."""
    name, _, version = requirement.partition("==")
    found = folder / f"{name}-{version}"
    if not found.exists():
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", name]
        subprocess.run([*pip, "--dest", str(folder), requirement], check=True)
        subprocess.run(["tar", "xzf", str(folder / f"{name}-{version}.tar.gz"), "-C", str(folder)], check=True)
    return found


def recorded(folder: Path) -> Path:
    """Returns the strings of xgrammar's tests, which are run if they were not."""
    path = folder / "strings.jsonl"
    if not path.exists():
        tests = fetched(folder, STRINGS) / "tests" / "python"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "xgrammar_strings"]
        environment = {"PYTHONPATH": str(Path(__file__).parent), "XGRAMMAR_STRINGS": str(path)}
        environment |= {"XGRAMMAR_TEST_OFFLINE": "1"}
        files = [str(tests / f"test_{name}.py") for name in TEST_FILES]
        subprocess.run([*command, *files], check=False, env=os.environ | environment)
    return path


def main() -> None:
    options = parsed(__doc__, "folder", corpus=None, deadline=2.0, only=",".join(LIBRARIES))
    folder = Path(options.folder)
    folder.mkdir(exist_ok=True)
    names = [name for name in options.only.split(",") if importlib.util.find_spec(name.replace("-", "_"))]
    libraries = {name: LIBRARIES[name] for name in names}
    print(", ".join(f"{name} {importlib.metadata.version(name)}" for name in libraries))
    official(fetched(folder, SUITE) / "json" / "tests", libraries, options.deadline)
    strings(recorded(folder), libraries, options.deadline)
    if options.corpus:
        published(Path(options.corpus), libraries, options.deadline)


if __name__ == "__main__":
    main()
