// Shows the fields of a JSON value while its text streams in: each with its name and what is there of its value.

import { make } from "./turn_view.js";

export class JsonView {
  // schema: its properties are listed, greyed, until they come; null for none.
  constructor(root, schema = null) {
    this.root = root;
    this.schema = schema;
    this.shown = null;
  }

  update(node) {
    this.shown = show(this.root, this.shown, node, this.schema);
  }
}

// Makes `parent` show a node of partial_json.js in place of what it showed, and returns how it is shown.
function show(parent, old, node, schema) {
  const kind = node?.kind ?? (schema?.properties ? "object" : "none");
  let shown = old;
  if (old?.kind !== kind) {
    const isList = kind === "object" || kind === "array";
    shown = { kind, dom: make(isList ? "dl" : "span", `json ${kind}`), rows: new Map() };
    parent.replaceChildren(shown.dom);
  }
  shown.dom.classList.toggle("partial", Boolean(node) && !node.isDone);
  if (kind === "object" || kind === "array") showEntries(shown, node, schema);
  else showText(shown.dom, kind === "none" ? typeOf(schema) : node.value);
  return shown;
}

function showText(dom, text) {
  if (!dom.firstChild) dom.append("");
  if (dom.firstChild.data !== text) dom.firstChild.data = text;
}

function showEntries(shown, node, schema) {
  const entries = node?.entries ?? [];
  const names = new Set(entries.map(([name]) => String(name)));
  const coming = node?.isDone ? [] : Object.keys(schema?.properties ?? {}).filter((name) => !names.has(name));
  const inSchema = (name) => (shown.kind === "array" ? schema?.items : schema?.properties?.[name]);
  for (const [name, child] of [...entries, ...coming.map((name) => [name, null])]) {
    const row = rowOf(shown, String(name));
    row.dom.classList.toggle("coming", !child);
    row.child = show(row.value, row.child, child, inSchema(name) ?? null);
    names.add(String(name));
  }
  for (const [name, row] of shown.rows) {
    if (!names.has(name)) {
      row.dom.remove();
      shown.rows.delete(name);
    }
  }
}

function rowOf(shown, name) {
  if (!shown.rows.has(name)) {
    const dom = make("div");
    const value = make("dd");
    dom.append(make("dt", "", name), value);
    shown.dom.append(dom);
    shown.rows.set(name, { dom, value, child: null });
  }
  return shown.rows.get(name);
}

// What a schema says of a value, in a word or two.
function typeOf(schema) {
  if (Array.isArray(schema?.enum)) return schema.enum.map((value) => JSON.stringify(value)).join(" | ");
  return [schema?.type ?? "…"].flat().join(" | ");
}
