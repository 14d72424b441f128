// The calculator: sends the configuration, shows the answer, and waits for traces that have to be made.
import { byId, draw, list, make, setVerdict, showDiff, showFigures, showOwners, showParts } from "./view.js";

const POLL_MS = 250;
const SETTLE_MS = 500;
const LINEAR = 512;
const MOST_KEPT = 4;
const FIELDS = ["device", "gpus", "strategy", "price", "micro_batch", "precision", "recompute", "seq", "lora", "base"];
const NUMBERS = new Set(["gpus", "price", "micro_batch", "seq", "lora"]);

const state = { choices: null, choice: null, answer: null, edge: null, scale: [], asked: 0, busy: false, kept: [], seen: "" };

const ask = async (place, body) => {
  const reply = await fetch(place, {
    method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body),
  });
  return reply.json();
};

const announce = (() => {
  let timer = 0;
  return (text) => {
    clearTimeout(timer);
    timer = setTimeout(() => { byId("announce").textContent = text; }, SETTLE_MS);
  };
})();

// --- the slider -------------------------------------------------------------------------------------------

// Up to 512 every micro-batch has a place; beyond, places are a constant factor apart.
const makeScale = (most, ...exact) => {
  if (most <= LINEAR) return Array.from({ length: Math.max(most, 2) }, (_, at) => at + 1);
  const count = 240;
  const values = Array.from({ length: count + 1 }, (_, at) => Math.round(most ** (at / count)));
  return [...new Set([...values, ...exact.filter((value) => value >= 1)])].sort((a, b) => a - b);
};

const setScale = () => {
  const { edge, choice } = state;
  const largest = edge && edge.largest ? edge.largest : 0;
  const most = Math.max(16, choice.micro_batch, edge ? Math.ceil(1.3 * largest) + 2 : 64);
  const exact = edge ? [largest, edge.next || 0, choice.micro_batch] : [choice.micro_batch];
  state.scale = makeScale(most, ...exact);
  const slider = byId("slider");
  slider.max = String(state.scale.length - 1);
  const at = state.scale.findIndex((value) => value >= choice.micro_batch);
  slider.value = String(at < 0 ? state.scale.length - 1 : at);
  slider.setAttribute("aria-valuetext", `${choice.micro_batch} samples`);
  const place = edge && edge.next !== null ? (state.scale.findIndex((value) => value > largest) - 0.5) / (state.scale.length - 1) : 1;
  byId("edge-bar").style.setProperty("--edge", `${Math.max(0, Math.min(1, place)) * 100}%`);
};

const showEdge = () => {
  const { edge } = state;
  let text = "Looking for the largest that fits";
  if (edge && edge.error) text = "";
  else if (edge && !edge.largest) text = `Nothing fits: ${edge.stops}`;
  else if (edge && edge.next === null) text = `Fits up to ${edge.largest.toLocaleString("en")}, the largest tried.`;
  else if (edge) text = `Fits up to ${edge.largest.toLocaleString("en")}. ${edge.stops}`;
  byId("edge").textContent = text;
  setScale();
};

let edgeTimer = 0;
const askEdge = (wait = 150) => {
  clearTimeout(edgeTimer);
  edgeTimer = setTimeout(async () => {
    const choice = { ...state.choice };
    const edge = await ask("edge", choice).catch(() => null);
    if (!edge || !isAlike(choice, state.choice)) return;
    if (edge.status === "tracing") askEdge(2 * POLL_MS);
    else { state.edge = edge; showEdge(); }
  }, wait);
};

const isAlike = (one, other) => FIELDS.every((name) => name === "micro_batch" || name === "price" || one[name] === other[name]);

// --- answers ----------------------------------------------------------------------------------------------

