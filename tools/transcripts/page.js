"use strict";
// Everything that a record says goes through text(): a text node, never markup.
const PAGE = 50;
const byId = (id) => document.getElementById(id);
const text = (value) => document.createTextNode(String(value));

function node(tag, name, ...children) {
  const made = document.createElement(tag);
  if (name) made.className = name;
  for (const child of children.flat()) if (child !== null) made.append(typeof child === "object" ? child : text(child));
  return made;
}

async function unpacked(id) {
  const bytes = Uint8Array.from(atob(byId(id).textContent), (char) => char.charCodeAt(0));
  byId(id).remove();
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip")));
}

let data, stream, rollouts, shown = [], page = 0, opened = null, beside = null;
const siblings = new Map(); // task -> rollouts

// ---- reading

const FIELDS = ["stage", "step", "sample", "task", "reward", "advantage", "failure", "flags", "tokens", "earned", "parts", "prompt", "start", "turns"];
const FLAGS = ["cut by the token budget", "no readable answer", "tool errors"];

function read(row, number) {
  const rollout = Object.fromEntries(FIELDS.map((name, place) => [name, row[place]]));
  rollout.number = number;
  rollout.stage = data.about.stages[rollout.stage];
  rollout.success = rollout.failure === null;
  return rollout;
}

function words(rollout) {
  if (rollout.words === undefined) {
    const parts = [taskOf(rollout).id, taskOf(rollout).question];
    let end = rollout.start;
    for (const [, , blocks] of rollout.turns) for (const block of blocks) end += block[1];
    let said = "";
    for (let place = rollout.start; place < end; place++) said += data.texts[stream[place]];
    rollout.words = [...parts, said].join("\n").toLowerCase();
  }
  return rollout.words;
}

const taskOf = (rollout) => data.tasks[rollout.task];
const ofTask = (rollout) => siblings.get(rollout.task);
const partner = (rollout, stage) => ofTask(rollout).find((other) => other.stage === stage && other.sample === rollout.sample);

function counterpart(rollout) {
  const stage = { baseline: "candidate", candidate: "baseline" }[rollout.stage];
  return (stage && partner(rollout, stage)) || null;
}

const named = (rollout) => [rollout.stage, rollout.step === null ? null : `step ${rollout.step}`, `sample ${rollout.sample}`].filter(Boolean).join(" · ");
const verdict = (rollout) => (rollout.success ? "solved" : data.failures[rollout.failure]);
const decimal = (value) => value.toFixed(2);
const counted = (number) => `${number} token${number === 1 ? "" : "s"}`;
const percent = (share) => `${(100 * share).toFixed(1)}%`;

// ---- choosing

const OUTCOMES = {
  "": "any",
  success: "success",
  failure: "failure",
  gained: "candidate, gained since baseline",
  lost: "candidate, lost since baseline",
};

const ORDERS = {
  run: ["as run", null],
  item: ["by task", (a, b) => a.task - b.task || a.sample - b.sample || a.number - b.number],
  low: ["lowest reward first", (a, b) => a.reward - b.reward],
  high: ["highest reward first", (a, b) => b.reward - a.reward],
  long: ["longest first", (a, b) => b.tokens - a.tokens],
  short: ["shortest first", (a, b) => a.tokens - b.tokens],
};

function moved(rollout, wanted) {
  if (rollout.stage !== "candidate") return false;
  const before = partner(rollout, "baseline");
  return Boolean(before) && rollout.success === wanted && before.success !== wanted;
}

function choose() {
  const form = byId("filters").elements;
  const [stage, step, outcome, failure, flag] = ["stage", "step", "outcome", "failure", "flag"].map((name) => form[name].value);
  const task = form.task.value.trim().toLowerCase(), wanted = form.text.value.trim().toLowerCase();
  const tests = [
    stage && ((one) => one.stage === stage),
    step && ((one) => one.step === Number(step)),
    outcome === "success" && ((one) => one.success),
    outcome === "failure" && ((one) => !one.success),
    outcome === "gained" && ((one) => moved(one, true)),
    outcome === "lost" && ((one) => moved(one, false)),
    failure && ((one) => one.failure === Number(failure)),
    flag && ((one) => one.flags[Number(flag)]),
    task && ((one) => taskOf(one).id.toLowerCase().includes(task)),
    wanted && ((one) => words(one).includes(wanted)),
  ].filter(Boolean);
  shown = rollouts.filter((one) => tests.every((test) => test(one)));
  const order = ORDERS[form.order.value][1];
  if (order) shown.sort(order); // stable: equal ones stay as they were run
  page = 0;
  list();
}

