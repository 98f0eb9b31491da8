// The options of a conversation: its system message, how it is sampled, its tools.

import { readTools } from "./tool_calls.js";

const byId = (id) => document.getElementById(id);
const DEFAULTS = { system: "", temperature: "0.7", topP: "1", seed: "", maxTokens: "512", reasoning: "", tools: "", toolChoice: "auto" };
const FIELDS = {
  system: byId("system"),
  temperature: byId("temperature"),
  topP: byId("top-p"),
  seed: byId("seed"),
  maxTokens: byId("max-tokens"),
  reasoning: byId("reasoning"),
  tools: byId("tools"),
  toolChoice: byId("tool-choice"),
};

export function showSettings(settings) {
  for (const [name, field] of Object.entries(FIELDS)) field.value = settings[name] ?? DEFAULTS[name];
  summarize();
}

export function readSettings() {
  return Object.fromEntries(Object.entries(FIELDS).map(([name, field]) => [name, field.value.trim()]));
}

// The fields of a request, but its messages. Throws an Error that says which option is wrong.
export function requestOf(settings) {
  const numbers = { temperature: settings.temperature, top_p: settings.topP, seed: settings.seed, max_completion_tokens: settings.maxTokens };
  const given = Object.entries(numbers).filter(([, text]) => text !== "");
  const request = Object.fromEntries(given.map(([name, text]) => [name, Number(text)]));
  if (settings.reasoning) request.reasoning_effort = settings.reasoning;
  const tools = readTools(settings.tools);
  return tools.length ? { ...request, tools, tool_choice: settings.toolChoice } : request;
}

// Says beside "Options" what differs from the defaults, and what is wrong with the tools.
function summarize() {
  const settings = readSettings();
  const labels = { system: "system message", topP: "top p", maxTokens: "most tokens" };
  const changed = Object.keys(FIELDS).filter((name) => name !== "toolChoice" && settings[name] !== DEFAULTS[name]);
  byId("changed").textContent = changed.map((name) => labels[name] ?? name).join(", ");
  try {
    const count = readTools(settings.tools).length;
    byId("tools-state").textContent = count ? `${count} ${count === 1 ? "tool" : "tools"}` : "";
    FIELDS.tools.removeAttribute("aria-invalid");
  } catch (error) {
    byId("tools-state").textContent = error.message;
    FIELDS.tools.setAttribute("aria-invalid", "true");
  }
}

for (const field of Object.values(FIELDS)) field.addEventListener("input", summarize);