const showWait = (answer) => {
  const seconds = Math.round(answer.elapsed_s);
  byId("doing").textContent = answer.after
    ? `Waiting for another trace, then ${answer.what}` : `${answer.what[0].toUpperCase()}${answer.what.slice(1)}, ${seconds} s`;
  const bar = byId("progress");
  if (answer.usual_s && !answer.after) { bar.max = Math.max(answer.usual_s, answer.elapsed_s * 1.1); bar.value = answer.elapsed_s; }
  else bar.removeAttribute("value");
  if (byId("wait").hidden) announce(`${answer.what}, please wait`);
  byId("wait").hidden = false;
};

const showRefused = ({ error, command }) => {
  setVerdict(byId("verdict"), "refused");
  byId("headline").textContent = error.given ? `${error.given}: ${error.found}` : error.found;
  byId("reason").textContent = error.cure || "";
  byId("command").textContent = command || "";
  announce(`Not possible: ${error.found}. ${error.cure || ""}`);
};

// --- the modules that own a part --------------------------------------------------------------------------

// Asks until what has to be traced or planned first is there, or until the configuration is another.
const askUntilReady = async (place, body, wait) => {
  const choice = state.choice;
  for (;;) {
    const answer = await ask(place, body).catch(() => ({ status: "refused", error: ENDED }));
    if (state.choice !== choice) return null;
    if (answer.status !== "tracing") return answer;
    wait(answer);
    await new Promise((done) => { setTimeout(done, POLL_MS); });
    if (state.choice !== choice) return null;
  }
};

const fillOwners = async (item) => {
  const wait = (answer) => showOwners(item, { what: `${answer.what}, please wait`, owners: [] });
  const answer = await askUntilReady("owners", state.choice, wait);
  if (!answer || item.querySelector("button").getAttribute("aria-expanded") !== "true") return;
  showOwners(item, answer.status === "ready"
    ? answer.parts[item.dataset.part] ?? { what: "", owners: [] } : { what: answer.error.found, owners: [] });
};

const findPart = (name) => [...byId("memory-parts").children].find((item) => item.dataset.part === name);

const toggleOwners = (name) => {
  const item = findPart(name);
  const isOpen = item.querySelector("button").getAttribute("aria-expanded") === "true";
  showOwners(item, isOpen ? null : { what: "", owners: [] });
  if (!isOpen) fillOwners(item);
};

// Owners that are shown belong to the newest answer.
const refreshOwners = () => {
  for (const button of document.querySelectorAll('#memory-parts button[aria-expanded="true"]')) fillOwners(button.closest("li"));
};

// A part of the bar opens the same list, by a click, Enter or the space bar.
const openMark = (event) => {
  const mark = event.target.closest ? event.target.closest("#memory-bar .mark") : null;
  if (!mark || (event.type === "keydown" && event.key !== "Enter" && event.key !== " ")) return;
  event.preventDefault();
  const name = mark.getAttribute("aria-label").split(":")[0];
  const item = findPart(name);
  if (!item) return;
  toggleOwners(name);
  if (event.type === "click") item.scrollIntoView({ block: "nearest" });
  else item.querySelector("button").focus();
};

// --- the plan, and a config file --------------------------------------------------------------------------

const ENDED = { given: "", found: "trimtab explore has ended", cure: "Start it again in the terminal." };

const sayError = ({ given, found, cure }) => `${given ? `${given}: ` : ""}${found}. ${cure || ""}`.trim();

// What was shown of the plan and of a file belongs to one configuration.
const forgetPlan = () => {
  byId("plan").hidden = true;
  byId("write").hidden = true;
  byId("diff").hidden = true;
  byId("config-said").replaceChildren();
  byId("config-done").textContent = "";
};

const openPlan = async () => {
  const wait = (answer) => { byId("done").textContent = `${answer.what[0].toUpperCase()}${answer.what.slice(1)}, ${Math.round(answer.elapsed_s)} s`; };
  const answer = await askUntilReady("plan", state.choice, wait);
  if (!answer) return;
  if (answer.status !== "ready") { byId("done").textContent = `There is no such plan. ${sayError(answer.error)}`; return; }
  byId("plan-page").href = answer.page;
  byId("plan-setting").textContent = answer.setting;
  byId("plan-command").textContent = answer.command;
  byId("plan").hidden = false;
  byId("done").textContent = "The plan opens in a new tab; if the browser forbids that, use the link. The command makes the same plan as a file.";
  window.open(answer.page, "_blank", "noopener");
};

