// One turn of a conversation on the page: its text, its reasoning folded, its tool calls, its statistics.

import { MarkdownView, copyButton } from "./markdown_view.js";

const FRAME_MS = 16;
const NAMES = { user: "You", assistant: "Model", tool: "Result of a tool" };

export function make(tag, className, text) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  return element;
}

export class TurnView {
  constructor(turn) {
    this.turn = turn;
    this.element = make("article", `turn ${turn.role}`);
    this.text = make("div", "text");
    this.note = make("p", "stats");
    this.actions = make("div", "actions");
    this.element.append(make("span", "hidden", NAMES[turn.role]), this.text, this.note);
    this.markdown = turn.role === "assistant" ? new MarkdownView(this.text) : null;
    this.waiting = { content: "", reasoning: "" };
    this.timer = 0;
    this.delay = FRAME_MS;
    if (turn.reasoning) this.showReasoning(turn.reasoning);
    this.showText(turn.content);
    if (this.markdown) this.element.append(this.actions);
  }

  // Adds a piece of the answer to the turn, and shows it soon: showing takes at most a fifth of the time.
  add({ content, reasoning }) {
    this.turn.content += content;
    if (reasoning) this.turn.reasoning = (this.turn.reasoning ?? "") + reasoning;
    this.waiting.content += content;
    this.waiting.reasoning += reasoning;
    this.timer ||= setTimeout(() => this.flush(), this.delay);
  }

  flush() {
    const start = performance.now();
    clearTimeout(this.timer);
    this.timer = 0;
    const { content, reasoning } = this.waiting;
    this.waiting = { content: "", reasoning: "" };
    if (reasoning) this.showReasoning(reasoning);
    if (content) this.showText(content);
    this.onShown?.();
    this.delay = Math.max(FRAME_MS, 4 * (performance.now() - start));
  }

  showText(piece) {
    if (this.markdown) this.markdown.append(piece);
    else this.text.append(piece);
  }

  showReasoning(piece) {
    if (!this.reasoning) {
      const box = make("details", "reasoning");
      this.reasoning = make("div", "thought");
      box.append(make("summary", "", "Reasoning"), this.reasoning);
      this.text.before(box);
    }
    this.reasoning.append(piece);
  }

  set isRunning(isRunning) {
    this.element.classList.toggle("running", isRunning);
    if (isRunning) return;
    this.flush();
    this.note.textContent = this.turn.note ?? "";
    this.element.classList.toggle("failed", Boolean(this.turn.failed));
  }

  // Offers to copy an answer, and further actions: [label, function].
  offer(...actions) {
    if (!this.markdown) return;
    this.actions.replaceChildren();
    if (this.turn.content) this.actions.append(copyButton(this.text, () => this.turn.content));
    for (const [label, act] of actions) {
      const button = make("button", "quiet", label);
      button.type = "button";
      button.addEventListener("click", act);
      this.actions.append(button);
    }
  }
}
