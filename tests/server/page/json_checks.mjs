// Checks of partial_json.js.

import assert from "node:assert/strict";
import { seeded } from "./fake_dom.mjs";
import { nodeAt, parsePartial, prettyJson } from "./partial_json.js";

const random = seeded(11);
const pick = (list) => list[Math.floor(random() * list.length)];
const STRINGS = ["", "a", "b/c~d", 'quo"te\\', "line\nfeed\u0001", "é\u{1f9f6}", "{[,:]}"];
function randomValue(depth) {
  const kind = Math.floor(random() * (depth > 0 ? 6 : 4));
  if (kind === 0) return pick(STRINGS);
  if (kind === 1) return pick([0, -1, 12.5, 1e21, -2e-7]);
  if (kind === 2) return pick([true, false, null]);
  if (kind === 3) return pick([{}, []]);
  const items = Array.from({ length: Math.floor(random() * 4) }, () => randomValue(depth - 1));
  return kind === 4 ? items : Object.fromEntries(items.map((item, i) => [pick(STRINGS) + i, item]));
}

function valueOf(node) {
  if (node.kind === "string") return node.value;
  if (node.kind === "array") return node.entries.map(([, child]) => valueOf(child));
  if (node.kind === "object") return Object.fromEntries(node.entries.map(([key, child]) => [key, valueOf(child)]));
  return JSON.parse(node.value);
}

// Of a text that ends early: what is done has its value, a text is the beginning of its value, names come in order.
function checkPart(node, value) {
  if (node.isDone) return assert.deepEqual(valueOf(node), value);
  if (node.kind === "string") return assert.ok(value.startsWith(node.value));
  if (node.kind === "number" || node.kind === "literal") return assert.ok(JSON.stringify(value).startsWith(node.value));
  const items = node.kind === "array" ? value.map((item, i) => [i, item]) : Object.entries(value);
  assert.ok(node.entries.length <= items.length);
  node.entries.forEach(([key, child], i) => {
    assert.equal(key, items[i][0]);
    if (child) checkPart(child, items[i][1]);
  });
}

for (let i = 0; i < 300; i += 1) {
  const value = randomValue(3);
  const text = JSON.stringify(value, null, pick([0, 2]));
  const { root, error } = parsePartial(`${text} `);
  assert.equal(error, null, text);
  assert.deepEqual(valueOf(root), value);
  for (let end = 0; end < text.length; end += 1) {
    const part = parsePartial(text.slice(0, end));
    assert.equal(part.error, null, text.slice(0, end));
    if (part.root) checkPart(part.root, value);
  }
  assert.deepEqual(JSON.parse(prettyJson(value)), value);
}

for (const [text, error] of [["{a", 1], ['{"a" 1}', 5], ['{"a":1,}', 7], ["[1 2]", 3], ["[1,]", 3], ["trux", 0], ["1.x ", 0], ["01 ", 0], ['["a\n"]', 3], ['"\\x"', 1], ['"\\u00g0"', 1], ["{} x", 3], ["[[[}", 3]]) {
  assert.equal(parsePartial(text).error, error, text);
  assert.throws(() => JSON.parse(text));
}
assert.notEqual(parsePartial("[".repeat(100000)).error, null);

const text = '{"properties": {"a/b": [1, {"~c": "here"}]}}';
const at = (pointer) => {
  const node = nodeAt(parsePartial(text).root, pointer);
  return text.slice(node.start, node.end);
};
assert.equal(at("/properties/a~1b/1/~0c"), '"here"');
assert.equal(at("/properties/a~1b/0"), "1");
assert.equal(at("/properties/a~1b/7/x"), '[1, {"~c": "here"}]');
assert.equal(at("/"), text);
