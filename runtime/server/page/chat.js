// The chat view. All text is inserted as text, never as markup.

import { chat, formatStats } from "./api.js";

const byId = (id) => document.getElementById(id);

export function startChat() {
  const turns = [];
  const box = byId("message");
  let running = null;

  function fit() {
    box.style.height = "auto";
    box.style.height = `${Math.min(box.scrollHeight, 200)}px`;
  }

  function atEnd() {
    const scroll = byId("scroll");
    return scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < 60;
  }

  function scrollToEnd(wasAtEnd) {
    if (wasAtEnd) byId("scroll").scrollTop = byId("scroll").scrollHeight;
  }

  function add(role, text) {
    byId("empty").hidden = true;
    const item = document.createElement("article");
    item.className = `turn ${role}`;
    const who = document.createElement("span");
    who.className = "hidden";
    who.textContent = role === "user" ? "You" : "Model";
    const body = document.createElement("div");
    body.className = "text";
    body.textContent = text;
    const note = document.createElement("p");
    note.className = "stats";
    item.append(who, body, note);
    byId("thread").append(item);
    scrollToEnd(true);
    return { item, body, note };
  }

  function setRunning(controller) {
    running = controller;
    byId("send").textContent = controller ? "Stop" : "Send";
    byId("thread").setAttribute("aria-busy", String(Boolean(controller)));
  }

  async function send(text) {
    turns.push({ role: "user", content: text });
    add("user", text);
    const answer = add("assistant", "");
    answer.item.classList.add("waiting");
    setRunning(new AbortController());
    const controller = running;
    const system = byId("system").value.trim();
    const request = {
      messages: [...(system ? [{ role: "system", content: system }] : []), ...turns],
      temperature: Number(byId("temperature").value),
      max_completion_tokens: Number(byId("max-tokens").value),
    };
    try {
      const result = await chat(request, controller.signal, (piece) => {
        const wasAtEnd = atEnd();
        answer.item.classList.remove("waiting");
        answer.body.textContent += piece;
        scrollToEnd(wasAtEnd);
      });
      answer.note.textContent = formatStats(result);
    } catch (error) {
      answer.note.textContent = controller.signal.aborted ? "stopped" : error.message;
      answer.item.classList.toggle("failed", !controller.signal.aborted);
    }
    answer.item.classList.remove("waiting");
    if (answer.body.textContent) turns.push({ role: "assistant", content: answer.body.textContent });
    else turns.pop();
    if (running === controller) setRunning(null);
    scrollToEnd(true);
  }

  function submit() {
    const text = box.value.trim();
    if (running) {
      running.abort();
    } else if (text) {
      box.value = "";
      fit();
      send(text);
    }
  }

  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    submit();
  });
  box.addEventListener("input", fit);
  box.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      if (!running) submit();
    }
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && running) running.abort();
  });
  for (const starter of byId("starters").children) {
    starter.addEventListener("click", () => send(starter.textContent));
  }
  byId("clear").addEventListener("click", () => {
    if (running) running.abort();
    turns.length = 0;
    for (const item of byId("thread").querySelectorAll("article")) item.remove();
    byId("empty").hidden = false;
    box.focus();
  });
}
