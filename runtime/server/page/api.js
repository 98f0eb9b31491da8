// Talks to the server this page came from. Knows: fetch, the key, event streams. Must not know: what is shown.

const KEY = "plait-key";
let onRefused = () => {};

export function whenRefused(listener) {
  onRefused = listener;
}

export function useKey(key) {
  sessionStorage.setItem(KEY, key);
}

async function ask(path, options = {}) {
  const headers = { ...options.headers };
  const key = sessionStorage.getItem(KEY);
  if (key) headers.authorization = `Bearer ${key}`;
  const answer = await fetch(path, { ...options, headers, credentials: "omit", cache: "no-store" });
  if (answer.status === 401) onRefused();
  if (!answer.ok) throw new Error(await reason(answer));
  return answer;
}

async function reason(answer) {
  try {
    return (await answer.json()).error.message;
  } catch {
    return `the server answered ${answer.status}`;
  }
}

export async function status() {
  return (await ask("/status")).json();
}

// Streams a chat completion: onText(text) as it comes; resolves to {finish, usage, firstMs, ms}.
export async function chat(body, signal, onText) {
  const began = performance.now();
  const request = { model: "default", stream: true, stream_options: { include_usage: true }, ...body };
  const answer = await ask("/v1/chat/completions", {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify(request),
    signal,
  });
  const told = { finish: null, usage: null, firstMs: null, ms: 0 };
  for await (const event of events(answer.body)) {
    if (event.error) throw new Error(event.error.message);
    told.usage = event.usage ?? told.usage;
    for (const choice of event.choices) {
      told.finish = choice.finish_reason ?? told.finish;
      if (!choice.delta.content) continue;
      told.firstMs ??= performance.now() - began;
      onText(choice.delta.content);
    }
  }
  told.ms = performance.now() - began;
  return told;
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

export function described(told) {
  const usage = told.usage;
  if (!usage) return "";
  const seconds = told.ms / 1000;
  const rest = seconds - (told.firstMs ?? 0) / 1000;
  const parts = [`${usage.completion_tokens} tokens in ${seconds.toFixed(1)} s`];
  if (told.firstMs !== null) parts.push(`first after ${(told.firstMs / 1000).toFixed(2)} s`);
  if (usage.completion_tokens > 1 && rest > 0) parts.push(`${((usage.completion_tokens - 1) / rest).toFixed(0)} per second`);
  parts.push(`${usage.prompt_tokens_details.cached_tokens} of ${usage.prompt_tokens} prompt tokens from the cache`);
  if (told.finish === "length") parts.push("cut at the limit");
  return parts.join("  ·  ");
}
