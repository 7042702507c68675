// A conversation with the running model: answers come as a stream, with how fast they come.
"use strict";

const talk = document.getElementById("talk"), ask = document.getElementById("ask"), message = document.getElementById("message");
const go = document.getElementById("go"), stop = document.getElementById("stop"), problem = document.getElementById("problem");
const messages = [];
let controller = null, isReady = !go.disabled;

function say(role, text) {
  const said = document.getElementById("said").content.firstElementChild.cloneNode(true);
  said.dataset.role = role;
  said.querySelector(".text").textContent = text;
  talk.append(said);
  said.scrollIntoView({ block: "nearest" });
  return said;
}

function hold() {
  go.disabled = controller !== null || !isReady;
  stop.disabled = controller === null;
}

// Events of a stream of OpenAI's API, one parsed `data:` at a time.
async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      for (const line of part.split("\n")) {
        if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
      }
    }
  }
}

function speed(usage, begin_ms, first_ms, last_ms) {
  if (!usage) return "tokens unknown";
  const tokens = usage.completion_tokens;
  const parts = [`${usage.prompt_tokens} + ${tokens} tokens`, `first after ${((first_ms - begin_ms) / 1000).toFixed(2)} s`];
  if (tokens > 1 && last_ms > first_ms) parts.push(`${((tokens - 1) / ((last_ms - first_ms) / 1000)).toFixed(1)} tokens/s`);
  return parts.join(", ");
}

async function answerTo(text) {
  messages.push({ role: "user", content: text });
  say("user", text);
  const said = say("assistant", ""), place = said.querySelector(".text"), note = said.querySelector(".note");
  note.textContent = "waiting for the first token";
  const begin_ms = performance.now();
  let first_ms = 0, last_ms = 0, usage = null, answered = "";
  const body = { messages, stream: true, stream_options: { include_usage: true } };
  for (const [name, field] of [["max_completion_tokens", "most"], ["temperature", "temperature"]]) {
    const value = document.getElementById(field).value;
    if (value !== "") body[name] = Number(value);
  }
  try {
    const answer = await fetch(ask.dataset.chat, {
      method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body), signal: controller.signal,
    });
    if (!answer.ok) throw new Error((await answer.json()).error?.message ?? `The console answered with status ${answer.status}.`);
    for await (const event of events(answer)) {
      if (event.error) throw new Error(event.error.message);
      usage = event.usage ?? usage;
      const added = event.choices?.[0]?.delta?.content;
      if (!added) continue;
      last_ms = performance.now();
      first_ms ||= last_ms;
      answered += added;
      place.textContent = answered;
      note.textContent = "answering";
    }
    note.textContent = speed(usage, begin_ms, first_ms, last_ms);
  } catch (error) {
    note.textContent = error.name === "AbortError" ? "stopped" : "failed";
    if (error.name !== "AbortError") problem.textContent = error.message;
  }
  if (answered) messages.push({ role: "assistant", content: answered });
  else messages.pop();
}

ask.addEventListener("submit", async (event) => {
  event.preventDefault();
  const text = message.value.trim();
  if (!text || controller !== null || !isReady) return;
  problem.textContent = "";
  message.value = "";
  controller = new AbortController();
  hold();
  await answerTo(text);
  controller = null;
  hold();
  message.focus();
});
message.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  ask.requestSubmit();
});
stop.addEventListener("click", () => controller?.abort());
document.getElementById("clear").addEventListener("click", () => { controller?.abort(); messages.length = 0; talk.replaceChildren(); });
document.addEventListener("state", (event) => { isReady = Boolean(event.detail.is_ready); hold(); });
