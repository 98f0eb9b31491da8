// The list of conversations beside the chat: choose, begin, export and delete them.

import { readSettings } from "./settings.js";
import { titleOf } from "./conversations.js";
import { make } from "./turn_view.js";

const byId = (id) => document.getElementById(id);

// Returns { show }, which lists the conversations anew. onChosen(): another one is the current one.
export function startHistory(kept, onChosen) {
  function show() {
    byId("conversations").replaceChildren(
      ...kept.all.map((conversation) => {
        const button = make("button", "", titleOf(conversation));
        button.type = "button";
        if (conversation === kept.current) button.setAttribute("aria-current", "true");
        button.addEventListener("click", () => {
          kept.current = conversation;
          close();
          onChosen();
        });
        const item = make("li");
        item.append(button);
        return item;
      }),
    );
    byId("conversation-title").textContent = titleOf(kept.current);
    byId("export").disabled = byId("delete").disabled = kept.current.turns.length === 0;
  }

  function setOpen(isOpen) {
    byId("history").classList.toggle("open", isOpen);
    byId("history-open").setAttribute("aria-expanded", String(isOpen));
  }

  function close() {
    setOpen(false);
    byId("message").focus();
  }

  byId("history-open").addEventListener("click", () => {
    setOpen(!byId("history").classList.contains("open"));
    if (byId("history").classList.contains("open")) byId("clear").focus();
  });
  byId("history").addEventListener("keydown", (event) => {
    if (event.key === "Escape") close();
  });
  byId("clear").addEventListener("click", () => {
    if (kept.current.turns.length) kept.add(readSettings());
    close();
    onChosen();
  });
  byId("scroll").addEventListener("click", () => setOpen(false));
  byId("export").addEventListener("click", () => download(kept.current));
  byId("delete").addEventListener("click", () => {
    if (!confirm(`Delete "${titleOf(kept.current)}"?`)) return;
    kept.remove(kept.current);
    close();
    onChosen();
  });
  byId("delete-all").addEventListener("click", () => {
    if (!confirm("Delete all conversations of this browser?")) return;
    kept.clear();
    close();
    onChosen();
  });
  byId("keep").checked = kept.isKept;
  byId("keep").addEventListener("change", (event) => (kept.isKept = event.target.checked));
  return { show };
}

function download(conversation) {
  const file = new Blob([JSON.stringify(conversation, null, 2)], { type: "application/json" });
  const link = make("a");
  link.href = URL.createObjectURL(file);
  link.download = `plait-${new Date(conversation.changed).toISOString().slice(0, 10)}.json`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}
