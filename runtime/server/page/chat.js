// The chat view: sends the current conversation, shows the answer as it comes, and keeps both.

import { chat, formatStats } from "./api.js";
import { Conversations, messagesOf } from "./conversations.js";
import { startHistory } from "./history.js";
import { readSettings, requestOf, showSettings } from "./settings.js";
import { CallsView, addCallPieces } from "./tool_calls.js";
import { TurnView } from "./turn_view.js";

const byId = (id) => document.getElementById(id);
const NEAR_THE_END = 60; // px

export function startChat() {
  const box = byId("message");
  const scroll = byId("scroll");
  const kept = new Conversations((text) => (byId("chat-problem").textContent = text));
  let running = null;
  let last = null; // the view of the last answer
  let isFollowing = true; // whether the end of the conversation stays in view

  function fit() {
    box.style.height = "auto";
    box.style.height = `${Math.min(box.scrollHeight, 200)}px`;
  }

  function follow() {
    if (isFollowing) scroll.scrollTop = scroll.scrollHeight;
  }

  // Shows a turn at the end of the thread. Results of tools are shown with the calls that they answer.
  function add(turn) {
    byId("empty").hidden = true;
    const view = new TurnView(turn);
    view.onShown = follow;
    if (turn.calls) showCalls(view).update();
    view.isRunning = false;
    byId("thread").append(view.element);
    if (turn.role === "assistant") last = view;
    follow();
    return view;
  }

  function showCalls(view) {
    const calls = new CallsView(view.turn);
    view.text.after(calls.element);
    return calls;
  }

  function showConversation() {
    running?.abort();
    for (const item of byId("thread").querySelectorAll("article")) item.remove();
    byId("empty").hidden = false;
    showSettings(kept.current.settings);
    isFollowing = true;
    last = null;
    kept.current.turns.forEach((turn) => add(turn).offer());
    offerNext(last);
    history.show();
  }

  // What may come after the last turn: the same answer once more, or the results of its tool calls.
  function offerNext(view) {
    if (!view) return;
    view.offer(["Try again", retry]);
    if (view.turn.calls?.length) askForResults(view);
  }

  function retry() {
    kept.current.turns.pop();
    byId("thread").querySelector("article:last-child").remove();
    box.focus(); // the button that was pressed is gone
    answer();
  }

  function askForResults(view) {
    view.element.querySelector(".calls").remove();
    const calls = showCalls(view);
    calls.update();
    calls.askForResults((texts) => {
      texts.forEach((content, index) => add(push({ role: "tool", callId: view.turn.calls[index].id, content })));
      box.focus();
      answer();
    });
  }

  function push(turn) {
    kept.current.turns.push(turn);
    return turn;
  }

  function setRunning(controller) {
    running = controller;
    byId("send").textContent = controller ? "Stop" : "Send";
    byId("thread").setAttribute("aria-busy", String(Boolean(controller)));
  }

  function ask(text) {
    add(push({ role: "user", content: text }));
    answer();
  }

  // Generates the next turn of the conversation.
  async function answer() {
    const conversation = kept.current;
    conversation.settings = readSettings();
    const controller = new AbortController();
    const messages = messagesOf(conversation.turns, conversation.settings.system);
    const turn = push({ role: "assistant", content: "" });
    last?.offer();
    for (const rest of byId("thread").querySelectorAll(".results button, .call label")) rest.remove();
    const view = add(turn);
    const calls = showCalls(view);
    view.isRunning = true;
    isFollowing = true;
    setRunning(controller);
    kept.save(conversation);
    history.show();
    try {
      const request = { messages, ...requestOf(conversation.settings) };
      const result = await chat(request, controller.signal, (delta) => {
        view.add(delta);
        if (delta.calls.length) addCallPieces(turn, delta.calls);
        if (turn.calls) calls.update();
      });
      turn.note = formatStats(result);
    } catch (error) {
      turn.note = controller.signal.aborted ? "stopped" : error.message;
      turn.failed = !controller.signal.aborted;
      delete turn.calls; // they are not complete
      calls.element.remove();
    }
    view.isRunning = false;
    if (kept.all.includes(conversation)) kept.save(conversation);
    if (running === controller) setRunning(null);
    if (kept.current === conversation) offerNext(view);
    history.show();
    follow();
  }

  function submit() {
    const text = box.value.trim();
    if (running) {
      running.abort();
    } else if (text) {
      box.value = "";
      fit();
      ask(text);
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
  scroll.addEventListener("scroll", () => {
    isFollowing = scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < NEAR_THE_END;
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && running) running.abort();
  });
  addEventListener("pagehide", () => running && kept.save(kept.current));
  for (const starter of byId("starters").children) {
    starter.addEventListener("click", () => !running && ask(starter.textContent));
  }
  const history = startHistory(kept, showConversation);
  showConversation();
}
