// As much of the DOM as markdown_view.js uses, and a count of the nodes that were made.

export const made = { count: 0 };

class Node {
  constructor() {
    made.count += 1;
    this.parent = null;
  }

  remove() {
    if (this.parent) this.parent.children.splice(this.parent.children.indexOf(this), 1);
    this.parent = null;
  }

  replaceWith(other) {
    const { parent } = this;
    parent.children[parent.children.indexOf(this)] = other;
    other.parent = parent;
    this.parent = null;
  }
}

class Text extends Node {
  constructor(data) {
    super();
    this.data = data;
  }

  appendData(more) {
    this.data += more;
  }

  get html() {
    return this.data.replaceAll("&", "&amp;").replaceAll("<", "&lt;");
  }
}

class Element extends Node {
  constructor(tag) {
    super();
    this.tag = tag;
    this.children = [];
  }

  append(...nodes) {
    for (const node of nodes) {
      const child = typeof node === "string" ? new Text(node) : node;
      child.parent = this;
      this.children.push(child);
    }
  }

  set textContent(text) {
    this.children = [];
    this.append(text);
  }

  addEventListener() {}

  get html() {
    const attributes = ["className", "href", "rel", "start"].flatMap((name) => (this[name] ? [` ${name}=${this[name]}`] : []));
    return `<${this.tag}${attributes.join("")}>${this.children.map((child) => child.html).join("")}</${this.tag}>`;
  }
}

globalThis.document = {
  createElement: (tag) => new Element(tag),
  createTextNode: (text) => new Text(text),
};

// Numbers from 0 to below 1, the same at each run (Park and Miller's generator).
export function seeded(seed) {
  let state = seed;
  return () => (state = (state * 48271) % 2147483647) / 2147483647;
}
