// The frame around the views: tabs, the API key, the server's state.

import { useKey, useModel, whenUnauthorized } from "./api.js";
import { startChat } from "./chat.js";
import { startLive } from "./live.js";
import { startProgram } from "./program.js";
import { startSchema } from "./schema.js";

const byId = (id) => document.getElementById(id);
const tabs = [...document.querySelectorAll("[role=tab]")];

function show(tab) {
  for (const other of tabs) {
    const isSelected = other === tab;
    other.setAttribute("aria-selected", String(isSelected));
    other.tabIndex = isSelected ? 0 : -1;
    byId(other.getAttribute("aria-controls")).hidden = !isSelected;
  }
  const view = tab.getAttribute("aria-controls");
  history.replaceState(null, "", view === "chat" ? "/" : `#${view}`);
}

function moveTab(event) {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!step) return;
  const next = tabs[(tabs.indexOf(event.target) + step + tabs.length) % tabs.length];
  next.focus();
  show(next);
}

function showState(state, text) {
  byId("state").dataset.state = state;
  byId("state-text").textContent = text;
}

// With several models: a choice of them, with their states, in place of the model's name.
function listModels(models) {
  const select = byId("models");
  if (select.options.length !== models.length) select.replaceChildren(...models.map(({ name }) => new Option(name, name)));
  models.forEach(({ name, status }, index) => {
    select.options[index].textContent = status === "loaded" ? name : `${name} (${status})`;
  });
  select.hidden = models.length === 0;
  byId("model").hidden = models.length > 0;
  useModel(models.length ? select.value : "default");
}

function onStatus(now) {
  byId("model").textContent = now.model ?? "";
  listModels(now.models);
  if (now.runtime === null && now.models.length === 0) showState("bad", "runtime does not answer");
  else if (!now.ready) showState("wait", "not admitting");
  else showState("good", "ready");
}

function onFailure() {
  showState("bad", byId("keybar").hidden ? "no connection" : "needs a key");
}

whenUnauthorized(() => {
  if (byId("keybar").hidden) {
    byId("keybar").hidden = false;
    byId("key").focus();
  }
});
byId("models").addEventListener("change", (event) => useModel(event.target.value));
byId("keybar").addEventListener("submit", (event) => {
  event.preventDefault();
  useKey(byId("key").value);
  byId("keybar").hidden = true;
  refresh();
});

startChat();
startSchema();
startProgram();
const refresh = startLive(onStatus, onFailure);
for (const tab of tabs) {
  tab.addEventListener("click", () => show(tab));
  tab.addEventListener("keydown", moveTab);
}
show(tabs.find((tab) => `#${tab.getAttribute("aria-controls")}` === location.hash) ?? tabs[0]);
