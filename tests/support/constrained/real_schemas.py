"""Realistic schemas: tools, OpenAPI, Kubernetes, package files, workflows, zod, and more.

REAL maps a name to a schema. All are written for these tests; pydantic_models.py has Pydantic's.
"""

# ruff: noqa: E501

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]
S: Schema = {"type": "string"}
I: Schema = {"type": "integer"}  # noqa: E741
N: Schema = {"type": "number"}
B: Schema = {"type": "boolean"}
D7 = {"$schema": "http://json-schema.org/draft-07/schema#"}
D20 = {"$schema": "https://json-schema.org/draft/2020-12/schema"}


def text(**more: Any) -> Schema:
    return {"type": "string", **more}


def array(items: Any, **more: Any) -> Schema:
    return {"type": "array", "items": items, **more}


def closed(required: str = "", **properties: Any) -> Schema:
    return {**opened(required, **properties), "additionalProperties": False}


def opened(required: str = "", **properties: Any) -> Schema:
    schema: Schema = {"type": "object", "properties": properties}
    return {**schema, "required": required.split()} if required else schema


def mapping(values: Any, **more: Any) -> Schema:
    return {"type": "object", "additionalProperties": values, **more}


def one_of(*kinds: Any, **more: Any) -> Schema:
    return {"oneOf": list(kinds), **more}


def any_of(*kinds: Any, **more: Any) -> Schema:
    return {"anyOf": list(kinds), **more}


def enum(values: str) -> Schema:
    return {"type": "string", "enum": values.split()}


def ref(name: str) -> Schema:
    return {"$ref": f"#/definitions/{name}"}


def tagged(kind: str, tag: str = "type", **properties: Any) -> Schema:
    return {"type": "object", "properties": {tag: {"const": kind}, **properties}, "required": [tag, *properties]}


NULL = {"type": "null"}
DATE, TIME, EMAIL, URI, UUID = (text(format=f) for f in ("date", "date-time", "email", "uri", "uuid"))
PORT = {"type": "integer", "minimum": 1, "maximum": 65535}

TOOLS = {
    "weather": closed("location", location=text(description="City, e.g. Paris"), unit=enum("celsius fahrenheit")),
    "search": closed("query", query=text(minLength=1), top_k={**I, "minimum": 1, "maximum": 20, "default": 5}),
    "send_mail": closed("to subject", to=array(EMAIL, minItems=1), subject=text(maxLength=120), body=S, cc=array(EMAIL)),
    "book_flight": closed("origin destination date", origin=text(pattern="^[A-Z]{3}$"), date=DATE, flexible=B,
                          destination=text(pattern="^[A-Z]{3}$"), cabin={"enum": ["economy", "business", "first"]}),
    "sql": closed("statement", statement=S, parameters=array(any_of(S, N, B, NULL)), timeout_ms={**I, "minimum": 0}),
    "edit_file": closed("path edits", path=S, edits=array(closed("old new", old=S, new=S), minItems=1)),
    "shell": opened("command", command=array(S), cwd=any_of(S, NULL), env=mapping(S)),
    "strict_nulls": closed("name age", name={"type": ["string", "null"]}, age={"type": ["integer", "null"]}),
    "no_arguments": {"type": "object", "properties": {}},
    "calendar": closed("title start", title=S, start=TIME, end=TIME, attendees=array(EMAIL, uniqueItems=True)),
    "one_or_many": closed("ids", ids=one_of(S, array(S, minItems=1))),
    "vector_filter": {**ref("f"), "definitions": {"f": one_of(
        closed("and", **{"and": array(ref("f"))}), closed("or", **{"or": array(ref("f"))}),
        closed("field op value", field=S, op=enum("eq ne lt gt"), value=any_of(S, N, B)))}},
    "extract": closed("people", people=array(closed("name", name=S, role=any_of(S, NULL), confidence={
        **N, "minimum": 0, "maximum": 1}))),
    "classify": closed("label reason", label=enum("bug feature question other"), reason=text(maxLength=400)),
    "tool_choice": one_of(tagged("function", name=S), tagged("retrieval"), enum("auto none required")),
}  # fmt: skip

