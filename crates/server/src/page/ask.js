// The prompt box: streams an answer and shows what its memory went through. Whatever the model says stays text.

import { bar, bytes, count, FORMATS, short } from "./text.js";

const find = (id) => document.getElementById(id);

// `headers()` gives what requests carry; `onUnauthorized` is called where the key is missing.
export function setUpAsk({ headers, onUnauthorized }) {
  const form = find("ask");
  let running = null;
  const submit = async (event) => {
    event.preventDefault();
    if (running) return running.abort();
    const prompt = find("prompt").value || find("prompt").placeholder;
    running = new AbortController();
    find("ask-go").textContent = "Stop";
    find("answer").setAttribute("aria-busy", "true");
    try {
      await ask(prompt, running.signal, headers(), onUnauthorized);
    } catch (error) {
      if (error.name === "AbortError") find("ask-sum").textContent += " · stopped";
      else complain(error.message);
    }
    running = null;
    find("ask-go").textContent = "Send";
    find("answer").removeAttribute("aria-busy");
  };
  form.addEventListener("submit", submit);
  find("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.metaKey || event.ctrlKey)) submit(event);
  });
}

function complain(message) {
  find("ask-error").textContent = message;
  find("ask-error").hidden = false;
}

function request(prompt) {
  const chat = document.querySelector("input[name=kind]:checked").value === "chat";
  const body = {
    stream: true,
    stream_options: { include_usage: true },
    max_tokens: Number(find("ask-tokens").value) || 128,
    temperature: Number(find("ask-temperature").value),
  };
  if (chat) body.messages = [{ role: "user", content: prompt }];
  else body.prompt = prompt;
  const fidelity = find("ask-fidelity").value;
  if (fidelity) body.kv = { fidelity };
  return { path: chat ? "v1/chat/completions" : "v1/completions", body };
}

async function ask(prompt, signal, headers, onUnauthorized) {
  const { path, body } = request(prompt);
  const answer = find("answer");
  const text = document.createTextNode("");
  answer.replaceChildren(text);
  answer.hidden = false;
  find("ask-error").hidden = true;
  find("ask-kv").hidden = true;
  find("ask-sum").textContent = "Waiting for the first token…";
  const start = performance.now();
  const response = await fetch(path, {
    method: "POST",
    signal,
    headers: { ...headers, "content-type": "application/json" },
    body: JSON.stringify(body),
  });
  if (!response.ok) {
    find("ask-sum").textContent = "";
    answer.hidden = true;
    if (response.status === 401) onUnauthorized();
    throw new Error(await errorOf(response));
  }
  const seen = { first: null, tokens: 0, finish: null, usage: null };
  for await (const event of events(response.body)) {
    if (event.error) throw new Error(event.error.message ?? "the server gave up");
    take(event, seen, text, start);
    if (seen.first !== null) summarize(seen, start);
  }
  summarize(seen, start);
  if (seen.usage?.kv) showMemory(seen.usage.kv);
}

function take(event, seen, text, start) {
  seen.usage = event.usage ?? seen.usage;
  for (const choice of event.choices ?? []) {
    const piece = choice.delta?.content ?? choice.text ?? "";
    seen.finish = choice.finish_reason ?? seen.finish;
    if (!piece) continue;
    seen.first ??= performance.now() - start;
    seen.tokens += 1;
    const answer = find("answer");
    const atEnd = answer.scrollHeight - answer.scrollTop - answer.clientHeight < 24;
    text.appendData(piece);
    if (atEnd) answer.scrollTop = answer.scrollHeight;
  }
}

function summarize(seen, start) {
  const tokens = seen.usage?.completion_tokens ?? seen.tokens;
  const parts = [`${count(tokens)} tokens`];
  if (seen.first !== null) {
    const seconds = (performance.now() - start - seen.first) / 1000;
    parts.push(`first after ${short(seen.first)} ms`);
    if (tokens > 1 && seconds > 0) parts.push(`${short((tokens - 1) / seconds)} tok/s`);
  }
  if (seen.usage?.prompt_tokens_details?.cached_tokens) {
    parts.push(`${count(seen.usage.prompt_tokens_details.cached_tokens)} of ${count(seen.usage.prompt_tokens)} prompt tokens cached`);
  }
  if (seen.finish) parts.push(`ended by ${seen.finish === "length" ? "the limit" : seen.finish}`);
  find("ask-sum").textContent = parts.join(" · ");
}

function showMemory(kv) {
  const tokens = kv.tokens_by_format ?? {};
  bar(find("ask-bar"), [
    ...FORMATS.map((format) => [tokens[format] ?? 0, `fill-${format}`, `${count(tokens[format] ?? 0)} tokens in ${format}`]),
    [kv.dropped_tokens, "fill-dropped", `${count(kv.dropped_tokens)} tokens dropped`],
  ]);
  const held = FORMATS.filter((format) => tokens[format] > 0).map((format) => `${count(tokens[format])} in ${format}`);
  const rungs = [...new Set((kv.relief ?? []).map((entry) => entry.rung))];
  const parts = [
    `Contract ${kv.fidelity}`,
    `tokens: ${held.join(", ") || "none"}`,
    `peak ${bytes(kv.peak_bytes)} of ${bytes(kv.budget_bytes)}`,
    kv.dropped_tokens > 0 ? `${count(kv.dropped_tokens)} dropped` : "nothing dropped",
    kv.pauses > 0 ? `paused ${kv.pauses} times` : "never paused",
  ];
  if (rungs.length) parts.push(`rungs: ${rungs.join(", ")}`);
  find("ask-kv-text").textContent = parts.join(" · ");
  find("ask-kv").hidden = false;
}

export async function errorOf(response) {
  try {
    const body = await response.json();
    return body.error?.message ?? `the server answered ${response.status}`;
  } catch {
    return `the server answered ${response.status}`;
  }
}

// The JSON of each server-sent event, up to [DONE].
async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ")) continue;
      const data = line.slice(6).trim();
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}
