// A chat with one of the models: reasoning folded, tool calls shown, the request to copy.

import { $, make } from "./dom.js";
import { call, events } from "./stream.js";

const history = [];
let running = null;

export function fill(models) {
  const select = $("model");
  const ids = models.map((model) => model.id);
  if ([...select.options].map((option) => option.value).join("\n") === ids.join("\n")) return;
  const chosen = select.value;
  select.replaceChildren(...ids.map((id) => make("option", { value: id }, id)));
  if (ids.includes(chosen)) select.value = chosen;
  code();
}

export function clear() {
  running?.abort();
  history.length = 0;
  $("talk").replaceChildren();
  $("figures").textContent = "";
  code();
}

export function start(keyOf) {
  $("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    if (running === null) ask(keyOf());
  });
  $("words").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("ask").requestSubmit();
  });
  $("stop").addEventListener("click", () => running?.abort());
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") running?.abort();
  });
  $("fresh").addEventListener("click", clear);
  for (const id of ["model", "words", "tools"]) $(id).addEventListener("input", code);
  for (const button of document.querySelectorAll(".copy")) {
    button.addEventListener("click", async () => {
      await navigator.clipboard.writeText($(button.dataset.of).textContent);
      $("figures").textContent = "Copied.";
    });
  }
  code();
}

function body(words) {
  const asked = { model: $("model").value, messages: [...history, { role: "user", content: words }], stream: true };
  if ($("tools").value.trim()) asked.tools = JSON.parse($("tools").value);
  return asked;
}

function code() {
  let asked;
  try {
    asked = body($("words").value || "Say hello.");
  } catch (error) {
    $("curl").textContent = $("python").textContent = `The tools are no JSON: ${error.message}`;
    return;
  }
  const quoted = JSON.stringify(asked, null, 2).replaceAll("'", "'\\''");
  $("curl").textContent = `curl -N ${location.origin}/v1/chat/completions \\\n  -H "Authorization: Bearer $CITADEL_API_KEY" \\\n  -H "Content-Type: application/json" \\\n  -d '${quoted}'`;
  const written = Object.entries(asked).map(([name, value]) => `\n    ${name}=${python(value, "    ")},`).join("") + "\n";
  $("python").textContent = `import os\n\nfrom openai import OpenAI\n\nclient = OpenAI(base_url="${location.origin}/v1", api_key=os.environ["CITADEL_API_KEY"])\nstream = client.chat.completions.create(${written})\nfor chunk in stream:\n    if chunk.choices:\n        print(chunk.choices[0].delta.content or "", end="", flush=True)`;
}

// A value of JSON as Python writes it. Strings are alike in both.
function python(value, indent) {
  if (value === null || typeof value === "boolean") return { null: "None", true: "True", false: "False" }[value];
  if (typeof value !== "object") return JSON.stringify(value);
  const named = !Array.isArray(value);
  const parts = Object.entries(value).map(([name, each]) => (named ? `${JSON.stringify(name)}: ` : "") + python(each, `${indent}    `));
  const [open, close] = named ? "{}" : "[]";
  return parts.length ? `${open}\n${parts.map((part) => `${indent}    ${part},\n`).join("")}${indent}${close}` : open + close;
}

async function ask(key) {
  const words = $("words").value;
  const turn = newTurn();
  let asked;
  try {
    asked = body(words);
  } catch (error) {
    turn.fail(`The tools are no JSON: ${error.message}`);
    return;
  }
  $("talk").insertBefore(make("div", { class: "turn user" }, words), turn.root);
  $("words").value = $("figures").textContent = "";
  running = new AbortController();
  busy(true);
  const began = performance.now();
  try {
    const options = { method: "POST", body: JSON.stringify(asked), headers: { "Content-Type": "application/json" }, signal: running.signal };
    const response = await call("/v1/chat/completions", key, options);
    for await (const event of events(response)) {
      if (event.comment) $("figures").textContent = event.comment;
      else if (event.data !== "[DONE]") turn.take(JSON.parse(event.data));
    }
    history.push({ role: "user", content: words }, { role: "assistant", content: turn.content() });
    $("figures").textContent = `${((performance.now() - began) / 1000).toFixed(1)} s`;
  } catch (error) {
    if (running.signal.aborted) $("figures").textContent = "Stopped.";
    else {
      turn.fail(error.message);
      $("words").value = words;
    }
  } finally {
    running = null;
    busy(false);
    code();
  }
}

function busy(on) {
  $("stop").hidden = !on;
  $("send").hidden = on;
  if (on) $("stop").focus();
  else $("words").focus();
}

function newTurn() {
  const thought = make("div");
  const thinking = make("details", {}, make("summary", {}, "Reasoning"), thought);
  thinking.hidden = true;
  const said = make("div", { class: "said" });
  const root = make("div", { class: "turn assistant" }, thinking, said);
  const calls = new Map();
  $("talk").append(root);
  // Drawn once a frame: laying a long answer out again for each token would take longer than the tokens do.
  const unwritten = new Map();
  let drawing = false;
  const draw = () => {
    drawing = false;
    const talk = $("talk");
    const atEnd = talk.scrollHeight - talk.scrollTop - talk.clientHeight < 40;
    for (const [element, text] of unwritten) {
      if (element.lastChild) element.lastChild.appendData(text);
      else element.append(text);
    }
    unwritten.clear();
    if (atEnd) talk.scrollTop = talk.scrollHeight;
  };
  const add = (element, text) => {
    unwritten.set(element, (unwritten.get(element) ?? "") + text);
    if (!drawing) requestAnimationFrame(draw);
    drawing = true;
  };
  return {
    root,
    content: () => said.textContent + (unwritten.get(said) ?? ""),
    fail: (message) => {
      root.append(make("p", { class: "problem", role: "alert" }, message));
      $("talk").scrollTop = $("talk").scrollHeight;
    },
    take(chunk) {
      if (chunk.error) throw new Error(chunk.error.message);
      const delta = chunk.choices[0]?.delta ?? {};
      if (delta.reasoning) {
        thinking.hidden = false;
        add(thought, delta.reasoning);
      }
      if (delta.content) add(said, delta.content);
      for (const part of delta.tool_calls ?? []) {
        if (!calls.has(part.index)) {
          const element = make("div", { class: "call" }, `${part.function.name} `);
          calls.set(part.index, element);
          root.append(element);
        }
        add(calls.get(part.index), part.function.arguments ?? "");
      }
    },
  };
}
