// Checks of program_plan.js and chart.js.

import assert from "node:assert/strict";
import { roundStep } from "./chart.js";
import { applyEvent, planOf, stateOf, totalsOf } from "./program_plan.js";

const gen = (name, more = {}) => ({ gen: { name, ...more } });
const program = (join) => [
  { role: "user", content: [{ text: "a" }, gen("first")] },
  { fork: { join, branches: [[gen("x")], [{ text: "b" }, gen("x"), { select: { name: "y", choices: ["1", "2"] } }]] } },
  gen("after"),
  { var: "x", index: 0 },
  gen("last", { n: 2 }),
];
const PATHS = {
  first: "program[0].content[1].gen",
  x0: "program[1].fork.branches[0][0].gen",
  x1: "program[1].fork.branches[1][1].gen",
  y: "program[1].fork.branches[1][2].select",
  after: "program[2].gen",
  last: "program[4].gen",
};
const usage = { prompt_tokens: 10, cached_tokens: 7, completion_tokens: 2, forced_tokens: 0 };

function states(plan) {
  return Object.entries(PATHS).map(([name, path]) => `${name} ${stateOf(plan.calls.get(path))}`).join(", ");
}
function finish(plan, name, sample = 0) {
  applyEvent(plan, { type: "variable.done", path: PATHS[name], sample, value: "v", usage });
}

let plan = planOf(program("gather"));
assert.deepEqual([...plan.calls.keys()], Object.values(PATHS));
applyEvent(plan, { type: "begin" });
assert.equal(states(plan), "first running, x0 waiting, x1 waiting, y waiting, after waiting, last waiting");
applyEvent(plan, { type: "variable.delta", path: PATHS.first, sample: 0, delta: "he" });
applyEvent(plan, { type: "variable.delta", path: PATHS.first, sample: 0, delta: "llo" });
assert.equal(plan.calls.get(PATHS.first).samples[0].value, "hello");
finish(plan, "first");
assert.equal(states(plan), "first done, x0 running, x1 running, y waiting, after running, last waiting");
for (const name of ["x0", "after"]) finish(plan, name);
assert.equal(states(plan), "first done, x0 done, x1 running, y waiting, after done, last waiting");
finish(plan, "x1");
assert.equal(states(plan), "first done, x0 done, x1 done, y running, after done, last running");
finish(plan, "last", 1);
assert.equal(stateOf(plan.calls.get(PATHS.last)), "running");
assert.deepEqual(totalsOf(plan), { calls: 7, done: 5, prompt: 50, cached: 35, completion: 10 });
applyEvent(plan, { type: "end", path: `${PATHS.y}.choices` });
assert.equal(states(plan), "first done, x0 done, x1 done, y failed, after done, last stopped");

plan = planOf(program("append"));
applyEvent(plan, { type: "begin" });
for (const name of ["first", "x0", "x1"]) finish(plan, name);
assert.equal(states(plan), "first done, x0 done, x1 done, y running, after waiting, last waiting");
applyEvent(plan, { type: "end", path: null });
assert.equal(states(plan), "first done, x0 done, x1 done, y stopped, after stopped, last stopped");
assert.equal(planOf([gen("a", { n: 1e12 })]).calls.get("program[0].gen").samples.length, 1024);
assert.throws(() => planOf([null]));
// What the server will refuse can be drawn until it does.
assert.deepEqual(planOf([{ text: 3 }]).items, [{ kind: "text", path: "program[0]", text: "3" }]);
for (const [choices, shown] of [["ab", ["ab"]], [null, []], [[1, null], ["1", "null"]]]) {
  assert.deepEqual(planOf([{ select: { choices } }]).items[0].choices, shown);
}

for (const [max, step] of [[0.4, 0.1], [5, 1], [5.1, 2], [10, 2], [42, 10], [100, 20], [101, 50], [2600, 1000]]) {
  assert.ok(Math.abs(roundStep(max) - step) < 1e-9, `${max}: ${roundStep(max)}`);
}
