// Checks of markdown.js and markdown_view.js.

import assert from "node:assert/strict";
import { made, seeded } from "./fake_dom.mjs";
import { nodesOf, webAddress } from "./markdown.js";
import { MarkdownView } from "./markdown_view.js";

function written(node) {
  if (typeof node === "string") return node;
  const attributes = Object.entries(node.attrs).map(([name, value]) => ` ${name}=${value}`);
  return `<${node.tag}${attributes.join("")}>${node.children.map(written).join("")}</>`;
}

const CASES = [
  ["plain & <b>no markup</b>", "<p>plain & <b>no markup</b></>"],
  ["a\nb\n\nc", "<p>a<br></>b</><p>c</>"],
  ["# One #\n### **Three**\n#none", "<h1>One</><h3><strong>Three</></><p>#none</>"],
  ["**a *b* c** ***d*** ~~e~~ snake_case_name 2 * 3 * 4", "<p><strong>a <em>b</> c</> <strong><em>d</></> <del>e</> snake_case_name 2 * 3 * 4</>"],
  ["_a_ __b__ **open and `**` in code**", "<p><em>a</> <strong>b</> <strong>open and <code>**</> in code</></>"],
  ["**open", "<p>**open</>"],
  ["\\*a\\* `` b`c `` `d", "<p>*a* <code>b`c</> `d</>"],
  ["```python title\na = `1`\n\n# b\n```\nc", "<pre language=python>a = `1`\n\n# b</><p>c</>"],
  ["~~~\nopen\n```", "<pre language=>open\n```</>"],
  ["- a\n- b\n  - c\n\n    d\n- e", "<ul><li>a</><li>b<ul><li>c<p>d</></></></><li>e</></>"],
  ["3. a\n4. b\n   ```\n   c\n    d\n   ```", "<ol start=3><li>a</><li>b<pre language=>c\n d</></></>"],
  ["- a\n\n- b\n\nc", "<ul><li>a</><li>b</></><p>c</>"],
  ["1. a\n- b", "<ol><li>a</></><ul><li>b</></>"],
  ["> a\n> > b\n\nc", "<blockquote><p>a</><blockquote><p>b</></></><p>c</>"],
  ["a\n---\n* * *\nb", "<p>a</><hr></><hr></><p>b</>"],
  [
    "text\n| a | b \\| c |\n|:-:|--:|\n| 1 | **2** |\n| 3 |\nend",
    "<p>text</><table><thead><tr><th align=center>a</><th align=right>b | c</></></>" +
      "<tbody><tr><td align=center>1</><td align=right><strong>2</></></><tr><td align=center>3</><td align=right></></></></><p>end</>",
  ],
  ["a | b\nc | d", "<p>a | b<br></>c | d</>"],
  ["[a **b**](https://x.org/c_(d) \"t\")!", "<p><a href=https://x.org/c_(d)>a <strong>b</></>!</>"],
  ["see https://x.org/a_b_c, (http://y.org/q?r=1). <https://z.org>", "<p>see <a href=https://x.org/a_b_c>https://x.org/a_b_c</>, (<a href=http://y.org/q?r=1>http://y.org/q?r=1</>). <a href=https://z.org/>https://z.org</></>"],
  ["![picture](https://x.org/p.png)", "<p><a href=https://x.org/p.png>picture</></>"],
  ["[a](javascript:alert) [b](data:text/html,c) [d](/status) [e](//x.org) <javascript:f>", "<p>[a](javascript:alert) [b](data:text/html,c) [d](/status) [e](//x.org) <javascript:f></>"],
];
for (const [text, expected] of CASES) assert.equal(nodesOf(text).map(written).join(""), expected, text);

assert.equal(webAddress(" jav\tascript:alert(1)"), null);
assert.equal(webAddress("https://x.org/\" onclick=a"), "https://x.org/%22%20onclick=a");

// Any text: only these tags, only addresses of the web, and no failure.
const TAGS = new Set("p br h1 h2 h3 h4 h5 h6 hr blockquote ul ol li pre code table thead tbody tr th td strong em del a".split(" "));
function check(node) {
  if (typeof node === "string") return;
  assert.ok(TAGS.has(node.tag), node.tag);
  if (node.tag === "a") assert.match(node.attrs.href, /^https?:/);
  for (const child of node.children) check(child);
}
const PIECES = [
  ..."*_`~[]()<>#-+|\\!:1.\n\n\n  ", "word", " ", "**", "```", "```\n", "~~~", "\n- ", "\n1. ", "\n  - ", "\n> ", "\n# ", "\n---\n",
  "| a | b |\n", "|---|--:|\n", "[x](https://x.org)", "[x](javascript:y)", "https://y.org/", "\n    ", "é", "\u{1f9f6}",
];
const random = seeded(7);
const textOf = (length) => Array.from({ length }, () => PIECES[Math.floor(random() * PIECES.length)]).join("");
for (let i = 0; i < 1500; i += 1) nodesOf(textOf(30)).forEach(check);
for (const piece of ["> ", "- ", "[", "*a ", "**a", "_", "`a``b", "[x](", "![", "<", "| ", "[x](https://a"]) nodesOf(piece.repeat(4000)).forEach(check);
const spaces = " ".repeat(400_000);
for (const text of [`\`\`\`${spaces}\``, `a|b\n${spaces}x|`]) nodesOf(text).forEach(check);
nodesOf(Array.from({ length: 500 }, (_, depth) => `${" ".repeat(2 * depth)}- a`).join("\n")).forEach(check);

// Text in pieces shows what the whole text shows.
function shown(pieces) {
  const root = document.createElement("div");
  const view = new MarkdownView(root);
  for (const piece of pieces) view.append(piece);
  return root;
}
for (let i = 0; i < 1000; i += 1) {
  const text = textOf(40);
  const pieces = [];
  for (let at = 0; at < text.length; ) {
    const end = at + 1 + Math.floor(random() * 12);
    pieces.push(text.slice(at, end));
    at = end;
  }
  assert.equal(shown(pieces).html, shown([text]).html, JSON.stringify(pieces));
}
assert.match(shown(["[a](https://x.org) <i>"]).html, /^<div><p><a href=https:\/\/x.org\/ rel=noopener noreferrer>a<\/a> &lt;i><\/p><\/div>$/);

// What has been shown stays: characters one by one make about as many nodes as the whole text at once.
const long = "Some **words** in a paragraph.\n\n- item\n- `other`\n\n```js\nlet a = 1;\nlet b = 2;\n```\n\n".repeat(40);
made.count = 0;
const once = shown([long]);
const atOnce = made.count;
made.count = 0;
const root = document.createElement("div");
const view = new MarkdownView(root);
let first = null;
for (const character of long) {
  view.append(character);
  first ??= root.children.length > 1 ? root.children[0] : null;
}
assert.equal(root.children[0], first);
assert.equal(root.html, once.html);
assert.ok(made.count < 3 * atOnce, `${made.count} nodes for ${atOnce}`);
