// The live view: polls /status once a second while the page is visible, so that the charts have a history.

import { status } from "./api.js";
import { Chart } from "./chart.js";
import { make } from "./turn_view.js";

const POLL_MS = 1000;
const SECONDS = 120; // of the charts
const MAX_GAP_S = 5; // between two polls; a longer one is no rate of this moment
const byId = (id) => document.getElementById(id);
const integer = new Intl.NumberFormat("en");
const percent = (part, all) => (100 * part) / Math.max(1, all);
const rounded = (part, all) => `${Math.round(percent(part, all))}%`;

export function startLive(onStatus, onFailure) {
  const generated = new Chart(byId("generated"), { title: "Generated", unit: "tokens per second", names: ["sampled", "forced"], seconds: SECONDS });
  const prompts = new Chart(byId("prompts"), { title: "Prompts", unit: "tokens per second", names: ["from the cache", "computed"], seconds: SECONDS });
  const memory = new Chart(byId("memory"), { title: "KV cache", unit: "% of its pages", names: ["in use", "cached"], seconds: SECONDS, max: 100 });
  let previous = null;
  let timer = null;

  function row(texts) {
    const row = make("tr");
    row.append(...texts.map((text, index) => make("td", index > 1 ? "num" : "", text)));
    return row;
  }

  function list(requests) {
    byId("none").hidden = requests.length > 0;
    byId("requests").replaceChildren(
      ...requests.map((request) => row([request.id, request.route, integer.format(request.tokens), request.seconds.toFixed(1)])),
    );
  }

  function numbers(runtime) {
    if (!runtime) return ["–", "–"];
    const hits = runtime.prompt_tokens ? rounded(runtime.cached_tokens, runtime.prompt_tokens) : "–";
    return [hits, rounded(runtime.used_pages, runtime.total_pages)];
  }

  function listModels(models) {
    byId("model-table").hidden = models.length === 0;
    byId("model-rows").replaceChildren(
      ...models.map(({ name, status, error, requests, waiting, runtime }) => {
        const state = status === "failed" && error ? `failed: ${error}` : status;
        return row([name, state, integer.format(requests), integer.format(waiting), ...numbers(runtime)]);
      }),
    );
  }

  function listReplicas(replicas) {
    byId("replicas").hidden = replicas.length === 0;
    byId("replica-rows").replaceChildren(
      ...replicas.map(({ number, state, restarts, runtime }) => {
        const running = runtime ? integer.format(runtime.running_calls) : "–";
        return row([number, state, restarts, running, ...numbers(runtime)]);
      }),
    );
  }

  function show(now) {
    listModels(now.models);
    listReplicas(now.replicas);
    list(now.requests);
    const counts = now.runtime;
    if (counts === null) return;
    const tokens = counts.sampled_tokens + counts.forced_tokens;
    const rates = ratesOf(counts);
    byId("running").textContent = integer.format(counts.running_calls);
    byId("waiting").textContent = `${integer.format(counts.waiting_calls)} waiting`;
    byId("rate").textContent = integer.format(Math.round(rates ? rates.sampled_tokens + rates.forced_tokens : 0));
    byId("forced").textContent = `${integer.format(counts.forced_tokens)} of ${integer.format(tokens)} forced so far`;
    if (counts.prompt_tokens) {
      byId("hits").textContent = rounded(counts.cached_tokens, counts.prompt_tokens);
      byId("hit-tokens").textContent = `${integer.format(counts.cached_tokens)} of ${integer.format(counts.prompt_tokens)} prompt tokens`;
    }
    const used = percent(counts.used_pages, counts.total_pages);
    byId("kv").textContent = `${used.toFixed(used < 10 ? 1 : 0)}%`;
    byId("kv-pages").textContent = `${integer.format(counts.used_pages)} used, ${integer.format(counts.cached_pages)} cached`;
    const time = performance.now() / 1000;
    memory.add(time, [used, percent(counts.cached_pages, counts.total_pages)]);
    if (!rates) return;
    generated.add(time, [rates.sampled_tokens, rates.forced_tokens]);
    prompts.add(time, [rates.cached_tokens, Math.max(0, rates.prompt_tokens - rates.cached_tokens)]);
  }

  // The growth of each counter per second since the last poll; null if there was none, or the runtime is another one.
  function ratesOf(counts) {
    const last = previous;
    previous = { counts, time: performance.now() };
    const seconds = last ? (previous.time - last.time) / 1000 : MAX_GAP_S;
    if (seconds >= MAX_GAP_S || counts.steps < last.counts.steps) return null;
    return Object.fromEntries(Object.keys(counts).map((name) => [name, (counts[name] - last.counts[name]) / seconds]));
  }

  async function tick() {
    if (!document.hidden) {
      try {
        const now = await status();
        onStatus(now);
        show(now);
      } catch {
        onFailure();
      }
    }
    timer = setTimeout(tick, POLL_MS);
  }

  function now() {
    clearTimeout(timer);
    tick();
  }

  now();
  return now;
}
