// Shows Markdown as it grows: finished blocks are never touched again, of the last one only what changed. All text
// becomes text nodes.

import { parse } from "./markdown.js";

const ATTRIBUTES = ["language", "align", "start", "href"]; // all that nodes have

export class MarkdownView {
  constructor(root) {
    this.root = root;
    this.text = "";
    this.start = 0; // of the first block that more text may change
    this.open = []; // what is shown of the blocks from there
  }

  append(piece) {
    this.text += piece;
    const { blocks, numFinal, lines } = parse(this.text.slice(this.start));
    this.open = patch(this.root, this.open, blocks.map(({ node }) => node));
    if (numFinal === 0) return;
    this.open = this.open.slice(numFinal);
    for (let i = 0; i < blocks[numFinal].line; i += 1) this.start += lines[i].length + 1;
  }
}

// Makes the last `shown.length` nodes of a parent show `nodes`, and returns how they are shown then.
function patch(parent, shown, nodes) {
  for (const extra of shown.slice(nodes.length)) extra.dom.remove();
  return nodes.map((node, index) => {
    const old = shown[index];
    if (old && isSameKind(old.node, node)) return update(old, node);
    const fresh = create(node);
    if (old) old.dom.replaceWith(fresh.dom);
    else parent.append(fresh.dom);
    return fresh;
  });
}

function isSameKind(old, node) {
  if (typeof old === "string" || typeof node === "string") return typeof old === typeof node;
  return old.tag === node.tag && ATTRIBUTES.every((name) => old.attrs[name] === node.attrs[name]);
}

function update(old, node) {
  if (typeof node !== "string") return { ...old, node, children: patch(old.body, old.children, node.children) };
  if (node !== old.node) {
    if (node.startsWith(old.node)) old.dom.appendData(node.slice(old.node.length));
    else old.dom.data = node;
  }
  return { ...old, node };
}

function create(node) {
  if (typeof node === "string") return { node, dom: document.createTextNode(node) };
  const [dom, body] = elements(node);
  return { node, dom, body, children: patch(body, [], node.children) };
}

// The element of a node, and the one within it that holds its children.
function elements({ tag, attrs }) {
  const body = document.createElement(tag);
  if (tag === "pre") return codeBlock(body, attrs.language);
  if (tag === "table") {
    const scroll = document.createElement("div");
    scroll.className = "wide";
    scroll.tabIndex = 0;
    scroll.append(body);
    return [scroll, body];
  }
  if (attrs.align) body.className = attrs.align;
  if (attrs.start) body.start = attrs.start;
  if (attrs.href) Object.assign(body, { href: attrs.href, title: attrs.href, target: "_blank", rel: "noopener noreferrer" });
  return [body, body];
}

function codeBlock(pre, language) {
  const box = document.createElement("div");
  const head = document.createElement("div");
  const name = document.createElement("span");
  const code = document.createElement("code");
  box.className = "codeblock";
  head.className = "codehead";
  name.textContent = language || "code";
  pre.tabIndex = 0;
  pre.append(code);
  head.append(name, copyButton(code));
  box.append(head, pre);
  return [box, code];
}

// A button that copies the text of an element, or `textOf()` in its place.
export function copyButton(element, textOf = () => element.textContent) {
  const button = document.createElement("button");
  button.type = "button";
  button.className = "quiet";
  button.textContent = "Copy";
  button.addEventListener("click", async () => {
    button.textContent = (await copy(element, textOf())) ? "Copied" : "Press Ctrl C";
    setTimeout(() => (button.textContent = "Copy"), 1500);
  });
  return button;
}

async function copy(element, text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    getSelection().selectAllChildren(element); // no clipboard over plain HTTP from another machine
    return document.execCommand("copy");
  }
}
