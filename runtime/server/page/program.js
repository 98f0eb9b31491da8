// The program view: runs a program of /v1/programs, from an example or a file, and shows its calls as they go.

import { runProgram } from "./api.js";
import { nodeAt, parsePartial, prettyJson } from "./partial_json.js";
import { EXAMPLES } from "./program_examples.js";
import { applyEvent, planOf, totalsOf } from "./program_plan.js";
import { ProgramTree } from "./program_tree.js";

const byId = (id) => document.getElementById(id);
const MAX_FILE_BYTES = 4 << 20;

export function startProgram() {
  let running = null;

  function say(text, kind = "") {
    byId("program-state").textContent = text;
    byId("program-state").dataset.kind = kind;
  }

  function showProblem(text) {
    byId("program-problem").textContent = text;
  }

  function fill(body) {
    byId("program-text").value = typeof body === "string" ? body : prettyJson(body);
    showProblem("");
  }

  async function open(file) {
    if (!file) return;
    if (file.size > MAX_FILE_BYTES) return showProblem(`${file.name} is too large: ${file.size} bytes`);
    const text = await file.text();
    if (file.name.endsWith(".py")) return showProblem("A program in Python runs with Python. Here runs JSON, as /v1/programs takes it.");
    fill(text);
    byId("program-example").selectedIndex = -1;
  }

  function select(start, end) {
    byId("program-text").focus();
    byId("program-text").setSelectionRange(start, end);
  }

  // Shows an error of the server, and selects the node that it names, as "program[3].fork.branches[0]".
  function showError({ message, param }) {
    showProblem(param && !message.includes(param) ? `${param}: ${message}` : message);
    if (!param) return;
    const { root } = parsePartial(byId("program-text").value);
    const path = root?.kind === "array" ? param.replace(/^program/, "") : param;
    const node = nodeAt(root, `/${path}`.replaceAll(/\[(\d+)\]/g, "/$1").replaceAll(".", "/").replace("//", "/"));
    if (node) select(node.start, node.end);
  }

  // The request that is typed in, or null if it is none; a list alone is the program of one.
  function readBody() {
    const text = byId("program-text").value;
    try {
      const body = JSON.parse(text);
      const request = Array.isArray(body) ? { program: body } : body;
      if (Array.isArray(request?.program)) return request;
      showProblem('The request has no list "program".');
    } catch (error) {
      const at = parsePartial(text).error ?? text.length;
      select(at, at + 1);
      showProblem(`This is not JSON: ${error.message}`);
    }
    return null;
  }

  function showTotals(plan, seconds) {
    const { calls, done, prompt, cached, completion } = totalsOf(plan);
    const parts = [`${done} of ${calls} calls in ${seconds.toFixed(1)} s`];
    if (completion) parts.push(`${completion} tokens`);
    if (prompt) parts.push(`${cached} of ${prompt} prompt tokens from the cache (${Math.round((100 * cached) / prompt)}%)`);
    byId("program-stats").textContent = parts.join(" · ");
  }

  // The plan of a request. The server says what is wrong with nodes that have no known form.
  function planIfReadable(body) {
    try {
      return planOf(body.program);
    } catch {
      return planOf([]);
    }
  }

  async function run() {
    showProblem("");
    byId("variables").textContent = byId("program-stats").textContent = "";
    const body = readBody();
    if (!body) return say("not run", "bad");
    const plan = planIfReadable(body);
    const tree = new ProgramTree(byId("program-tree"), plan, body.variables ?? {});
    const start = performance.now();
    let frame = 0;
    const update = () => {
      frame = 0;
      tree.update();
      showTotals(plan, (performance.now() - start) / 1000);
    };
    const take = (event) => {
      applyEvent(plan, event);
      if (event.type === "program.completed") byId("variables").textContent = prettyJson(event.program.variables);
      frame ||= requestAnimationFrame(update);
    };
    const controller = (running = new AbortController());
    byId("program-run").textContent = "Stop";
    byId("result").hidden = false;
    const isBelow = byId("result").offsetTop > byId("program-form").offsetTop;
    if (isBelow) byId("result").scrollIntoView();
    say("running", "wait");
    take({ type: "begin" });
    try {
      await runProgram(body, controller.signal, take);
      say("done", "good");
    } catch (error) {
      const isStopped = controller.signal.aborted;
      take({ type: "end", path: isStopped ? null : (error.param ?? null) });
      say(isStopped ? "stopped" : "failed", "bad");
      if (!isStopped) showError(error);
    }
    cancelAnimationFrame(frame);
    update();
    running = null;
    byId("program-run").textContent = "Run";
  }

  for (const [name] of EXAMPLES) byId("program-example").append(new Option(name));
  byId("program-example").addEventListener("change", (event) => fill(EXAMPLES[event.target.selectedIndex][1]));
  byId("program-file").addEventListener("change", (event) => {
    open(event.target.files[0]);
    event.target.value = "";
  });
  byId("program-open").addEventListener("click", () => byId("program-file").click());
  byId("program-form").addEventListener("submit", (event) => {
    event.preventDefault();
    if (running) running.abort();
    else run();
  });
  byId("program").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && !running) run();
    if (event.key === "Escape" && running) running.abort();
  });
  fill(EXAMPLES[0][1]);
}