const askConfig = async (seen) => {
  const file = byId("config").value.trim();
  const wait = (answer) => { byId("config-done").textContent = `${answer.what}, please wait`; };
  const answer = await askUntilReady("config", { choice: state.choice, file, seen }, wait);
  if (!answer) return;
  forgetPlan();
  if (answer.status !== "ready") { byId("config-done").textContent = sayError(answer.error); return; }
  list(byId("config-said"), answer.said);
  if (answer.written.length) {
    byId("config-done").textContent = `Written: ${answer.written.join(", ")}. The backup is ${answer.backup}; to undo it: ${answer.written.map((name) => `trimtab revert ${name}`).join("; ")}`;
    return;
  }
  if (!answer.diff) { byId("config-done").textContent = `${file} says so already; there is nothing to write.`; return; }
  showDiff(byId("diff"), answer.diff);
  byId("diff").hidden = false;
  byId("write").hidden = false;
  state.seen = answer.seen;
  byId("config-done").textContent = `Nothing is written yet: ${answer.edits.length} ${answer.edits.length === 1 ? "change" : "changes"} in ${file}.`;
};

const showReady = (answer) => {
  setVerdict(byId("verdict"), answer.verdict);
  byId("headline").textContent = answer.headline;
  byId("reason").textContent = answer.reason;
  byId("setting").textContent = answer.setting;
  byId("command").textContent = answer.command;
  byId("slider").setAttribute("aria-valuetext", `${state.choice.micro_batch} samples, ${answer.headline}`);
  showFigures(byId("figures"), answer.figures);
  byId("step-note").textContent = answer.step_note;
  draw(byId("memory-bar"), answer.memory.drawings);
  showParts(byId("memory-parts"), answer.memory.parts, toggleOwners);
  refreshOwners();
  byId("memory-note").textContent = [answer.memory.rank && `These are the ranks of ${answer.memory.rank}.`, answer.memory.note].filter(Boolean).join(" ");
  draw(byId("time-bar"), answer.time ? answer.time.drawings : []);
  showParts(byId("time-parts"), answer.time ? answer.time.parts : []);
  byId("time-note").textContent = answer.time ? "" : "There is no speed data for this GPU.";
  list(byId("assumptions"), answer.assumptions);
  announce(answer.headline);
};

const show = (answer) => {
  state.answer = answer;
  const waiting = answer.status === "tracing";
  const results = byId("results");
  results.setAttribute("aria-busy", String(waiting || answer.status === "refused"));
  results.dataset.status = answer.status;
  byId("wait").hidden = byId("wait").hidden || !waiting;
  byId("copy").disabled = !answer.command;
  byId("keep").disabled = answer.status !== "ready" || state.kept.length >= MOST_KEPT;
  byId("open-plan").disabled = answer.status !== "ready";
  byId("show-diff").disabled = answer.status !== "ready";
  if (waiting) showWait(answer);
  else if (answer.status === "refused") showRefused(answer);
  else showReady(answer);
};

const showTook = (answer, took, waited) => {
  const element = byId("took");
  element.dataset.ms = answer.status === "ready" ? took.toFixed(1) : "";
  element.dataset.server = answer.status === "ready" ? answer.elapsed_ms.toFixed(1) : "";
  if (answer.status !== "ready") element.textContent = "";
  else element.textContent = `Answered in ${took.toFixed(0)} ms ${waited ? "after a new trace" : "from traces already made"}.`;
};

