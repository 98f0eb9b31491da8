// The conversations of this browser, one entry each in its localStorage. They go to no server but as the messages of a
// request.

const PREFIX = "plait-conversation-";
const OFF = "plait-keep-nothing";
const MAX_TITLE = 60;

export class Conversations {
  // onProblem(text): the browser keeps nothing, or is full.
  constructor(onProblem) {
    this.onProblem = onProblem;
    this.all = this.load().sort((a, b) => b.changed - a.changed);
    this.current = this.all[0] ?? this.add({});
  }

  get isKept() {
    return this.tried(() => localStorage.getItem(OFF) === null) ?? false;
  }

  set isKept(isKept) {
    this.tried(() => {
      if (isKept) localStorage.removeItem(OFF);
      else localStorage.setItem(OFF, "yes");
    });
    if (isKept) for (const conversation of this.all) this.write(conversation);
    else this.forgetAll();
  }

  load() {
    return this.isKept ? keptKeys().flatMap((key) => readConversation(localStorage.getItem(key))) : [];
  }

  add(settings) {
    this.current = { id: crypto.getRandomValues(new Uint32Array(2)).join("-"), changed: Date.now(), settings: { ...settings }, turns: [] };
    this.all.unshift(this.current);
    return this.current;
  }

  save(conversation) {
    conversation.changed = Date.now();
    this.write(conversation);
  }

  write(conversation) {
    if (!this.isKept || conversation.turns.length === 0) return;
    this.tried(() => localStorage.setItem(PREFIX + conversation.id, JSON.stringify(conversation)));
  }

  remove(conversation) {
    this.forget(conversation);
    this.all = this.all.filter((other) => other !== conversation);
    if (this.current === conversation) this.current = this.all[0] ?? this.add(conversation.settings);
  }

  clear() {
    this.forgetAll();
    this.all = [];
    this.add(this.current.settings);
  }

  forget({ id }) {
    this.tried(() => localStorage.removeItem(PREFIX + id));
  }

  // Those of other tabs too, which this one may not have loaded.
  forgetAll() {
    this.tried(() => keptKeys().forEach((key) => localStorage.removeItem(key)));
  }

  tried(use) {
    try {
      return use();
    } catch (error) {
      this.onProblem(`this browser keeps no conversation: ${error.message}`);
      return null;
    }
  }
}

const keptKeys = () => Object.keys(localStorage).filter((key) => key.startsWith(PREFIX));

// A list of one conversation, or of none if the text is not one of ours: other programs may have had this address.
function readConversation(text) {
  try {
    const { id, changed, settings, turns } = JSON.parse(text);
    const isOurs = typeof id === "string" && Number.isFinite(changed) && turns.length > 0 && turns.every(isTurn);
    return isOurs ? [{ id, changed, settings: { ...settings }, turns }] : [];
  } catch {
    return [];
  }
}

function isTurn({ role, content, reasoning = "", note = "", calls = [] }) {
  const texts = [content, reasoning, note, ...calls.flatMap(({ id, name, text }) => [id, name, text])];
  return ["user", "assistant", "tool"].includes(role) && texts.every((text) => typeof text === "string");
}

export function titleOf({ turns }) {
  const first = turns.find(({ role }) => role === "user")?.content.trim().replace(/\s+/g, " ") ?? "";
  if (!first) return "New conversation";
  return first.length > MAX_TITLE ? `${first.slice(0, MAX_TITLE)}…` : first;
}

// The messages of a request. A turn is { role, content } and, of the model: reasoning, calls, note, failed. A call whose
// result was never typed in is left out, and so is a question that got no answer.
export function messagesOf(turns, system) {
  const answered = new Set(turns.map(({ callId }) => callId));
  const messages = system ? [{ role: "system", content: system }] : [];
  for (const turn of turns) {
    const calls = (turn.calls ?? []).filter(({ id }) => answered.has(id));
    const isEmpty = turn.role === "assistant" && !turn.content && calls.length === 0;
    if (!isEmpty) messages.push(messageOf(turn, calls));
    else if (messages.at(-1)?.role === "user") messages.pop();
  }
  return messages;
}

function messageOf({ role, content, reasoning, callId }, calls) {
  if (role === "tool") return { role, tool_call_id: callId, content };
  const message = { role, content };
  if (reasoning) message.reasoning_content = reasoning;
  if (calls.length) {
    message.tool_calls = calls.map(({ id, name, text }) => ({ id, type: "function", function: { name, arguments: text } }));
  }
  return message;
}