function offer(name, options) {
  byId("filters").elements[name].replaceChildren(...options.map(([value, label]) => Object.assign(node("option", "", label), { value })));
}

function offerSteps() {
  const stage = byId("filters").elements.stage.value;
  const steps = new Set(rollouts.filter((one) => one.step !== null && (!stage || one.stage === stage)).map((one) => one.step));
  offer("step", [["", "any"], ...[...steps].sort((a, b) => a - b).map((step) => [step, step])]);
  byId("filters").elements.step.disabled = !steps.size;
}

function offerAll() {
  const tally = (label, test) => `${label} (${rollouts.filter(test).length})`;
  const there = data.about.stages.filter((stage) => rollouts.some((one) => one.stage === stage));
  offer("stage", [["", "any"], ...there.map((stage) => [stage, tally(stage, (one) => one.stage === stage)])]);
  offer("outcome", Object.entries(OUTCOMES));
  offer("failure", [["", "any"], ...data.failures.map((name, place) => [place, tally(name, (one) => one.failure === place)])]);
  offer("flag", [["", "anything"], ...FLAGS.map((name, place) => [place, tally(name, (one) => one.flags[place])])]);
  offer("order", Object.entries(ORDERS).map(([value, [label]]) => [value, label]));
  byId("tasks").replaceChildren(...data.tasks.map((task) => Object.assign(node("option"), { value: task.id })));
  offerSteps();
}

// ---- the list

const mark = (success) => node("span", success ? "mark good" : "mark bad", success ? "✓" : "✗");

function list() {
  const last = Math.max(0, Math.ceil(shown.length / PAGE) - 1);
  page = Math.min(Math.max(page, 0), last);
  byId("rows").replaceChildren(...shown.slice(page * PAGE, (page + 1) * PAGE).map(line));
  byId("page").textContent = `${page + 1} of ${last + 1}`;
  byId("earlier").disabled = page === 0;
  byId("later").disabled = page === last;
  byId("pages").hidden = last === 0;
  const share = shown.filter((one) => one.success).length / shown.length, sum = shown.reduce((total, one) => total + one.reward, 0);
  const means = shown.length ? ` · ${percent(share)} success · mean reward ${decimal(sum / shown.length)}` : "";
  byId("count").textContent = `${shown.length} of ${rollouts.length} rollouts${means}`;
}

function line(rollout) {
  const what = node("span", "what", node("b", "", taskOf(rollout).id), node("span", "where", named(rollout)));
  const how = node("span", "how", node("span", "reward", decimal(rollout.reward)), node("span", "where", verdict(rollout)));
  const link = node("a", "", mark(rollout.success), what, how);
  link.href = `#${rollout.number}`;
  if (rollout === opened) link.setAttribute("aria-current", "true");
  return node("li", "", link);
}

// ---- one rollout

function follow() {
  const before = opened, place = location.hash.slice(1);
  opened = /^\d+$/.test(place) ? rollouts[Number(place)] || null : null;
  document.body.classList.toggle("reading", opened !== null);
  beside = opened && counterpart(opened);
  const at = shown.indexOf(opened);
  if (at >= 0) page = Math.floor(at / PAGE);
  list();
  show();
  const seen = [...byId("rows").querySelectorAll("a")].find((link) => link.hash === `#${(opened || before || {}).number}`);
  if (seen) seen.scrollIntoView({ block: opened ? "nearest" : "center" });
  if (opened) byId("rollout").scrollTo(0, 0), byId("rollout").focus({ preventScroll: true });
}