// One request at a time; while it is under way only the newest choice waits.
const update = async () => {
  state.asked += 1;
  if (state.busy) return;
  state.busy = true;
  let seen = -1;
  let waited = false;
  while (seen !== state.asked) {
    seen = state.asked;
    const sent = { ...state.choice };
    const began = performance.now();
    let answer;
    try { answer = await ask("estimate", sent); }
    catch { answer = { status: "refused", error: ENDED }; }
    if (seen !== state.asked) continue;
    show(answer);
    showTook(answer, performance.now() - began, waited);
    waited = answer.status === "tracing";
    if (answer.status === "tracing") {
      await new Promise((done) => { setTimeout(done, POLL_MS); });
      if (seen === state.asked) { state.asked += 1; }
    } else if (!state.edge) askEdge();
  }
  state.busy = false;
};

const change = (name, value, from = null) => {
  const before = state.choice;
  state.choice = { ...before, [name]: value };
  byId("note").textContent = "";
  if (name !== "price") forgetPlan();
  if (name === "device" || name === "gpus") settleGpus();
  if (!isAlike(before, state.choice)) { state.edge = null; showEdge(); }
  if (from !== byId("micro_batch")) byId("micro_batch").value = String(state.choice.micro_batch);
  if (name === "micro_batch" && from !== byId("slider")) setScale();
  if (name === "price") refreshKept();
  update();
};

// Several GPUs need a strategy for several, one GPU needs none. What is changed here is said.
const settleGpus = () => {
  const { choices, choice } = state;
  const gpus = byId("gpus");
  if (!choice.device) choice.gpus = choices.given_gpus;
  gpus.disabled = !choice.device;
  gpus.value = String(choice.gpus);
  const several = choice.gpus > 1;
  for (const option of byId("strategy").options) {
    option.disabled = choices.strategies.find((rules) => rules.value === option.value).several !== several;
  }
  const rules = choices.strategies.find(({ value }) => value === choice.strategy);
  if (rules && rules.several !== several) {
    choice.strategy = several ? choices.several : choices.strategies.find((other) => !other.several).value;
    byId("strategy").value = choice.strategy;
    byId("note").textContent = `The strategy is now ${choice.strategy}: ${several ? "there are several GPUs" : "there is one GPU"}.`;
  }
};

// --- comparison -------------------------------------------------------------------------------------------

const WORDS = {
  device: "GPU", gpus: "GPUs", strategy: "strategy", micro_batch: "micro-batch", precision: "precision",
  recompute: "recomputation", seq: "sequence", lora: "LoRA rank", base: "frozen layers", price: "price",
};

const showKept = () => {
  const { kept } = state;
  byId("comparison").hidden = kept.length === 0;
  byId("comparison-says").textContent = `${kept.length} of ${MOST_KEPT}. What differs from the first is coloured.`;
  byId("keep").disabled = kept.length >= MOST_KEPT || !state.answer || state.answer.status !== "ready";
  byId("cards").replaceChildren(...kept.map(({ choice, answer }, at) => {
    const verdict = make("div", {}, make("p", { class: "headline" }, answer.headline));
    setVerdict(verdict, answer.verdict);
    const figure = make("figure");
    draw(figure, answer.memory.drawings);
    const figures = make("dl");
    showFigures(figures, answer.figures.filter(({ name }) => ["step", "tokens/s", "samples/s", "whole job", "GPU-hours", "cost"].includes(name)));
    const chosen = make("dl", {}, ...FIELDS.filter((name) => choice[name] !== null && choice[name] !== "" && name !== "price").map((name) => make(
      "div", {}, make("dt", {}, WORDS[name]),
      make("dd", { class: choice[name] === kept[0].choice[name] ? "" : "differs" }, String(choice[name])),
    )));
    const load = make("button", { type: "button" }, "Load");
    const remove = make("button", { type: "button", "aria-label": `Remove configuration ${at + 1}` }, "Remove");
    load.addEventListener("click", () => { setChoice({ ...choice }); byId("headline").scrollIntoView({ block: "center" }); });
    remove.addEventListener("click", () => { kept.splice(at, 1); showKept(); byId("done").textContent = "Removed from the comparison."; });
    return make("article", { "aria-label": `Configuration ${at + 1}` }, make("h3", {}, `${at + 1}. ${answer.setting}`), verdict, figure, figures, chosen,
      make("p", { class: "actions" }, load, remove));
  }));
};

