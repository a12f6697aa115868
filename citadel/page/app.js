// The page: a key opens it, a stream of snapshots keeps it true, and it comes back by itself when the server does.

import { $, say } from "./dom.js";
import { draw } from "./overview.js";
import * as playground from "./playground.js";
import { call, events, Refused } from "./stream.js";

const AGAIN_MS = 1000;
let key = sessionStorage.getItem("citadel-key");
let watching = null;

function show(text, kind = "") {
  say($("link"), text);
  $("link").className = `link ${kind}`;
}

function close(problem) {
  watching?.abort();
  watching = key = null;
  sessionStorage.removeItem("citadel-key");
  playground.clear();
  $("house").hidden = $("leave").hidden = true;
  $("door").hidden = false;
  say($("key-problem"), problem);
  show("not connected");
  $("key").focus();
}

async function open() {
  watching?.abort();
  const mine = (watching = new AbortController());
  while (!mine.signal.aborted) {
    try {
      await follow(mine.signal);
      show("the server ended the stream, trying again", "lost");
    } catch (error) {
      if (mine.signal.aborted) return;
      if (error instanceof Refused && error.status === 401) return close("This key is not valid.");
      if (error instanceof Refused && error.status === 403) return guest();
      show("the server does not answer, trying again", "lost");
    }
    await new Promise((resolve) => setTimeout(resolve, AGAIN_MS));
  }
}

async function follow(signal) {
  const response = await call("/admin/status/stream", key, { signal });
  enter(true);
  for await (const event of events(response)) {
    if (!event.data) continue;
    const snapshot = JSON.parse(event.data);
    draw(snapshot, act);
    playground.fill(snapshot.models);
    show(snapshot.offline ? "connected; the server takes no calls" : "connected", "live");
  }
}

async function guest() {
  try {
    const response = await call("/v1/models", key);
    playground.fill((await response.json()).data);
    enter(false);
    show("this key may chat, not look after the server", "live");
  } catch (error) {
    close(error.message);
  }
}

function enter(owner) {
  sessionStorage.setItem("citadel-key", key);
  const first = $("house").hidden;
  $("door").hidden = true;
  $("house").hidden = $("leave").hidden = false;
  $("owner").hidden = !owner;
  if (first) $("main").focus();
}

async function act(model, what, body) {
  const path = `/admin/models/${model.split("/").map(encodeURIComponent).join("/")}/${what}`;
  const options = { method: "POST" };
  if (body) Object.assign(options, { body: JSON.stringify(body), headers: { "Content-Type": "application/json" } });
  try {
    await call(path, key, options);
    say($("said"), "");
  } catch (error) {
    say($("said"), `${model}: ${error.message}`);
  }
}

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = $("key").value.trim();
  $("key").value = "";
  say($("key-problem"), "");
  open();
});
$("leave").addEventListener("click", () => close(""));
playground.start(() => key);
if (key) open();
