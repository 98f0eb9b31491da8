// Markdown as a tree of plain objects { tag, attrs, children }; a child is such an object or a text. HTML stays text.

const FENCE = /^ {0,3}(`{3,}|~{3,})(?=[^`]*$)\s*(\S*)/;
const HEADING = /^ {0,3}(#{1,6})(\s.*)?$/;
const RULE = /^ {0,3}(?:(?:\*[ \t]*){3,}|(?:-[ \t]*){3,}|(?:_[ \t]*){3,})$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(?:([ \t]+)(.*))?$/;
const DELIMITERS = /^\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?$/;
const PLAIN = /[^\\`*_~[!<h\n]+/y;
const ANGLE_LINK = /<(https?:[^\s<>]{1,2000})>/y;
const BARE_LINK = /https?:\/\/[^\s<>"'`]{1,2000}/y;
const WORD = /[\p{L}\p{N}]/u;
const PUNCTUATION = /[!-/:-@[-`{-~]/;
const MAX_DEPTH = 12; // of quotes, lists and emphasis; what is deeper stays text
const MAX_ADDRESS = 2000; // characters

// The blocks of a text, each with the line that it starts at. Those before `numFinal` stay as they are whatever text
// follows: the block behind them begins with two lines that are complete, as a table does.
export function parse(text) {
  const lines = text.split("\n");
  const found = blocks(lines, 0);
  const numFinal = Math.max(0, found.findLastIndex(({ line }) => line < lines.length - 2));
  return { blocks: found, numFinal, lines };
}

export function nodesOf(text) {
  return parse(text).blocks.map(({ node }) => node);
}

const element = (tag, children, attrs = {}) => ({ tag, attrs, children });
const isBlank = (line) => line === undefined || line.trim() === "";
const indentOf = (line) => line.length - line.trimStart().length;

// -- blocks

function blocks(lines, depth) {
  const found = [];
  for (let i = 0; i < lines.length; ) {
    if (isBlank(lines[i])) {
      i += 1;
      continue;
    }
    const [node, next] = blockAt(lines, i, depth);
    found.push({ node, line: i });
    i = next;
  }
  return found;
}

function blockAt(lines, i, depth) {
  const line = lines[i];
  const fence = FENCE.exec(line);
  if (fence) return codeAt(lines, i, fence);
  const heading = HEADING.exec(line);
  if (heading) {
    const title = (heading[2] ?? "").trim().replace(/(?:^|\s)#+$/, "");
    return [element(`h${heading[1].length}`, inline(title, depth)), i + 1];
  }
  if (RULE.test(line)) return [element("hr", []), i + 1];
  if (depth < MAX_DEPTH && QUOTE.test(line)) return quoteAt(lines, i, depth);
  if (depth < MAX_DEPTH && ITEM.test(line)) return listAt(lines, i, depth);
  if (isTable(lines, i)) return tableAt(lines, i, depth);
  return paragraphAt(lines, i, depth);
}

function codeAt(lines, i, [opening, marks, language]) {
  const indent = indentOf(opening);
  const code = [];
  for (i += 1; i < lines.length; i += 1) {
    const end = lines[i].trim();
    if (end.length >= marks.length && end === marks[0].repeat(end.length)) {
      i += 1;
      break;
    }
    code.push(lines[i].slice(Math.min(indent, indentOf(lines[i]))));
  }
  return [element("pre", [code.join("\n")], { language }), i];
}

function quoteAt(lines, i, depth) {
  const inner = [];
  for (; i < lines.length && QUOTE.test(lines[i]); i += 1) inner.push(lines[i].replace(QUOTE, ""));
  return [element("blockquote", blocks(inner, depth + 1).map(({ node }) => node)), i];
}

function listAt(lines, i, depth) {
  const [, { length: base }, first] = ITEM.exec(lines[i]);
  const isOrdered = first.length > 1;
  const items = [];
  while (i < lines.length) {
    const item = ITEM.exec(lines[i]);
    if (!item || item[1].length > base + 1 || item[2].length > 1 !== isOrdered || RULE.test(lines[i])) break;
    let body;
    [body, i] = itemAt(lines, i, item);
    const nodes = blocks(body, depth + 1).map(({ node }) => node);
    items.push(element("li", nodes[0]?.tag === "p" ? [...nodes[0].children, ...nodes.slice(1)] : nodes));
    const next = nextLine(lines, i);
    if (next < lines.length && ITEM.test(lines[next])) i = next;
  }
  const start = Number.parseInt(first, 10);
  return [element(isOrdered ? "ol" : "ul", items, isOrdered && start !== 1 ? { start } : {}), i];
}

// The lines of one item without their indent, and the line behind it.
function itemAt(lines, i, item) {
  const base = item[1].length;
  const width = base + item[2].length + Math.min(item[3]?.length ?? 1, 4);
  const body = [item[4] ?? ""];
  for (i += 1; i < lines.length; i += 1) {
    const line = lines[i];
    if (isBlank(line)) {
      const next = nextLine(lines, i);
      if (next === lines.length || indentOf(lines[next]) < base + 2) break;
      body.push("");
    } else if (indentOf(line) >= base + 2) {
      body.push(line.slice(Math.min(width, indentOf(line))));
    } else if (startsBlock(lines, i)) {
      break;
    } else {
      body.push(line.trim());
    }
  }
  return [body, i];
}

function nextLine(lines, i) {
  while (i < lines.length && isBlank(lines[i])) i += 1;
  return i;
}

function startsBlock(lines, i) {
  const line = lines[i];
  return [FENCE, HEADING, RULE, QUOTE, ITEM].some((pattern) => pattern.test(line)) || isTable(lines, i);
}

function paragraphAt(lines, i, depth) {
  const text = [lines[i].trim()];
  for (i += 1; i < lines.length && !isBlank(lines[i]) && !startsBlock(lines, i); i += 1) text.push(lines[i].trim());
  return [element("p", inline(text.join("\n"), depth)), i];
}

function isTable(lines, i) {
  const rule = lines[i + 1];
  if (rule === undefined || !lines[i].includes("|") || !rule.includes("|") || !DELIMITERS.test(rule.trim())) return false;
  return cells(lines[i]).length === cells(rule).length;
}

function tableAt(lines, i, depth) {
  const aligns = cells(lines[i + 1]).map((rule) => {
    if (!rule.endsWith(":")) return {};
    return { align: rule.startsWith(":") ? "center" : "right" };
  });
  const row = (line, tag) => {
    const texts = cells(line);
    return element("tr", aligns.map((attrs, column) => element(tag, inline(texts[column] ?? "", depth), attrs)));
  };
  const head = element("thead", [row(lines[i], "th")]);
  const rows = [];
  for (i += 2; i < lines.length && lines[i].includes("|"); i += 1) rows.push(row(lines[i], "td"));
  return [element("table", [head, element("tbody", rows)]), i];
}

function cells(line) {
  const row = line.trim().replace(/^\|/, "");
  const found = [""];
  for (let i = 0; i < row.length; i += 1) {
    if (row[i] === "|") {
      found.push("");
    } else if (row[i] === "\\" && row[i + 1] === "|") {
      found[found.length - 1] += row[(i += 1)];
    } else {
      found[found.length - 1] += row[i];
    }
  }
  if (found.length > 1 && isBlank(found.at(-1))) found.pop();
  return found.map((cell) => cell.trim());
}

// -- inline

function inline(text, depth) {
  const children = [];
  const unclosed = new Set(); // marks without an end in this text: they need not be looked for again
  let plain = "";
  const flush = () => {
    if (plain) children.push(plain);
    plain = "";
  };
  for (let i = 0; i < text.length; ) {
    PLAIN.lastIndex = i;
    const run = PLAIN.exec(text);
    if (run) {
      plain += run[0];
      i += run[0].length;
      continue;
    }
    const span = spanAt(text, i, depth, unclosed);
    if (typeof span?.node === "object") {
      flush();
      children.push(span.node);
    } else {
      plain += span?.node ?? text[i];
    }
    i = span?.end ?? i + 1;
  }
  flush();
  return children;
}

// The node (or text) that starts at a position and its end, or undefined if the character is plain text.
function spanAt(text, i, depth, unclosed) {
  switch (text[i]) {
    case "\n":
      return { node: element("br", []), end: i + 1 };
    case "\\":
      if (text[i + 1] === "\n") return { node: element("br", []), end: i + 2 };
      return PUNCTUATION.test(text[i + 1] ?? "") ? { node: text[i + 1], end: i + 2 } : undefined;
    case "`":
      return codeSpan(text, i, unclosed);
    case "!":
      return text[i + 1] === "[" ? linkAt(text, i + 1, depth) : undefined;
    case "[":
      return linkAt(text, i, depth);
    case "<":
      return addressAt(ANGLE_LINK, text, i);
    case "h":
      return WORD.test(text[i - 1] ?? "") ? undefined : addressAt(BARE_LINK, text, i);
    default:
      return emphasisAt(text, i, depth, unclosed);
  }
}

function runLength(text, i) {
  let end = i;
  while (text[end] === text[i]) end += 1;
  return end - i;
}

function codeSpan(text, i, unclosed) {
  const length = runLength(text, i);
  const marks = "`".repeat(length);
  const end = unclosed.has(marks) ? -1 : codeEnd(text, i + length, length);
  if (end < 0) {
    unclosed.add(marks);
    return { node: marks, end: i + length };
  }
  const code = text.slice(i + length, end).replaceAll("\n", " ");
  const isPadded = code.startsWith(" ") && code.endsWith(" ") && code.trim() !== "";
  return { node: element("code", [isPadded ? code.slice(1, -1) : code]), end: end + length };
}

function codeEnd(text, from, length) {
  for (let i = text.indexOf("`", from); i >= 0; i = text.indexOf("`", i)) {
    const run = runLength(text, i);
    if (run === length) return i;
    i += run;
  }
  return -1;
}

function emphasisAt(text, i, depth, unclosed) {
  const mark = text[i];
  const run = runLength(text, i);
  const isOpen = text[i + run] !== undefined && text[i + run].trim() !== "" && run <= (mark === "~" ? 2 : 3);
  const asText = { node: mark.repeat(run), end: i + run };
  if (!isOpen || depth >= MAX_DEPTH || (mark === "~" && run === 1)) return asText;
  if (mark === "_" && WORD.test(text[i - 1] ?? "")) return asText;
  const marks = mark.repeat(run);
  const end = unclosed.has(marks) ? -1 : emphasisEnd(text, i + run, mark, run);
  if (end < 0) {
    unclosed.add(marks);
    return asText;
  }
  const children = inline(text.slice(i + run, end), depth + 1);
  const tags = { 1: ["em"], 2: [mark === "~" ? "del" : "strong"], 3: ["strong", "em"] }[run];
  return { node: tags.reduceRight((inner, tag) => [element(tag, inner)], children)[0], end: end + run };
}

function emphasisEnd(text, from, mark, length) {
  for (let i = from; i < text.length; ) {
    if (text[i] === "\\") {
      i += 2;
    } else if (text[i] === "`") {
      const run = runLength(text, i);
      const end = codeEnd(text, i + run, run);
      i = end < 0 ? i + run : end + run;
    } else if (text[i] === mark) {
      const run = runLength(text, i);
      const closes = run === length || (run === 3 && length < 3);
      const isEnd = text[i - 1].trim() !== "" && (mark !== "_" || !WORD.test(text[i + run] ?? ""));
      if (closes && isEnd && i > from) return i + run - length;
      i += run;
    } else {
      i += 1;
    }
  }
  return -1;
}

// -- links

// The address if it is one of the web, otherwise null: no javascript:, no data:, nothing of this server's own paths.
export function webAddress(text) {
  try {
    const address = new URL(text);
    return ["http:", "https:"].includes(address.protocol) ? address.href : null;
  } catch {
    return null;
  }
}

const link = (children, href) => element("a", children, { href });

function linkAt(text, i, depth) {
  const close = labelEnd(text, i);
  if (close < 0 || text[close + 1] !== "(" || depth >= MAX_DEPTH) return undefined;
  const end = targetEnd(text, close + 1);
  if (end < 0) return undefined;
  const [target, title = '"'] = text.slice(close + 2, end).trim().split(/\s+/, 2);
  const href = /^["'(]/.test(title) ? webAddress(target.replace(/^<|>$/g, "")) : null;
  if (href === null) return undefined;
  const label = inline(text.slice(i + 1, close), depth + 1).flatMap((child) => (child.tag === "a" ? child.children : [child]));
  return { node: link(label.length ? label : [href], href), end: end + 1 };
}

// The "]" of a label; a label holds no brackets.
function labelEnd(text, from) {
  for (let i = from + 1; i < text.length && text[i] !== "["; i += 1) {
    if (text[i] === "\\") i += 1;
    else if (text[i] === "]") return i;
  }
  return -1;
}

// The ")" that closes the "(" at a position in the same line.
function targetEnd(text, from) {
  let level = 0;
  for (let i = from; i < Math.min(text.length, from + MAX_ADDRESS) && text[i] !== "\n"; i += 1) {
    if (text[i] === "(") level += 1;
    else if (text[i] === ")" && (level -= 1) === 0) return i;
  }
  return -1;
}

function addressAt(pattern, text, i) {
  pattern.lastIndex = i;
  const match = pattern.exec(text);
  if (!match) return undefined;
  if (match[1]) {
    const href = webAddress(match[1]);
    return href && { node: link([match[1]], href), end: i + match[0].length };
  }
  const address = withoutTail(match[0]);
  const href = webAddress(address);
  return href ? { node: link([address], href), end: i + address.length } : undefined;
}

// An address at the end of a sentence does not hold the sentence's punctuation.
function withoutTail(address) {
  let end = address.length;
  const count = (mark) => address.slice(0, end).split(mark).length;
  while (/[.,;:!?*_~)\]]/.test(address[end - 1])) {
    if (address[end - 1] === ")" && count("(") >= count(")")) break;
    end -= 1;
  }
  return address.slice(0, end);
}
