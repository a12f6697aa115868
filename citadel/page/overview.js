// What the owner sees: a snapshot each second, drawn into elements that stay, so that focus stays too.

import { $, bytes, duration, make, say } from "./dom.js";

const cards = new Map();
const MOST_DOTS = 128;

export function draw(snapshot, act) {
  figures(snapshot);
  models(snapshot.models, act);
  queue(snapshot.queue);
  usage(snapshot.usage);
}

function figures({ tokens_per_s: rate, hour, memory }) {
  say($("rate"), rate.toFixed(rate < 10 ? 1 : 0));
  const top = Math.max(...hour, 1e-9);
  const points = hour.map((value, at) => `${(at * 600) / (hour.length - 1)},${58 - (value / top) * 54}`);
  $("hour-line").setAttribute("d", `M${points.join("L")}`);
  $("hour-area").setAttribute("d", `M0,60L${points.join("L")}L600,60Z`);
  const peak = Math.max(...hour);
  say($("hour-peak"), peak > 0 ? `, at most ${peak.toFixed(peak < 10 ? 1 : 0)} a second over a minute` : "");
  $("hour").setAttribute("aria-label", peak > 0 ? `at most ${peak.toFixed(1)} tokens a second in the last hour` : "no tokens in the last hour");
  for (const kind of ["ram", "gpu"]) {
    const { total, free } = memory[kind];
    if (total > 0) $(kind).replaceChildren(bytes(total - free), make("small", {}, ` of ${bytes(total)}`));
    else say($(kind), "none");
    $(`${kind}-bar`).value = total > 0 ? (total - free) / total : 0;
    $(`${kind}-bar`).hidden = total === 0;
  }
}

function models(list, act) {
  const there = new Set(list.map((model) => model.id));
  for (const [id, card] of cards) {
    if (!there.has(id)) {
      card.root.remove();
      cards.delete(id);
    }
  }
  for (const model of list) {
    if (!cards.has(model.id)) {
      const card = newCard(model.id, act);
      cards.set(model.id, card);
      $("models").append(card.root);
    }
    drawCard(cards.get(model.id), model);
  }
}

function newCard(id, act) {
  const state = make("span", { class: "state" });
  const bar = make("progress", { max: 1, value: 0, "aria-label": `Load of ${id}` });
  const facts = make("p", { class: "facts" });
  const slots = make("div", { class: "slots", role: "img" });
  const toggle = make("button", { onclick: () => card.toggle.ariaDisabled !== "true" && act(id, card.loads ? "load" : "unload") });
  const pin = make("button", { onclick: () => act(id, "pin", { pinned: pin.getAttribute("aria-pressed") !== "true" }) }, "Pin");
  pin.setAttribute("aria-label", `Pin ${id}`);
  const root = make("li", { class: "model", "data-model": id },
    make("header", {}, make("h3", {}, id), state), facts, bar, slots, make("div", { class: "row doing" }, toggle, pin));
  const card = { root, state, bar, facts, slots, toggle, pin, loads: true };
  return card;
}

function drawCard(card, model) {
  const starting = model.state === "starting";
  const queued = model.state === "stopped" && model.waiting > 0;
  const word = queued ? "queued" : model.draining ? "draining" : starting ? `starting, about ${duration(model.remaining_s)}` : model.state;
  say(card.state, word);
  card.state.className = `state ${model.state}`;
  card.bar.hidden = !starting;
  card.bar.value = model.progress ?? 0;
  card.loads = model.state !== "loaded" && !starting;
  say(card.toggle, card.loads ? "Load" : "Unload");
  card.toggle.setAttribute("aria-label", `${card.toggle.textContent} ${model.id}`);
  card.toggle.setAttribute("aria-disabled", String(starting)); // not `disabled`, which would take the focus away
  card.pin.setAttribute("aria-pressed", String(model.pinned));
  const facts = [model.engine + (model.mode ? ` ${model.mode}` : "")];
  if (model.context_length) facts.push(`context ${model.context_length.toLocaleString("en")}`);
  facts.push(model.state === "loaded" ? `${model.tokens_per_s.toFixed(1)} tokens/s` : `loads in ${duration(model.cold_start_s)}`);
  if (model.waiting) facts.push(`${model.waiting} waiting`);
  say(card.facts, model.reason ? model.reason : facts.join(" · "));
  card.slots.hidden = model.state !== "loaded";
  card.slots.setAttribute("aria-label", `${model.running} of ${model.slots} slots in use`);
  const dots = Math.min(model.slots, MOST_DOTS);
  while (card.slots.childElementCount < dots) card.slots.append(make("i"));
  while (card.slots.childElementCount > dots) card.slots.lastChild.remove();
  [...card.slots.children].forEach((dot, at) => dot.classList.toggle("on", at < model.running));
}

function queue(places) {
  $("queue-none").hidden = places.length > 0;
  $("queue").replaceChildren(...places.map((place) => {
    const what = place.kind === "model" ? `load of ${place.name}` : `${place.kind} job ${place.name}`;
    const size = place.gpu_memory ? `, ${bytes(place.gpu_memory)}` : "";
    return make("li", {}, `${what}${size}, ${place.running ? "has the GPU" : "waits"}, asked ${duration(place.asked_s)} ago`);
  }));
}

function usage(rows) {
  const members = new Map();
  for (const row of rows) {
    const sum = members.get(row.member) ?? [0, 0, 0];
    members.set(row.member, [sum[0] + row.calls, sum[1] + row.prompt_tokens, sum[2] + row.completion_tokens]);
  }
  $("usage").tBodies[0].replaceChildren(...[...members].map(([member, sums]) =>
    make("tr", {}, make("td", {}, member), ...sums.map((sum) => make("td", {}, sum.toLocaleString("en"))))));
}
