// The live view: polls /status once a second while the page is visible, so that the graph has a history.

import { status } from "./api.js";

const POLL_MS = 1000;
const POINTS = 120;
const WIDTH = 600;
const HEIGHT = 120;
const byId = (id) => document.getElementById(id);
const integer = new Intl.NumberFormat("en");

export function startLive(onStatus, onFailure) {
  const rates = [];
  let previous = null;
  let timer = null;

  function draw() {
    const max = Math.max(10, ...rates);
    const step = WIDTH / (POINTS - 1);
    const from = WIDTH - (rates.length - 1) * step;
    const points = rates.map((rate, i) => `${(from + i * step).toFixed(1)} ${(HEIGHT - 4 - (rate / max) * (HEIGHT - 12)).toFixed(1)}`);
    const path = points.length ? `M${points.join(" L")}` : "";
    byId("line").setAttribute("d", path);
    byId("area").setAttribute("d", path && `${path} L${WIDTH} ${HEIGHT} L${from.toFixed(1)} ${HEIGHT} Z`);
    byId("peak").textContent = rates.length ? `peak ${Math.max(...rates).toFixed(0)}` : "";
  }

  function row(texts) {
    const row = document.createElement("tr");
    texts.forEach((text, index) => {
      const cell = document.createElement("td");
      cell.textContent = text;
      if (index > 1) cell.className = "num";
      row.append(cell);
    });
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
    const hits = runtime.prompt_tokens ? `${Math.round((100 * runtime.cached_tokens) / runtime.prompt_tokens)}%` : "–";
    return [hits, `${Math.round((100 * runtime.used_pages) / Math.max(1, runtime.total_pages))}%`];
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
    const seconds = previous ? (performance.now() - previous.time) / 1000 : 0;
    if (previous && tokens >= previous.tokens && seconds < 5) {
      rates.push((tokens - previous.tokens) / seconds);
      if (rates.length > POINTS) rates.shift();
    }
    previous = { tokens, time: performance.now() };
    const used = counts.used_pages / Math.max(1, counts.total_pages);
    byId("running").textContent = integer.format(counts.running_calls);
    byId("waiting").textContent = `${integer.format(counts.waiting_calls)} waiting`;
    byId("rate").textContent = integer.format(Math.round(rates.at(-1) ?? 0));
    byId("forced").textContent = `${integer.format(counts.forced_tokens)} of ${integer.format(tokens)} forced so far`;
    if (counts.prompt_tokens) {
      byId("hits").textContent = `${Math.round((100 * counts.cached_tokens) / counts.prompt_tokens)}%`;
      byId("hit-tokens").textContent = `${integer.format(counts.cached_tokens)} of ${integer.format(counts.prompt_tokens)} prompt tokens`;
    }
    byId("kv").textContent = `${(100 * used).toFixed(used < 0.1 ? 1 : 0)}%`;
    byId("kv-pages").textContent = `${integer.format(counts.used_pages)} used, ${integer.format(counts.cached_pages)} cached`;
    draw();
  }

  async function tick() {
    if (!document.hidden) {
      try {
        const now = await status();
        onStatus(now);
        show(now);
      } catch (error) {
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
