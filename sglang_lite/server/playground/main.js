// The page of the server itself: a streamed chat, and what /metrics says about the engine.

import { readEvents } from "./events.js";
import { watchServer } from "./server.js";

const find = (id) => document.getElementById(id);
const conversation = [];
let running = null; // the AbortController of the answer that is being written

const headers = () => {
  const key = find("key").value;
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
};

function show(role, text) {
  const item = document.createElement("li");
  item.className = role;
  item.textContent = text;
  find("messages").append(item);
  item.scrollIntoView({ block: "end" });
  return item;
}

function requestBody() {
  const system = find("system").value.trim();
  const body = {
    model: "default",
    messages: [...(system ? [{ role: "system", content: system }] : []), ...conversation],
    stream: true,
    stream_options: { include_usage: true },
  };
  for (const name of ["temperature", "top_p", "max_tokens", "seed"]) {
    if (find(name).value !== "") body[name] = Number(find(name).value);
  }
  if (find("stop_string").value) body.stop = find("stop_string").value;
  return body;
}

// Time to first token, and output tokens per second behind it.
class Figures {
  constructor() {
    this.sent = performance.now();
    this.first = null;
    this.pieces = 0;
  }

  token() {
    this.first ??= performance.now();
    this.pieces += 1;
    this.show(this.pieces);
  }

  show(tokens) {
    if (this.first === null) return;
    const seconds = (performance.now() - this.first) / 1000;
    const rate = tokens > 1 && seconds > 0 ? `${((tokens - 1) / seconds).toFixed(1)} tokens/s` : "- tokens/s";
    find("figures").value = `TTFT ${(this.first - this.sent).toFixed(0)} ms, ${rate}, ${tokens} tokens`;
  }
}

async function errorText(response) {
  const text = await response.text();
  try {
    const body = JSON.parse(text);
    return body.message ?? body.error?.message ?? body.error ?? text;
  } catch {
    return text || `status ${response.status}`;
  }
}

async function answer(signal) {
  const figures = new Figures();
  let item = null;
  let thought = null;
  let text = "";
  const response = await fetch("v1/chat/completions", {
    method: "POST", headers: headers(), body: JSON.stringify(requestBody()), signal,
  });
  if (!response.ok) throw new Error(await errorText(response));
  try {
    for await (const event of readEvents(response.body)) {
      if (event.error) throw new Error(event.error.message ?? String(event.error));
      const delta = event.choices[0]?.delta ?? {};
      if (delta.reasoning_content) {
        thought ??= show("reasoning", "");
        thought.textContent += delta.reasoning_content;
        figures.token();
      }
      if (delta.content) {
        item ??= show("assistant", "");
        text += delta.content;
        item.textContent = text;
        figures.token();
      }
      if (event.usage) figures.show(event.usage.completion_tokens);
    }
    if (item === null && thought === null) show("assistant", "");
  } finally {
    if (text) conversation.push({ role: "assistant", content: text });
  }
}

async function send() {
  const prompt = find("prompt").value.trim();
  if (!prompt || running !== null) return;
  find("prompt").value = "";
  conversation.push({ role: "user", content: prompt });
  show("user", prompt);
  running = new AbortController();
  find("send").disabled = true;
  find("stop").disabled = false;
  try {
    await answer(running.signal);
  } catch (error) {
    if (error.name !== "AbortError") show("error", error.message);
  } finally {
    running = null;
    find("send").disabled = false;
    find("stop").disabled = true;
  }
}

find("compose").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
find("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    find("compose").requestSubmit();
  }
});
find("stop").addEventListener("click", () => running?.abort());
find("clear").addEventListener("click", () => {
  running?.abort();
  conversation.length = 0;
  find("messages").replaceChildren();
  find("figures").value = "";
});
watchServer(find, headers);
