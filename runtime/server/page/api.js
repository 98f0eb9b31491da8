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

async function ask(path, options = {}) {
  const headers = { ...options.headers };
  const key = sessionStorage.getItem(KEY);
  if (key) headers.authorization = `Bearer ${key}`;
  const response = await fetch(path, { ...options, headers, credentials: "omit", cache: "no-store" });
  if (response.status === 401) onUnauthorized();
  if (!response.ok) throw new Error(await errorMessage(response));
  return response;
}

async function errorMessage(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the server answered ${response.status}`;
  }
}

export async function status() {
  return (await ask("/status")).json();
}

// Streams a chat completion: calls onText(text) for each piece; resolves to {finish, usage, firstMs, ms}.
export async function chat(body, signal, onText) {
  const start = performance.now();
  const request = { model, stream: true, stream_options: { include_usage: true }, ...body };
  const response = await ask("/v1/chat/completions", {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify(request),
    signal,
  });
  const result = { finish: null, usage: null, firstMs: null, ms: 0 };
  for await (const event of events(response.body)) {
    if (event.error) throw new Error(event.error.message);
    result.usage = event.usage ?? result.usage;
    for (const choice of event.choices) {
      result.finish = choice.finish_reason ?? result.finish;
      if (!choice.delta.content) continue;
      result.firstMs ??= performance.now() - start;
      onText(choice.delta.content);
    }
  }
  result.ms = performance.now() - start;
  return result;
}

async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

export function formatStats(result) {
  const usage = result.usage;
  if (!usage) return "";
  const seconds = result.ms / 1000;
  const rest = seconds - (result.firstMs ?? 0) / 1000;
  const parts = [`${usage.completion_tokens} tokens in ${seconds.toFixed(1)} s`];
  if (result.firstMs !== null) parts.push(`first after ${(result.firstMs / 1000).toFixed(2)} s`);
  if (usage.completion_tokens > 1 && rest > 0) parts.push(`${((usage.completion_tokens - 1) / rest).toFixed(0)} per second`);
  parts.push(`${usage.prompt_tokens_details.cached_tokens} of ${usage.prompt_tokens} prompt tokens from the cache`);
  if (result.finish === "length") parts.push("cut at the limit");
  return parts.join("  ·  ");
}