OPENAPI = {
    "pet": opened("name photoUrls", id={**I, "format": "int64"}, name=S, photoUrls=array(S), tags=array(opened(
        id={**I, "format": "int64"}, name=S)), status=enum("available pending sold"), category=opened(id=I, name=S)),
    "pet_nullable": opened("name", name=S, owner={**S, "nullable": True}),
    "discriminated": {"oneOf": [tagged("card", "kind", number=text(pattern=r"^\d{12,19}$")),
                                tagged("iban", "kind", iban=text(pattern="^[A-Z]{2}[0-9]{2}[A-Z0-9]{11,30}$"))],
                      "discriminator": {"propertyName": "kind"}},
    "page": opened("items total", items=array(opened("id", id=UUID, created_at=TIME)), total={**I, "minimum": 0},
                   next={**URI, "description": "absent on the last page"}),
    "problem": opened(type=text(format="uri-reference", default="about:blank"), title=S, status={
        **I, "minimum": 100, "maximum": 599}, detail=S, instance=text(format="uri-reference")),
    "money": closed("amount currency", amount=text(pattern=r"^-?\d+(\.\d{1,2})?$"), currency=text(
        minLength=3, maxLength=3)),
    "upload": opened("file", file=text(format="binary"), checksum=text(pattern="^[a-f0-9]{64}$")),
    "all_of_base": {"allOf": [ref("base"), opened("email", email=EMAIL)],
                    "definitions": {"base": opened("id", id=I, created=TIME)}},
    "patch": array(one_of(closed("op path value", op=enum("add replace test"), path=text(format="json-pointer"),
                                 value={}), closed("op path", op={"const": "remove"}, path=text(format="json-pointer")),
                          closed("op path from", op=enum("move copy"), path=S, **{"from": S}))),
    "geo": {"type": "object", "required": ["type", "coordinates"], "properties": {
        "type": {"enum": ["Point"]}, "coordinates": array(N, minItems=2, maxItems=3), "bbox": array(N, minItems=4)}},
    "password": opened("user password", user=text(minLength=3), password=text(format="password", minLength=8)),
    "float_formats": opened(price={**N, "format": "double"}, ratio={**N, "format": "float"}),
}  # fmt: skip

KUBERNETES = {
    "deployment": opened(
        "apiVersion kind metadata spec", apiVersion={"const": "apps/v1"}, kind={"const": "Deployment"}, metadata=opened(
            "name", name=text(pattern="^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", maxLength=63), labels=mapping(S),
            annotations=mapping(S)), spec=opened("template", replicas={**I, "minimum": 0}, template=opened(
                spec=opened("containers", containers=array(opened("name image", name=S, image=S, ports=array(opened(
                    "containerPort", containerPort=PORT, protocol=enum("TCP UDP SCTP"))), env=array(one_of(
                        closed("name value", name=S, value=S), closed("name valueFrom", name=S, valueFrom={
                            "type": "object"})))), minItems=1))))),
    "service": opened("kind spec", kind={"const": "Service"}, spec=opened("ports", type=enum(
        "ClusterIP NodePort LoadBalancer"), ports=array(opened("port", port=PORT, targetPort={
            "x-kubernetes-int-or-string": True, "anyOf": [PORT, S]})))),
    "quantity": opened(limits=mapping({"anyOf": [I, text(pattern=r"^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$")]})),
    "config_map": opened("kind", kind={"const": "ConfigMap"}, data=mapping(S, propertyNames={"pattern": "^[-._a-zA-Z0-9]+$"})),
    "crd_union": {"type": "object", "properties": {"http": {"type": "object"}, "tcp": {"type": "object"}},
                  "oneOf": [{"required": ["http"]}, {"required": ["tcp"]}]},
    "probe": {**opened(httpGet=opened("port", path=S, port=any_of(PORT, S)), exec=opened(command=array(S))),
              "minProperties": 1, "maxProperties": 1, "additionalProperties": False},
    "helm_values": {**D7, **opened(image=opened("repository", repository=S, tag=S, pullPolicy=enum(
        "Always IfNotPresent Never")), ingress={**opened(enabled=B, host=text(format="hostname")), "if": {
            "properties": {"enabled": {"const": True}}, "required": ["enabled"]}, "then": {"required": ["host"]}})},
    "compose": {**opened(version=S, services=mapping(ref("s"))), "definitions": {"s": opened(
        image=S, build=one_of(S, opened(context=S, args=one_of(array(S), mapping(any_of(S, N, NULL))))),
        ports=array({"type": ["string", "number"]}, uniqueItems=True), restart=S, command=one_of(S, array(S)))}},
}  # fmt: skip