function show() {
  byId("tip").hidden = true;
  if (!opened) return byId("rollout").replaceChildren(summed());
  const task = taskOf(opened);
  const facts = node("dl", "facts", task.facts.map(([name, value]) => node("div", "", node("dt", "", name), node("dd", "", value))));
  const pair = beside && beside.stage === "baseline" ? [beside, opened] : [opened, beside].filter(Boolean);
  byId("rollout").replaceChildren(
    bar(),
    node("h2", "", task.id),
    node("p", "question", task.question),
    node("details", "", node("summary", "", "hidden facts"), facts),
    node("details", "", node("summary", "", `prompt, ${counted(opened.prompt[1])}`), tokens(...opened.prompt, "template")),
    node("p", "legend", swatch("policy", "the policy's tokens, which the loss counts"), swatch("masked", "masked: template and observations"), "Hover or tap a token for its id. The records hold no log-probability of single tokens."),
    node("div", pair.length > 1 ? "columns two" : "columns", pair.map(column)),
  );
}

function summed() {
  const head = ["stage", "rollouts", "success", "mean reward", ...data.failures].map((name) => node("th", "", name));
  const rows = data.about.stages.map((stage) => {
    const those = rollouts.filter((one) => one.stage === stage), count = (test) => those.filter(test).length;
    if (!those.length) return null;
    const reward = those.reduce((total, one) => total + one.reward, 0) / those.length;
    const numbers = [those.length, percent(count((one) => one.success) / those.length), decimal(reward), ...data.failures.map((_, place) => count((one) => one.failure === place) || "")];
    return node("tr", "", node("th", "", stage), numbers.map((value) => node("td", "", value)));
  });
  return node("table", "stages", node("caption", "", "Choose a rollout in the list. What is here, by stage, and what was missed first:"), node("thead", "", node("tr", "", head)), node("tbody", "", rows));
}

const swatch = (name, label) => node("span", "swatch", node("span", `token ${name}`, "abc"), ` ${label}`);

function bar() {
  const at = shown.indexOf(opened);
  const step = (label, other) => {
    const button = node("button", "", label);
    button.type = "button";
    button.disabled = !other;
    button.onclick = () => (location.hash = other.number);
    return button;
  };
  const back = node("button", "back", "‹ list");
  back.type = "button";
  back.onclick = () => (location.hash = "");
  const select = node("select", "", Object.assign(node("option", "", "nothing"), { value: "" }));
  for (const other of ofTask(opened)) {
    if (other === opened) continue;
    const option = node("option", "", `${other.success ? "✓" : "✗"} ${named(other)}`);
    option.value = other.number;
    option.selected = other === beside;
    select.append(option);
  }
  select.onchange = () => {
    beside = select.value === "" ? null : rollouts[Number(select.value)];
    show();
  };
  const label = node("label", "", "beside ", select);
  const steps = [step("‹", at > 0 ? shown[at - 1] : null), step("›", at >= 0 ? shown[at + 1] : null)];
  return node("nav", "bar", back, steps, label);
}

function column(rollout) {
  const chips = FLAGS.filter((_, place) => rollout.flags[place]).map((name, place) => node("span", "chip bad", name));
  const earned = data.about.milestones.map((title, place) => {
    const turn = rollout.earned[place];
    return node("li", turn === null ? "missed" : "", mark(turn !== null), ` ${title}`, node("span", "where", turn === null ? " missed" : ` turn ${turn + 1}`));
  });
  const parts = rollout.parts.map((value, place) => [value, data.about.weights[place]]).filter(([value]) => value);
  const sum = parts.map(([value, name], place) => `${value < 0 ? "− " : place ? "+ " : ""}${decimal(Math.abs(value))} ${name}`).join(" ");
  const advantage = rollout.advantage === null ? "" : ` · advantage ${decimal(rollout.advantage)}`;
  return node(
    "section",
    rollout === opened ? "column opened" : "column",
    node("header", "", node("h3", "", named(rollout)), node("p", "verdict", mark(rollout.success), ` ${verdict(rollout)} `, chips), node("p", "sum", node("b", "", `reward ${decimal(rollout.reward)}`), sum ? ` = ${sum}` : "", advantage, ` · ${counted(rollout.tokens)}`), node("ul", "milestones", earned)),
    ...turns(rollout),
  );
}

function turns(rollout) {
  let place = rollout.start;
  return rollout.turns.map(([finished, readable, blocks], number) => {
    const parts = blocks.map(([kind, count, call]) => {
      const made = block(data.about.kinds[kind], place, count, call, readable);
      place += count;
      return made;
    });
    const notes = [finished ? null : node("span", "chip bad", "not finished"), readable ? null : node("span", "chip bad", "thinking never closed")];
    return node("section", "turn", node("h4", "", `turn ${number + 1} `, notes), parts);
  });
}

