// Checks of conversations.js and tool_calls.js.

import assert from "node:assert/strict";
import { Conversations, messagesOf, titleOf } from "./conversations.js";
import { addCallPieces, readTools } from "./tool_calls.js";

// Messages: a question without an answer goes with its empty answer, calls without results go, calls keep their arguments as text.
const call = { id: "c", name: "f", text: '{"a": 1}' };
const turns = [
  { role: "user", content: "lost" },
  { role: "assistant", content: "", note: "stopped" },
  { role: "user", content: "hi" },
  { role: "assistant", content: "", calls: [call], reasoning: "hm" },
  { role: "tool", callId: "c", content: "2" },
];
assert.deepEqual(messagesOf(turns, "Be brief."), [
  { role: "system", content: "Be brief." },
  { role: "user", content: "hi" },
  { role: "assistant", content: "", reasoning_content: "hm", tool_calls: [{ id: "c", type: "function", function: { name: "f", arguments: '{"a": 1}' } }] },
  { role: "tool", tool_call_id: "c", content: "2" },
]);
assert.deepEqual(messagesOf(turns.slice(0, 2), ""), []);
assert.deepEqual(messagesOf([...turns.slice(2, 4), { role: "user", content: "so?" }], ""), [{ role: "user", content: "so?" }]);
assert.equal(titleOf({ turns: turns.slice(2) }), "hi");
assert.equal(titleOf({ turns: [{ role: "user", content: `${"long ".repeat(30)}` }] }).length, 61);

const turn = {};
addCallPieces(turn, [{ index: 0, id: "c", function: { name: "f", arguments: "" } }]);
addCallPieces(turn, [{ index: 0, function: { arguments: '{"a": ' } }, { index: 1, id: "d", function: { name: "g", arguments: "{}" } }]);
addCallPieces(turn, [{ index: 0, function: { arguments: "1}" } }]);
assert.deepEqual(turn.calls, [call, { id: "d", name: "g", text: "{}" }]);
assert.deepEqual(readTools(' [{"name": "f"}, {"type": "custom"}]'), [{ type: "function", function: { name: "f" } }, { type: "custom" }]);
assert.deepEqual(readTools(" "), []);
assert.throws(() => readTools("{}"), /not a list/);
assert.throws(() => readTools("["), /not JSON/);


// What the browser keeps: conversations with turns, until they are deleted or keeping is switched off.
const methods = {
  getItem: (key) => localStorage[key] ?? null,
  setItem: (key, text) => {
    localStorage[key] = text;
  },
  removeItem: (key) => delete localStorage[key],
};
globalThis.localStorage = Object.create(methods);
const keys = () => Object.keys(localStorage).filter((key) => key.startsWith("plait-conversation-"));
const noProblem = (text) => assert.fail(text);

let kept = new Conversations(noProblem);
kept.save(kept.current);
assert.deepEqual(keys(), []); // nothing was said yet
kept.current.turns.push(...turns);
kept.save(kept.current);
const first = kept.current;
kept.add({ system: "Be brief." }).turns.push(turns[2]);
kept.current.changed = first.changed + 5;
localStorage["plait-conversation-later"] = JSON.stringify({ ...kept.current, id: "later" });
for (const foreign of ["no JSON", "null", "{}", '{"id": "x", "changed": 1, "turns": [{"role": "user"}]}', '{"id": "x", "changed": 1, "turns": [{"role": "user", "content": "a", "calls": 3}]}']) {
  localStorage[`plait-conversation-${foreign}`] = foreign;
}
kept = new Conversations(noProblem);
assert.deepEqual(kept.all.map(({ id }) => id), ["later", first.id]);
assert.deepEqual(kept.current.settings, { system: "Be brief." });
assert.deepEqual(kept.all[1].turns, turns);
kept.remove(kept.current);
assert.equal(kept.current.id, first.id);
assert.equal(localStorage["plait-conversation-later"], undefined);
kept.isKept = false;
assert.equal(localStorage[`plait-conversation-${first.id}`], undefined);
kept.save(kept.current);
assert.equal(localStorage[`plait-conversation-${first.id}`], undefined);
assert.deepEqual(new Conversations(noProblem).current.turns, []);
kept.isKept = true;
assert.equal(new Conversations(noProblem).current.id, first.id);
kept.current.changed = 7;
kept.isKept = true;
assert.equal(new Conversations(noProblem).current.changed, 7); // keeping is no change of a conversation
for (const forget of [() => kept.clear(), () => (kept.isKept = false)]) {
  const other = new Conversations(noProblem); // in another tab
  other.add({}).turns.push(turns[2]);
  other.save(other.current);
  forget();
  assert.deepEqual(keys(), []);
}
assert.deepEqual(kept.current.turns, []);
kept.isKept = true;

// A browser that keeps nothing: said, and the conversation goes on.
methods.setItem = () => {
  throw new Error("quota");
};
let problem = "";
kept = new Conversations((text) => (problem = text));
kept.current.turns.push(turns[2]);
kept.save(kept.current);
assert.match(problem, /quota/);
assert.equal(kept.current.turns.length, 1);
