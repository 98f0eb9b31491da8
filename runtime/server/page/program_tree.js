// Draws the plan of a program: its turns, its calls with their values and tokens, its forks with the branches side by side.

import { STATES, stateOf } from "./program_plan.js";
import { make } from "./turn_view.js";

const MARKS = { waiting: "○", running: "◐", done: "●", failed: "✕", stopped: "–" };
const PARTS = [
  ["cached", ({ cached_tokens: cached }) => cached],
  ["computed", ({ prompt_tokens: prompt, cached_tokens: cached }) => prompt - cached],
  ["generated", ({ completion_tokens: completion }) => completion],
];

export class ProgramTree {
  constructor(root, plan, variables) {
    this.plan = plan;
    this.variables = variables;
    this.views = new Map(); // call -> its elements
    root.replaceChildren(this.list(plan.items));
    this.update();
  }

  // A list with a row for each item; texts and variables that follow each other share one.
  list(items) {
    const list = make("ol", "nodes");
    let given = null;
    for (const item of items) {
      const isGiven = item.kind === "text" || item.kind === "variable";
      if (isGiven && given) {
        given.append(...this[item.kind](item));
        continue;
      }
      const row = make("li", item.kind === "call" ? "call" : "");
      given = isGiven ? make("p", "given") : null;
      if (given) row.append(given);
      (given ?? row).append(...this[item.kind](item, true));
      list.append(row);
    }
    return list;
  }

  text({ text }, isFirst = false) {
    return [isFirst ? text.trimStart() : text];
  }

  variable({ name, index }) {
    const value = index.reduce((list, i) => list?.[i], this.variables[name]);
    const label = make("code", "", [name, ...index].join("."));
    return value === undefined ? [label] : [label, ` ${[value].flat().join(", ")}`];
  }

  turn({ role, items }) {
    return [make("span", "role", role), this.list(items)];
  }

  fork({ join, branches }) {
    const row = make("div", "branches");
    branches.forEach((items, index) => {
      const branch = make("section", "branch");
      branch.setAttribute("aria-label", `Branch ${index + 1} of ${branches.length}`);
      branch.append(make("span", "role", `branch ${index + 1}`), this.list(items));
      row.append(branch);
    });
    return [make("span", "role", `fork: ${branches.length} branches, ${join}`), row];
  }

  call(call) {
    const head = make("p", "head");
    const mark = make("span", "mark");
    const state = make("span", "callstate");
    const count = call.samples.length > 1 ? ` × ${call.samples.length}` : "";
    mark.setAttribute("aria-hidden", "true");
    head.append(mark, make("strong", "", call.name ?? call.type), make("span", "type", `${call.type}${count}`), state);
    const samples = call.samples.map(() => {
      const view = { value: make("p", "value"), bar: make("div", "tokens"), note: make("p", "stats") };
      view.bar.setAttribute("aria-hidden", "true");
      for (const [part] of PARTS) view.bar.append(make("i", part));
      return view;
    });
    this.views.set(call, { head, mark, state, samples });
    return [head, ...samples.flatMap(({ value, bar, note }) => [value, bar, note])];
  }

  update() {
    const usages = [...this.views.keys()].flatMap(({ samples }) => samples.flatMap(({ usage }) => usage ?? []));
    const longest = Math.max(1, ...usages.map(({ prompt_tokens: prompt, completion_tokens: completion }) => prompt + completion));
    for (const [call, view] of this.views) {
      const state = stateOf(call);
      const row = view.head.parentElement;
      for (const other of STATES) row.classList.toggle(other, other === state);
      view.mark.textContent = MARKS[state];
      view.state.textContent = state;
      call.samples.forEach((sample, index) => showSample(call, sample, view.samples[index], longest));
    }
  }
}

function showSample(call, { state, value, usage }, view, longest) {
  const isUnknown = call.type === "select" && state !== "done";
  const text = isUnknown ? call.choices.join(" | ") : value.trimStart();
  if (view.value.textContent !== text) view.value.textContent = text;
  view.value.classList.toggle("coming", isUnknown);
  if (usage && !view.note.textContent) {
    view.note.textContent = `${usage.cached_tokens} of ${usage.prompt_tokens} prompt tokens cached · ${usage.completion_tokens} generated`;
  }
  // The bars of all calls have one scale: the longest is as wide as its box.
  PARTS.forEach(([, count], index) => {
    view.bar.children[index].style.width = `${usage ? (100 * count(usage)) / longest : 0}%`;
  });
}
