// A program of /v1/programs as a tree of its calls, and the state of each call while the program runs. No DOM.

export const STATES = ["waiting", "running", "done", "failed", "stopped"];
const MAX_SAMPLES = 1024; // of a call; the server takes fewer

// The items of a program's text, in order. An item is { kind, path } and
//   text: text; variable: name, index; call: type ("gen" or "select"), name, choices, samples, after;
//   turn: role, items; fork: join, branches (lists of items).
// A call begins once all calls in `after` are done; a sample is { state, value, usage }.
export function planOf(program) {
  const calls = new Map(); // path -> item
  const context = { calls, sources: new Map() };
  const items = readNodes(program, "program", context, { after: [] });
  return { items, calls };
}

// `text`: where the text stands, as { after } the calls that its next call continues.
function readNodes(nodes, path, context, text) {
  return nodes.map((node, index) => readNode(node, `${path}[${index}]`, context, text));
}

function readNode(node, path, context, text) {
  if (node.text !== undefined) return { kind: "text", path, text: String(node.text) };
  if (node.var !== undefined) {
    text.after = [...text.after, ...(context.sources.get(node.var) ?? [])];
    return { kind: "variable", path, name: node.var, index: [node.index ?? []].flat() };
  }
  if (node.role !== undefined) {
    return { kind: "turn", path, role: node.role, items: readNodes(node.content ?? [], `${path}.content`, context, text) };
  }
  if (node.fork) return readFork(node.fork, `${path}.fork`, context, text);
  return readCall(node, path, context, text);
}

function readCall(node, path, context, text) {
  const type = node.gen ? "gen" : "select";
  const { name = null, n = 1, choices = [] } = node[type] ?? {};
  const samples = Array.from({ length: Math.min(Number(n) || 1, MAX_SAMPLES) }, () => ({ state: "waiting", value: "", usage: null }));
  const shownChoices = [choices ?? []].flat().map(String); // the server says what is wrong with other choices
  const call = { kind: "call", path: `${path}.${type}`, type, name, choices: shownChoices, samples, after: text.after };
  context.calls.set(call.path, call);
  if (name) context.sources.set(name, [call]);
  text.after = [call];
  return call;
}

function readFork({ branches, join = "gather" }, path, context, text) {
  const ends = [];
  const gathered = new Map();
  const items = branches.map((branch, index) => {
    const own = { calls: context.calls, sources: new Map(context.sources) };
    const place = { after: text.after };
    const read = readNodes(branch, `${path}.branches[${index}]`, own, place);
    ends.push(...place.after);
    for (const [name, calls] of own.sources) {
      if (calls !== context.sources.get(name)) gathered.set(name, [...(gathered.get(name) ?? []), ...calls]);
    }
    return read;
  });
  if (join === "append") text.after = ends;
  else for (const [name, calls] of gathered) context.sources.set(name, calls);
  return { kind: "fork", path, join, branches: items };
}

const isDone = (call) => call.samples.every(({ state }) => state === "done");

// The state of a call with several samples: that of the one that is least far.
export function stateOf({ samples }) {
  return ["failed", "running", "stopped", "waiting", "done"].find((state) => samples.some((sample) => sample.state === state));
}

// Takes an event of the stream, or { type: "begin" } and { type: "end", path }, the path of what failed or null.
export function applyEvent(plan, event) {
  const calls = [...plan.calls.values()];
  const sample = plan.calls.get(event.path)?.samples[event.sample];
  if (event.type === "variable.delta" && sample) {
    sample.value += event.delta;
    sample.state = "running";
  } else if (event.type === "variable.done" && sample) {
    Object.assign(sample, { value: event.value, usage: event.usage ?? null, state: "done" });
  } else if (event.type === "end") {
    endCalls(calls, event.path);
    return;
  }
  for (const call of calls) {
    if (!call.after.every(isDone)) continue;
    for (const waiting of call.samples) if (waiting.state === "waiting") waiting.state = "running";
  }
}

function endCalls(calls, path) {
  for (const call of calls) {
    const isFailed = path !== null && (path === call.path || path.startsWith(`${call.path}.`));
    for (const sample of call.samples) if (sample.state !== "done") sample.state = isFailed ? "failed" : "stopped";
  }
}

// The sums over all samples that have ended: { calls, done, prompt, cached, completion }.
export function totalsOf(plan) {
  const samples = [...plan.calls.values()].flatMap((call) => call.samples);
  const totals = { calls: samples.length, done: 0, prompt: 0, cached: 0, completion: 0 };
  for (const { state, usage } of samples) {
    if (state === "done") totals.done += 1;
    totals.prompt += usage?.prompt_tokens ?? 0;
    totals.cached += usage?.cached_tokens ?? 0;
    totals.completion += usage?.completion_tokens ?? 0;
  }
  return totals;
}
