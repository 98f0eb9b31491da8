// Tools in the chat: the list that is typed in, the calls of a model, and the results that are typed in for them.

import { prettyJson } from "./partial_json.js";
import { make } from "./turn_view.js";

// The tools of a text: a JSON list of functions { name, description, parameters }, bare or as OpenAI wraps them.
// Throws an Error that says what is wrong.
export function readTools(text) {
  if (!text.trim()) return [];
  let tools;
  try {
    tools = JSON.parse(text);
  } catch (error) {
    throw new Error(`The tools are not JSON: ${error.message}`);
  }
  if (!Array.isArray(tools)) throw new Error("The tools are not a list: [{\"name\": …}, …]");
  return tools.map((tool) => (tool?.type ? tool : { type: "function", function: tool }));
}

// Adds the pieces of a delta to the calls of a turn: a call is { id, name, text }, text its arguments.
export function addCallPieces(turn, pieces) {
  turn.calls ??= [];
  for (const { index, id, function: piece } of pieces) {
    const call = (turn.calls[index] ??= { id: "", name: "", text: "" });
    call.id = id ?? call.id;
    call.name += piece?.name ?? "";
    call.text += piece?.arguments ?? "";
  }
}

function prettyIfJson(text) {
  try {
    return prettyJson(JSON.parse(text));
  } catch {
    return text;
  }
}

// The calls as they come: the name of each, and its arguments.
export class CallsView {
  constructor(turn) {
    this.turn = turn;
    this.element = make("div", "calls");
    this.shown = [];
  }

  update() {
    (this.turn.calls ?? []).forEach(({ name, text }, index) => {
      if (!this.shown[index]) {
        const box = make("div", "call");
        const args = make("pre", "code");
        args.tabIndex = 0;
        const title = make("strong");
        box.append(title, args);
        this.element.append(box);
        this.shown[index] = { box, title, args };
      }
      this.shown[index].title.textContent = name;
      this.shown[index].args.textContent = prettyIfJson(text);
    });
  }

  // A form for the results; calls onResults(texts) with one text for each call.
  askForResults(onResults) {
    const form = make("form", "results");
    const boxes = this.turn.calls.map(({ name }, index) => {
      const label = make("label", "", `Result of ${name}`);
      const box = make("textarea", "code");
      box.rows = 2;
      box.required = true;
      label.append(box);
      this.shown[index].box.append(label);
      return box;
    });
    const send = make("button", "primary", boxes.length > 1 ? "Send the results" : "Send the result");
    form.append(...this.element.childNodes, send);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      onResults(boxes.map((box) => box.value));
    });
    this.element.append(form);
    boxes[0].focus({ preventScroll: true });
  }
}
