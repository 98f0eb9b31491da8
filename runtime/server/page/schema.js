// The schema view: streams an answer that is constrained to a JSON schema.

import { chat, formatStats } from "./api.js";

const byId = (id) => document.getElementById(id);

const person = {
  type: "object",
  properties: {
    name: { type: "string", maxLength: 40 },
    age: { type: "integer", minimum: 0, maximum: 130 },
    languages: { type: "array", items: { enum: ["English", "French", "German", "Hindi"] }, minItems: 1, maxItems: 3 },
  },
  required: ["name", "age", "languages"],
  additionalProperties: false,
};
const feeling = {
  type: "object",
  properties: {
    sentiment: { enum: ["positive", "neutral", "negative"] },
    score: { type: "integer", minimum: 1, maximum: 5 },
    reason: { type: "string", maxLength: 80 },
  },
  required: ["sentiment", "score", "reason"],
  additionalProperties: false,
};
const date = {
  type: "object",
  properties: {
    date: { type: "string", format: "date" },
    place: { type: "string", pattern: "^[A-Z][a-z]{1,20}$" },
    people: { type: "integer", minimum: 1, maximum: 12 },
  },
  required: ["date", "place", "people"],
  additionalProperties: false,
};
const EXAMPLES = [
  ["A person", "Invent a person who works on a ship. Answer in JSON.", person],
  ["A review", "Review: 'The soup was cold, but the waiter was kind.' What is its sentiment? Answer in JSON.", feeling],
  ["A booking", "Book a table for four in Lisbon on the third of May 2027. Answer in JSON.", date],
];

export function startSchema() {
  let running = null;

  function fill(index) {
    byId("schema-prompt").value = EXAMPLES[index][1];
    byId("schema-text").value = JSON.stringify(EXAMPLES[index][2], null, 2);
  }

  function showVerdict(text, kind) {
    byId("verdict").textContent = text;
    byId("verdict").dataset.kind = kind;
  }

  function showResult(result) {
    const isComplete = result.finish === "stop";
    if (isComplete) byId("output").textContent = JSON.stringify(JSON.parse(byId("output").textContent), null, 2);
    showVerdict(isComplete ? "fits the schema" : "cut at the limit", isComplete ? "good" : "bad");
    byId("schema-stats").textContent = formatStats(result);
  }

  async function run() {
    let schema;
    byId("output").textContent = byId("schema-stats").textContent = "";
    try {
      schema = JSON.parse(byId("schema-text").value);
    } catch (error) {
      showVerdict("the schema is not JSON", "bad");
      byId("schema-stats").textContent = error.message;
      return;
    }
    const controller = (running = new AbortController());
    byId("schema-run").textContent = "Stop";
    showVerdict("running", "wait");
    const request = {
      messages: [{ role: "user", content: byId("schema-prompt").value }],
      response_format: { type: "json_schema", json_schema: { name: "answer", schema, strict: true } },
      max_completion_tokens: 512,
    };
    try {
      showResult(await chat(request, controller.signal, (piece) => (byId("output").textContent += piece)));
    } catch (error) {
      showVerdict(controller.signal.aborted ? "stopped" : "refused", "bad");
      if (!controller.signal.aborted) byId("schema-stats").textContent = error.message;
    }
    running = null;
    byId("schema-run").textContent = "Run";
  }

  for (const [name] of EXAMPLES) byId("example").append(new Option(name));
  byId("example").addEventListener("change", (event) => fill(event.target.selectedIndex));
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