function block(kind, place, count, call, readable) {
  const inside = tokens(place, count, kind);
  if (kind === "thinking" || kind === "template") {
    const folded = node("details", kind, node("summary", "", kind, node("span", "where", ` ${counted(count)}`)), inside);
    folded.open = !readable;
    return folded;
  }
  const head = [node("span", "kind", kind)];
  if (call) {
    const [name, executed, error, earned] = call;
    head.push(node("code", "", name || "unreadable"));
    if (!executed) head.push(node("span", "chip bad", "not executed"));
    if (error) head.push(node("span", "chip bad", error));
    for (const title of earned) head.push(node("span", "chip good", `✓ ${data.about.milestones[title]}`));
  }
  return node("div", `block ${kind}`, node("p", "head", head), inside);
}

function tokens(start, count, kind) {
  const made = node("div", "tokens"), own = ["thinking", "said", "call"].includes(kind);
  for (let place = start; place < start + count; place++) {
    const said = data.texts[stream[place]];
    const token = node("span", own ? "token policy" : "token masked", said);
    if (/^\s*$/.test(said)) token.classList.add(said.includes("\n") ? "line" : "space");
    token.piece = stream[place];
    token.own = own;
    made.append(token);
  }
  return made;
}

function tip(event) {
  const token = event.target.closest ? event.target.closest(".token") : null, box = byId("tip");
  box.hidden = !token || token.piece === undefined;
  if (box.hidden) return;
  const ids = [data.ids[token.piece]].flat(), said = data.texts[token.piece];
  box.replaceChildren(node("b", "", `id ${ids.join(", ")}`), ` ${JSON.stringify(said.length > 40 ? `${said.slice(0, 39)}…` : said)}`, node("span", "where", token.own ? "sampled by the policy" : "masked"));
  const spot = token.getBoundingClientRect(), width = box.offsetWidth, height = box.offsetHeight;
  box.style.left = `${Math.max(8, Math.min(spot.left, innerWidth - width - 8))}px`;
  box.style.top = `${spot.top > height + 8 ? spot.top - height - 6 : spot.bottom + 6}px`;
}

// ---- beginning

async function begin() {
  if (typeof DecompressionStream === "undefined") {
    byId("about").textContent = "This browser cannot unpack the transcripts (no DecompressionStream); a newer one can.";
    return;
  }
  const [packed, numbers] = [await unpacked("data"), await unpacked("stream")];
  data = await packed.json();
  stream = new Uint32Array(await numbers.arrayBuffer()); // little-endian, as every machine with a browser is
  data.tasks = data.tasks.map(([id, question, facts]) => ({ id, question, facts }));
  rollouts = data.rollouts.map(read);
  for (const one of rollouts) siblings.has(one.task) ? siblings.get(one.task).push(one) : siblings.set(one.task, [one]);
  const { title, kind, run, plan } = data.about;
  byId("about").textContent = `${run} · ${kind} · ${title} · plan ${plan.slice(0, 16)}`;
  document.title = `Transcripts of ${run}`;
  offerAll();
  document.querySelector("#filters details").open = !matchMedia("(max-width: 48rem)").matches;
  let later = 0;
  const form = byId("filters");
  form.onsubmit = (event) => event.preventDefault();
  form.oninput = (event) => {
    if (event.target.name === "stage") offerSteps();
    clearTimeout(later);
    later = setTimeout(choose, event.target.type === "search" ? 200 : 0);
  };
  form.onreset = () => setTimeout(() => (offerSteps(), choose()));
  byId("earlier").onclick = () => (page--, list());
  byId("later").onclick = () => (page++, list());
  document.addEventListener("mouseover", tip);
  document.addEventListener("click", tip);
  addEventListener("hashchange", follow);
  addEventListener("keydown", (event) => {
    if (["INPUT", "SELECT"].includes(event.target.tagName) || event.ctrlKey || event.metaKey || event.altKey) return;
    const other = { j: 1, k: -1 }[event.key], next = other && shown[shown.indexOf(opened) + other];
    if (next) location.hash = next.number;
    if (event.key === "Escape") location.hash = "";
  });
  choose();
  follow();
  document.body.dataset.ready = "yes";
}

begin();
