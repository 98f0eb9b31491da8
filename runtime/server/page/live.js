// What the server does now: asked for once a second while the page is looked at, so that the graph has a past.

import { status } from "./api.js";

const EVERY_MS = 1000;
const POINTS = 120;
const WIDTH = 600;
const HEIGHT = 120;
const byId = (id) => document.getElementById(id);
const whole = new Intl.NumberFormat("en");

export function startLive(onStatus, onFailure) {
  const rates = [];
  let before = null;
  let timer = null;

  function draw() {
    const most = Math.max(10, ...rates);
    const step = WIDTH / (POINTS - 1);
    const from = WIDTH - (rates.length - 1) * step;
    const points = rates.map((rate, i) => `${(from + i * step).toFixed(1)} ${(HEIGHT - 4 - (rate / most) * (HEIGHT - 12)).toFixed(1)}`);
    const path = points.length ? `M${points.join(" L")}` : "";
    byId("line").setAttribute("d", path);
    byId("area").setAttribute("d", path && `${path} L${WIDTH} ${HEIGHT} L${from.toFixed(1)} ${HEIGHT} Z`);
    byId("peak").textContent = rates.length ? `peak ${Math.max(...rates).toFixed(0)}` : "";
  }

  function list(requests) {
    byId("none").hidden = requests.length > 0;
    byId("requests").replaceChildren(
      ...requests.map((request) => {
        const row = document.createElement("tr");
        const cells = [request.id, request.route, whole.format(request.tokens), request.seconds.toFixed(1)];
        cells.forEach((text, index) => {
          const cell = document.createElement("td");
          cell.textContent = text;
          if (index > 1) cell.className = "num";
          row.append(cell);
        });
        return row;
      }),
    );
  }

  function show(now) {
    const counts = now.runtime;
    if (counts === null) return;
    const tokens = counts.sampled_tokens + counts.forced_tokens;
    const seconds = before ? (performance.now() - before.at) / 1000 : 0;
    if (before && tokens >= before.tokens && seconds < 5) {
      rates.push((tokens - before.tokens) / seconds);
      if (rates.length > POINTS) rates.shift();
    }
    before = { tokens, at: performance.now() };
    const used = counts.held_pages / Math.max(1, counts.total_pages);
    byId("running").textContent = whole.format(counts.running_calls);
    byId("waiting").textContent = `${whole.format(counts.waiting_calls)} waiting`;
    byId("rate").textContent = whole.format(Math.round(rates.at(-1) ?? 0));
    byId("forced").textContent = `${whole.format(counts.forced_tokens)} of ${whole.format(tokens)} forced so far`;
    if (counts.prompt_tokens) {
      byId("hits").textContent = `${Math.round((100 * counts.cached_tokens) / counts.prompt_tokens)}%`;
      byId("hit-tokens").textContent = `${whole.format(counts.cached_tokens)} of ${whole.format(counts.prompt_tokens)} prompt tokens`;
    }
    byId("kv").textContent = `${(100 * used).toFixed(used < 0.1 ? 1 : 0)}%`;
    byId("kv-pages").textContent = `${whole.format(counts.held_pages)} held, ${whole.format(counts.cached_pages)} cached`;
    list(now.requests);
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
    timer = setTimeout(tick, EVERY_MS);
  }

  function now() {
    clearTimeout(timer);
    tick();
  }

  now();
  return now;
}