PACKAGES = {
    "package_json": {**D7, **opened("name version", name=text(pattern="^(?:@[a-z0-9-*~][a-z0-9-*._~]*/)?[a-z0-9-~][a-z0-9-._~]*$",
        maxLength=214), version=S, private=B, license=S, author=one_of(S, ref("person")), keywords=array(S),
        bin={"type": ["string", "object"], "additionalProperties": S}, scripts=mapping(S), dependencies=ref("deps"),
        devDependencies=ref("deps"), type={"type": "string", "enum": ["commonjs", "module"], "default": "commonjs"},
        repository={"type": ["object", "string"], "properties": {"type": S, "url": S}}, files=array(S)),
        "definitions": {"person": opened("name", name=S, email=EMAIL, url=URI), "deps": mapping(S)}},
    "tsconfig": opened(compilerOptions=opened(target={"anyOf": [enum("ES5 ES2020 ESNext"), {"pattern": "^[Ee][Ss]\\d+$"}],
        "type": "string"}, strict=B, paths=mapping(array(S)), lib=array(S, uniqueItems=True)), include=array(S),
        extends=any_of(S, array(S)), **{"$schema": S}),
    "eslint_rule": {"definitions": {"level": one_of({**I, "minimum": 0, "maximum": 2}, enum("off warn error"))},
        **mapping(one_of(ref("level"), array({}, minItems=1)))},
    "prettier": closed(semi=B, tabWidth={**I, "minimum": 0, "maximum": 16}, quoteProps=enum("as-needed consistent preserve"),
        overrides=array(opened("files", files=any_of(S, array(S)), options={"type": "object"}))),
    "cargo_dependency": one_of(text(pattern="^[\\^~=]?\\d+(\\.\\d+){0,2}$"), closed(version=S, path=S, git=URI, features=array(S),
        optional=B, default_features=B)),
    "pyproject": opened("project", project={**opened("name", name=text(pattern="^([a-zA-Z\\d]|[a-zA-Z\\d][\\w.-]*[a-zA-Z\\d])$"),
        version=S, requires_python=S, dependencies=array(S), dynamic=array(enum("version description"), uniqueItems=True)),
        "oneOf": [{"required": ["dynamic"], "not": {"required": ["version"]}}, {"required": ["version"]}]}),
    "semver": text(pattern=r"^(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)(-[0-9A-Za-z-]+(\.[0-9A-Za-z-]+)*)?$"),
    "lockfile": opened(lockfileVersion={"enum": [1, 2, 3]}, packages={"type": "object", "patternProperties": {
        "^(node_modules/.*)?$": opened(version=S, resolved=S, integrity=text(pattern="^sha512-"), dev=B)}}),
    "vscode_setting": {"type": "object", "properties": {"editor.fontSize": {**N, "minimum": 6, "maximum": 100},
        "files.exclude": mapping({"type": "boolean"}), "editor.rulers": array(one_of(N, opened(column=N, color=S)))}},
}  # fmt: skip

WORKFLOWS = {
    "github": {**D7, **opened("on jobs", name=S, on=one_of(enum("push pull_request workflow_dispatch"), array(enum(
        "push pull_request workflow_dispatch"), minItems=1), {"type": "object"}), env=ref("env"), jobs={
            "type": "object", "minProperties": 1, "patternProperties": {"^[_a-zA-Z][a-zA-Z0-9_-]*$": ref("job")},
            "additionalProperties": False}), "definitions": {"env": mapping(any_of(S, N, B)), "job": opened(
                "runs-on", **{"runs-on": any_of(S, array(S)), "needs": one_of(S, array(S, minItems=1)), "if": any_of(B, S),
                "steps": array(ref("step"), minItems=1), "timeout-minutes": any_of(N, S)}),
            "step": {**opened(id=S, name=S, uses=S, run=S, env=ref("env"), **{"with": mapping(any_of(S, N, B))}),
                     "oneOf": [{"required": ["uses"]}, {"required": ["run"]}], "dependencies": {"with": ["uses"]}}}},
    "gitlab": {"type": "object", "properties": {"stages": array(S), "image": one_of(S, opened("name", name=S))},
               "patternProperties": {"^\\.": {}}, "additionalProperties": opened(script=any_of(S, array(S)), stage=S)},
    "dependabot": closed("version updates", version={"const": 2}, updates=array(opened(
        "package-ecosystem directory schedule", **{"package-ecosystem": enum("npm pip cargo docker"), "directory": S,
        "schedule": opened("interval", interval=enum("daily weekly monthly"), day=enum("monday friday"))}))),
    "cron": text(pattern=r"^(\*|[0-5]?\d)(/\d+)? (\*|1?\d|2[0-3]) (\*|[12]?\d|3[01]) (\*|[1-9]|1[0-2]) (\*|[0-6])$"),
    "step_functions": {**opened("StartAt States", StartAt=S, States=mapping(one_of(
        tagged("Pass", "Type"), tagged("Wait", "Type", Seconds={**I, "minimum": 0}), tagged("Task", "Type", Resource=S))))},
    "ansible": array({"type": "object", "required": ["hosts"], "properties": {"hosts": S, "become": B, "tasks": array({
        "type": "object", "properties": {"name": S, "when": any_of(S, array(S))}})}}),
    "terraform_variable": opened(type=S, default={}, validation=array(opened("condition", condition=S)), nullable={**B}),
}  # fmt: skip

