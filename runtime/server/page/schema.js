// The schema view: streams an answer that is constrained to a JSON schema, and shows its fields as they fill.

import { chat, formatStats } from "./api.js";
import { JsonView } from "./json_view.js";
import { nodeAt, parsePartial, prettyJson } from "./partial_json.js";
import { EXAMPLES } from "./schema_examples.js";

const byId = (id) => document.getElementById(id);

export function startSchema() {
  let running = null;

  function fill(index) {
    byId("schema-prompt").value = EXAMPLES[index][1];
    byId("schema-text").value = prettyJson(EXAMPLES[index][2]);
    showProblem("");
  }

  function showVerdict(text, kind) {
    byId("verdict").textContent = text;
    byId("verdict").dataset.kind = kind;
  }

  // Shows what is wrong with the schema, and selects its characters from `start` to `end`.
  function showProblem(text, start = null, end = null) {
    const box = byId("schema-text");
    byId("schema-problem").textContent = text;
    if (!text) return box.removeAttribute("aria-invalid");
    box.setAttribute("aria-invalid", "true");
    if (start === null) return;
    const before = box.value.slice(0, start).split("\n");
    byId("schema-problem").textContent = `line ${before.length}, column ${before.at(-1).length + 1}: ${text}`;
    box.focus();
    box.setSelectionRange(start, end);
    const lineHeight = box.scrollHeight / box.value.split("\n").length;
    box.scrollTop = lineHeight * (before.length - 4);
  }

  // The schema that is typed in, or null if it is not JSON.
  function readSchema() {
    const text = byId("schema-text").value;
    try {
      return JSON.parse(text);
    } catch (error) {
      const at = parsePartial(text).error ?? text.length;
      showVerdict("the schema is not JSON", "bad");
      showProblem(error.message, at, at + 1);
      return null;
    }
  }

  // A refused schema: the error's message says where, as in "(at /properties/age)".
  function showRefusal(error) {
    showVerdict("refused", "bad");
    const pointer = /\(at (\/[^)]*)\)/.exec(error.message)?.[1];
    const node = pointer === undefined ? null : nodeAt(parsePartial(byId("schema-text").value).root, pointer);
    if (node) showProblem(error.message, node.start, node.end);
    else byId("schema-stats").textContent = error.message;
  }

  async function run() {
    showProblem("");
    byId("output").textContent = byId("schema-stats").textContent = "";
    const schema = readSchema();
    if (schema === null) return;
    const controller = (running = new AbortController());
    byId("schema-run").textContent = "Stop";
    showVerdict("running", "wait");
    try {
      await answer(schema, controller.signal);
    } catch (error) {
      if (controller.signal.aborted) showVerdict("stopped", "bad");
      else showRefusal(error);
    }
    running = null;
    byId("schema-run").textContent = "Run";
  }

  // Streams an answer that fits the schema: its text as it is, its fields at most once a frame.
  async function answer(schema, signal) {
    const text = document.createTextNode("");
    byId("output").replaceChildren(text);
    byId("fields").replaceChildren();
    const fields = new JsonView(byId("fields"), schema);
    const show = (end = "") => fields.update(parsePartial(text.data + end).root);
    let frame = 0;
    const request = {
      messages: [{ role: "user", content: byId("schema-prompt").value }],
      response_format: { type: "json_schema", json_schema: { name: "answer", schema, strict: true } },
      max_completion_tokens: 512,
    };
    show();
    try {
      const result = await chat(request, signal, ({ content }) => {
        text.appendData(content);
        frame ||= requestAnimationFrame(() => {
          frame = 0;
          show();
        });
      });
      const isComplete = result.finish === "stop";
      showVerdict(isComplete ? "fits the schema" : "cut at the limit", isComplete ? "good" : "bad");
      byId("schema-stats").textContent = formatStats(result);
      if (isComplete) text.data = prettyJson(JSON.parse(text.data));
    } finally {
      cancelAnimationFrame(frame);
      if (text.data) show("\n"); // a number at the end is complete now
      else byId("fields").replaceChildren();
    }
  }

  for (const [name] of EXAMPLES) byId("example").append(new Option(name));
  byId("example").addEventListener("change", (event) => fill(event.target.selectedIndex));
  byId("schema-text").addEventListener("input", () => showProblem(""));
  byId("schema-form").addEventListener("submit", (event) => {
    event.preventDefault();
    if (running) running.abort();
    else run();
  });
  byId("schema-form").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && !running) run();
    if (event.key === "Escape" && running) running.abort();
  });
  fill(0);
}