const keep = () => {
  if (state.answer.status !== "ready" || state.kept.length >= MOST_KEPT) return;
  state.kept.push({ choice: { ...state.choice }, answer: state.answer });
  byId("done").textContent = `Kept: ${state.kept.length} of ${MOST_KEPT} configurations are compared below.`;
  showKept();
};

const refreshKept = async () => {
  const { price } = state.choice;
  for (const item of state.kept) {
    item.choice.price = price;
    const answer = await ask("estimate", item.choice).catch(() => null);
    if (answer && answer.status === "ready") item.answer = answer;
  }
  if (state.kept.length) showKept();
};

// --- start ------------------------------------------------------------------------------------------------

const fill = (id, values, group = "") => {
  const options = values.map((value) => make("option", { value: value.value ?? value }, value.label ?? String(value.value ?? value)));
  byId(id).append(...(group ? [make("optgroup", { label: group }, ...options)] : options));
};

const setChoice = (choice) => {
  state.choice = choice;
  state.edge = null;
  forgetPlan();
  for (const name of FIELDS) byId(name).value = choice[name] === null ? "" : String(choice[name]);
  settleGpus();
  showEdge();
  update();
};

const read = (name, element) => {
  if (!NUMBERS.has(name)) return element.value;
  if (element.value === "") return null;
  const value = Number(element.value);
  return element.validity.valid && Number.isFinite(value) ? value : undefined;
};

const start = async () => {
  const choices = await (await fetch("choices")).json();
  state.choices = choices;
  document.title = `${choices.job} · trimtab explore`;
  byId("job").textContent = choices.job;
  byId("footer").textContent = `trimtab ${choices.version} · nothing leaves this machine`;
  if (choices.given) fill("device", [{ value: "", label: choices.given }]);
  for (const group of new Set(choices.devices.map((device) => device.group))) {
    fill("device", choices.devices.filter((device) => device.group === group), group);
  }
  fill("gpus", choices.gpus);
  fill("strategy", choices.strategies);
  fill("precision", choices.precisions);
  fill("recompute", choices.recomputes);
  fill("base", choices.bases);
  for (const name of ["seq", "lora"]) {
    byId(name).hidden = !choices[name];
    document.querySelector(`[data-for="${name}"]`).hidden = !choices[name];
    if (choices[name] && choices[name].limit) byId(name).max = String(choices[name].limit);
  }
  for (const name of FIELDS) {
    const element = byId(name);
    element.addEventListener(element.tagName === "SELECT" ? "change" : "input", () => {
      const value = read(name, element);
      if (value === undefined || (value === null && name === "micro_batch")) {
        byId("note").textContent = `${WORDS[name]}: ${element.validationMessage || "give a number"}`;
        return;
      }
      change(name, value, element);
    });
  }
  byId("slider").addEventListener("input", (event) => change("micro_batch", state.scale[Number(event.target.value)], event.target));
  byId("choices").addEventListener("submit", (event) => event.preventDefault());
  byId("copy").addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(state.answer.command);
      byId("done").textContent = "Copied.";
    } catch {
      getSelection().selectAllChildren(byId("command"));
      byId("done").textContent = "The browser refused the clipboard: the command is selected, copy it with the keyboard.";
    }
  });
  byId("keep").addEventListener("click", keep);
  byId("open-plan").addEventListener("click", openPlan);
  byId("config-form").addEventListener("submit", (event) => { event.preventDefault(); askConfig(""); });
  byId("config").addEventListener("input", forgetPlan);
  byId("write").addEventListener("click", () => askConfig(state.seen));
  byId("memory-bar").addEventListener("click", openMark);
  byId("memory-bar").addEventListener("keydown", openMark);
  setChoice(choices.start);
};

start();