ZOD = {
    "union": {**D7, "anyOf": [closed("ok data", ok={"type": "boolean", "const": True}, data=S),
                              closed("ok error", ok={"type": "boolean", "const": False}, error=S)]},
    "root_ref": {**D7, "$ref": "#/definitions/user", "definitions": {"user": closed(
        "id email role", id=UUID, email=EMAIL, role={"type": "string", "enum": ["admin", "user"], "default": "user"},
        age={"type": "integer", "exclusiveMinimum": 0}, tags=array(S, maxItems=5), manager=ref("user"))}},
    "tuple": {**D7, "type": "array", "minItems": 2, "maxItems": 2, "items": [S, N]},
    "tuple_rest": {**D20, "type": "array", "prefixItems": [S, N], "items": B},
    "nullable": closed("a b", a=any_of(S, NULL), b={"type": ["number", "null"]}),
    "record": mapping(N, propertyNames={"enum": ["low", "mid", "high"]}),
    "record_checked": mapping(S, propertyNames={"pattern": "^[a-z]+$", "minLength": 2}),
    "set": array(enum("red green blue"), uniqueItems=True),
    "set_of_texts": array(S, uniqueItems=True),
    "intersection": {"allOf": [opened("a", a=S), opened("b", b=N)], "unevaluatedProperties": False},
    "discriminated": any_of(*(closed(f"type v{i}", type={"type": "string", "const": f"t{i}"}, **{f"v{i}": N}) for i in range(6))),
    "literals": {"type": ["string", "number", "boolean"], "enum": ["a", 1, True]},
    "regex_flags": text(pattern="^[A-Fa-f0-9]{6}$"),
    "lookahead": text(pattern=r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"),
    "password": text(pattern=r"^(?=.*[A-Z])(?=.*\d).{8,}$"),
    "emoji": text(pattern=r"^(\p{Extended_Pictographic}|\p{Emoji_Component})+$"),
    "not_empty": {"not": {}},
    "multiple": {"type": "number", "multipleOf": 0.01, "minimum": 0},
    "datetime_offset": text(format="date-time"),
    "lazy_json": {"$ref": "#/definitions/j", "definitions": {"j": any_of(S, N, B, NULL, array(ref("j")), mapping(ref("j")))}},
}  # fmt: skip

OTHERS = {
    "address": {**opened("street city", street=S, city=S, country=enum("US CA NL"), postal_code=S), "allOf": [
        {"if": {"properties": {"country": {"const": "US"}}, "required": ["country"]},
         "then": {"properties": {"postal_code": {"pattern": "[0-9]{5}(-[0-9]{4})?"}}}}]},
    "resume": closed("name", name=S, email=EMAIL, profiles=array(opened(network=S, url=URI)), work=array(opened(
        "company", company=S, start=DATE, end=any_of(DATE, NULL), highlights=array(S)))),
    "recipe": opened("title ingredients steps", title=S, ingredients=array(closed(
        "name", name=S, amount={**N, "exclusiveMinimum": 0}, unit=enum("g kg ml l tsp tbsp"))), steps=array(S, minItems=1)),
    "tree": {**D20, "$id": "https://example.org/tree", **opened("value", value={}, children=array({"$ref": "#"}))},
    "invoice": closed("number lines total", number=text(pattern="^INV-\\d{4}-\\d+$"), lines=array(closed(
        "text quantity price", text=S, quantity={**I, "minimum": 1}, price={**N, "multipleOf": 0.01})), total=N,
        paid_on=any_of(DATE, NULL)),
    "dependent": {**opened(card=S, billing=S), "dependentRequired": {"card": ["billing"]}},
    "contains": array(S, contains={"const": "root"}, maxItems=8),
    "contains_open": array(N, contains={"minimum": 100}),
    "color": one_of(text(pattern="^#[0-9a-f]{6}$"), array({**I, "minimum": 0, "maximum": 255}, minItems=3, maxItems=3)),
    "overlapping": one_of(N, {**I, "minimum": 3}),
    "anything_but": {"type": "string", "not": {"enum": ["root", "admin"]}},
    "feature_flags": {"type": "object", "patternProperties": {"^ff_[a-z]+$": B, "^x-": {}}, "additionalProperties": False},
    "network": closed("address", address=any_of(text(format="ipv4"), text(format="ipv6"), text(format="hostname")), port=PORT),
    "dynamic": {**D20, "$dynamicAnchor": "node", **opened(child={"$dynamicRef": "#node"})},
    "remote": {"$ref": "https://json.schemastore.org/base.json"},
    "typo": opened("name", name={"type": "string", "minlength": 1}),
}  # fmt: skip

FAMILIES = {"tools": TOOLS, "openapi": OPENAPI, "kubernetes": KUBERNETES, "packages": PACKAGES, "workflows": WORKFLOWS}
FAMILIES |= {"zod": ZOD, "others": OTHERS}
REAL: dict[str, Schema] = {f"{family}/{name}": one for family, some in FAMILIES.items() for name, one in some.items()}
