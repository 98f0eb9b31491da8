// Reads JSON text that may end anywhere, and says where each value stands.

// A node is { kind, start, end, isDone } with, by kind, `value` (string, number, literal) or `entries` (object: [key,
// node], array: [index, node]). A number at the end of the text is not done: more digits may come.
export function parsePartial(text) {
  const reader = new Reader(text);
  const root = reader.value();
  if (root?.isDone) {
    reader.space();
    if (reader.at < text.length) reader.fail();
  }
  return { root, error: reader.error };
}

// The node that a JSON pointer names, or its nearest parent that exists.
export function nodeAt(root, pointer) {
  let node = root;
  for (const part of pointer.split("/").slice(1)) {
    const key = part.replaceAll("~1", "/").replaceAll("~0", "~");
    const entry = node?.entries?.find(([name]) => String(name) === key);
    if (!entry?.[1]) break;
    node = entry[1];
  }
  return node;
}

// JSON text with line breaks where a value does not fit into one line.
export function prettyJson(value, indent = "") {
  const line = JSON.stringify(value, null, 1).replace(/\n\s*/g, " ");
  if (value === null || typeof value !== "object" || indent.length + line.length <= MAX_LINE) return line;
  const inner = `${indent}  `;
  const items = Array.isArray(value)
    ? value.map((item) => inner + prettyJson(item, inner))
    : Object.entries(value).map(([key, item]) => `${inner}${JSON.stringify(key)}: ${prettyJson(item, inner)}`);
  const [open, close] = Array.isArray(value) ? "[]" : "{}";
  return `${open}\n${items.join(",\n")}\n${indent}${close}`;
}

const MAX_LINE = 56; // characters of prettyJson
const ESCAPES = { b: "\b", f: "\f", n: "\n", r: "\r", t: "\t" };
const MAX_DEPTH = 200;

class Reader {
  constructor(text) {
    this.text = text;
    this.at = 0;
    this.depth = 0;
    this.error = null; // the position of the first character that JSON does not allow here
  }

  space() {
    while (" \t\r\n".includes(this.text[this.at] ?? "x")) this.at += 1;
  }

  fail() {
    this.error ??= this.at;
    return null;
  }

  value() {
    this.space();
    const first = this.text[this.at];
    if (first === undefined) return null;
    if (first === "{" || first === "[") return this.depth < MAX_DEPTH ? this.container(first === "{") : this.fail();
    if (first === '"') return this.string();
    if (first === "-" || (first >= "0" && first <= "9")) return this.number();
    return this.literal();
  }

  container(isObject) {
    const node = { kind: isObject ? "object" : "array", start: this.at, end: this.at, isDone: false, entries: [] };
    const close = isObject ? "}" : "]";
    this.at += 1;
    this.depth += 1;
    for (;;) {
      this.space();
      if (this.text[this.at] === close && node.entries.length === 0) break;
      const child = this.entry(node, isObject);
      node.end = this.at;
      if (!child?.isDone || this.error !== null) return node;
      this.space();
      const next = this.text[this.at];
      if (next === close) break;
      if (next !== ",") return next === undefined ? node : (this.fail(), node);
      this.at += 1;
    }
    this.at += 1;
    this.depth -= 1;
    return Object.assign(node, { isDone: true, end: this.at });
  }

  // Reads a value of a container, for an object with its key, and adds it.
  entry(node, isObject) {
    let key = node.entries.length;
    if (isObject) {
      if (this.text[this.at] === undefined) return null;
      if (this.text[this.at] !== '"') return this.fail();
      const name = this.string();
      if (!name?.isDone) return null;
      key = name.value;
      this.space();
      if (this.text[this.at] === undefined) return null;
      if (this.text[this.at] !== ":") return this.fail();
      this.at += 1;
    }
    const child = this.value();
    if (child || isObject) node.entries.push([key, child]);
    return child;
  }

  string() {
    const node = { kind: "string", start: this.at, end: this.at, isDone: false, value: "" };
    for (this.at += 1; this.at < this.text.length; ) {
      const character = this.text[this.at];
      if (character === '"') {
        this.at += 1;
        return Object.assign(node, { isDone: true, end: this.at });
      }
      if (character < " ") return this.fail();
      const length = character === "\\" ? (this.text[this.at + 1] === "u" ? 6 : 2) : 1;
      if (this.at + length > this.text.length) break; // an escape that is not complete
      const piece = length === 1 ? character : this.escape(length);
      if (piece === null) return null;
      node.value += piece;
      this.at += length;
    }
    this.at = this.text.length;
    return Object.assign(node, { end: this.at });
  }

  escape(length) {
    const code = this.text.slice(this.at + 1, this.at + length);
    if (length === 6) return /^u[0-9a-fA-F]{4}$/.test(code) ? String.fromCharCode(parseInt(code.slice(1), 16)) : this.fail();
    return ESCAPES[code] ?? ('"\\/'.includes(code) ? code : this.fail());
  }

  number() {
    const start = this.at;
    const [digits] = /^[-+.0-9eE]+/.exec(this.text.slice(start, start + 400));
    const isDone = start + digits.length < this.text.length;
    if (isDone && !/^-?(0|[1-9]\d*)(\.\d+)?([eE][-+]?\d+)?$/.test(digits)) return this.fail();
    this.at += digits.length;
    return { kind: "number", start, end: this.at, isDone, value: digits };
  }

  literal() {
    const rest = this.text.slice(this.at, this.at + 5);
    const word = ["true", "false", "null"].find((word) => rest.startsWith(word) || (word.startsWith(rest) && this.at + rest.length === this.text.length));
    if (!word) return this.fail();
    const start = this.at;
    const isDone = rest.startsWith(word);
    this.at += isDone ? word.length : rest.length;
    return { kind: "literal", start, end: this.at, isDone, value: isDone ? word : rest };
  }
}
