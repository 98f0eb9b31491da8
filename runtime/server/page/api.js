// The client of the server that this page came from: requests, the API key, event streams.

const KEY = "plait-key";
let onUnauthorized = () => {};
let model = "default";

export function whenUnauthorized(listener) {
  onUnauthorized = listener;
}

export function useModel(name) {
  model = name;
}

export function useKey(key) {
  sessionStorage.setItem(KEY, key);
}

// An answer of the server that is an error: `param` names the part of the request that it is about.
export class ApiError extends Error {
  constructor({ message, param }) {
    super(message);
    this.param = param ?? null;
  }
}

async function ask(path, options = {}) {
  const headers = { ...options.headers };
  const key = sessionStorage.getItem(KEY);
  if (key) headers.authorization = `Bearer ${key}`;
  const response = await fetch(path, { ...options, headers, credentials: "omit", cache: "no-store" });
  if (response.status === 401) onUnauthorized();
  if (!response.ok) throw new ApiError(await errorOf(response));
  return response;
}

async function errorOf(response) {
  try {
    return (await response.json()).error;
  } catch {
    return { message: `the server answered ${response.status}` };
  }
}

export async function status() {
  return (await ask("/status")).json();
}

// Posts a request with `stream`, and yields the data of each event of the answer.
async function* stream(path, body, signal) {
  const response = await ask(path, {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify({ model, ...body, stream: true }),
    signal,
  });
  for await (const event of events(response.body)) {
    if (event.error) throw new ApiError(event.error);
    yield event;
  }
}

async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.slice(part.indexOf("data: ") + 6);
      if (data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

// Streams a chat completion: calls onDelta(delta) for each piece; resolves to { finish, usage, warnings, firstMs, ms }.
export async function chat(body, signal, onDelta) {
  const start = performance.now();
  const result = { finish: null, usage: null, warnings: [], firstMs: null, ms: 0 };
  const request = { stream_options: { include_usage: true }, ...body };
  for await (const event of stream("/v1/chat/completions", request, signal)) {
    result.usage = event.usage ?? result.usage;
    result.warnings = event.warnings ?? result.warnings;
    for (const choice of event.choices) {
      result.finish = choice.finish_reason ?? result.finish;
      const { content, reasoning_content: reasoning, tool_calls: calls } = choice.delta;
      if (!content && !reasoning && !calls) continue;
      result.firstMs ??= performance.now() - start;
      onDelta({ content: content ?? "", reasoning: reasoning ?? "", calls: calls ?? [] });
    }
  }
  result.ms = performance.now() - start;
  return result;
}

// Runs a program: calls onEvent(event) for each event of docs/programs-api.md.
export async function runProgram(body, signal, onEvent) {
  for await (const event of stream("/v1/programs", body, signal)) onEvent(event);
}

export function formatStats({ usage, warnings, ms, firstMs, finish }) {
  if (!usage) return "";
  const tokens = usage.completion_tokens;
  const parts = [`${tokens} tokens in ${(ms / 1000).toFixed(1)} s`];
  if (firstMs !== null) parts.push(`first after ${(firstMs / 1000).toFixed(2)} s`);
  if (tokens > 1 && ms > firstMs) parts.push(`${((1000 * (tokens - 1)) / (ms - firstMs)).toFixed(0)} per second`);
  const reasoning = usage.completion_tokens_details?.reasoning_tokens;
  if (reasoning) parts.push(`${reasoning} of reasoning`);
  parts.push(`${usage.prompt_tokens_details.cached_tokens} of ${usage.prompt_tokens} prompt tokens from the cache`);
  if (finish === "length") parts.push("cut at the limit");
  return [...parts, ...warnings].join(" · ");
}
