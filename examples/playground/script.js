// Sends requests to the limited routes of the server that this page is from, and shows the answers.
// What is counted is counted there: this file draws what `/standing` and the responses tell.

const $ = (selector, within = document) => within.querySelector(selector);
const $$ = (selector) => [...document.querySelectorAll(selector)];

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

// --- Asking the server ---

// The name that this tab is counted by. It outlives a reload, as a real client's key would.
function visitorsName() {
  const random = crypto.getRandomValues(new Uint8Array(12));
  const fresh = Array.from(random, (byte) => byte.toString(16).padStart(2, "0")).join("");
  try {
    return (sessionStorage.visitor ??= fresh);
  } catch {
    return fresh; // The browser stores nothing.
  }
}
const visitor = visitorsName();

// The settings of the page as a query; empty at first, for the server's own limit and window.
let setting = "";

class Gone extends Error {}

async function ask(path) {
  try {
    const sent = performance.now();
    const asked = setting;
    const response = await fetch(path + asked, { headers: { "x-visitor": visitor }, cache: "no-store" });
    const body = await response.text();
    return { response, body, asked, passed: response.ok, sent, answered: performance.now() };
  } catch {
    throw new Gone();
  }
}

// The server's clock, in milliseconds since 1970, according to the quickest of the last responses.
const clock = {
  heard: [],
  hear(now, { sent, answered }) {
    this.heard = [{ ahead: now - (sent + answered) / 2, trip: answered - sent }, ...this.heard.slice(0, 5)];
    this.best = this.heard.reduce((best, other) => (other.trip < best.trip ? other : best));
  },
  at: (local) => local + clock.best.ahead,
  now: () => clock.at(performance.now()),
};

// --- The server's reports ---

const limits = {}; // For each name and quota: the limit, the used part, the window's length and end.
let told; // The setting that `limits` and `seen` belong to.
const seen = {}; // For each name and quota: the used and refused requests of each window, by its end.
let chosen = $("input:checked").value;

const isOpen = (name, used) => name !== "first-request" || used > 0;
const REMEMBERED = 32;

// Responses may overtake each other: a later window wins, and within a window the higher count.
function learn(name, { quotas }) {
  limits[name] ??= quotas;
  quotas.forEach((quota, i) => {
    const { ends, used } = limits[name][i];
    if (quota.ends > ends || (quota.ends === ends && quota.used > used)) limits[name][i] = quota;
    if (isOpen(name, quota.used)) note(name, i, quota.ends, quota.used, 0);
  });
}

function note(name, i, ends, used, refused) {
  const windows = ((seen[name] ??= [])[i] ??= new Map());
  const window = windows.get(ends) ?? { used: 0, refused: 0 };
  windows.set(ends, { used: Math.max(window.used, used), refused: window.refused + refused });
  if (windows.size > REMEMBERED) windows.delete(Math.min(...windows.keys()));
}

// Asks for this visitor's standing, without a charge: at the start, and when a window has ended.
let next;
async function look() {
  const answer = await ask("standing");
  if (answer.asked !== setting) return; // The setting has changed since; another `look` is on its way.
  const standing = Object.entries(JSON.parse(answer.body));
  if (told !== setting) {
    for (const [name] of standing) delete limits[name], delete seen[name];
    told = setting;
  }
  for (const [name, told] of standing) learn(name, told);
  clock.hear(standing[0][1].at, answer);
  showSetting();
  const ends = Object.values(limits).flat().map((quota) => quota.ends);
  clearTimeout(next);
  next = setTimeout(attend, Math.max(20, Math.min(...ends) - clock.now() + 5), look);
  draw();
}

// Sends a request. The body has the decision if it passed, the headers if it was refused.
async function send(name) {
  const answer = { name, ...(await ask(`try/${name}`)) };
  if (answer.passed) answer.told = JSON.parse(answer.body);
  if (answer.asked !== told) return answer;
  if (answer.passed) {
    learn(name, answer.told);
    clock.hear(answer.told.at, answer);
  } else {
    // The refusing window is found by its end, which the header has in whole seconds.
    const reset = Number(answer.response.headers.get("x-ratelimit-reset"));
    seen[name]?.forEach((windows, i) => {
      const ends = [...windows.keys()].find((ends) => Math.ceil(ends / 1000) === reset);
      if (ends !== undefined) note(name, i, ends, 0, 1);
    });
  }
  showResponse(answer);
  draw();
  return answer;
}

// --- The current window ---

const MOST_PANES = 20;
const meters = $("#meters");
let turns = [];

function draw() {
  drawMeters();
  drawStrips();
  drawLens();
}

function drawMeters() {
  const quotas = limits[chosen];
  const of = `${chosen} ${quotas[0].limit}`;
  if (meters.dataset.of !== of) {
    meters.dataset.of = of;
    turns = [];
    meters.replaceChildren(...quotas.map(({ limit }, i) => {
      const panes = Array.from({ length: Math.min(limit, MOST_PANES) }, () => element("i"));
      const name = quotas.length > 1 ? `Window ${i + 1}` : "The current window";
      return element("div", { class: "meter" },
        element("div", { class: "head" },
          element("span", { class: "used" }), element("span", { class: "turns" })),
        element("div", { class: "panes", role: "meter", "aria-label": name, "aria-valuemin": 0 }, ...panes),
        element("div", { class: "time", "aria-hidden": true }, element("i")));
    }));
  }
  quotas.forEach(({ limit, used, ends }, i) => {
    const meter = meters.children[i];
    const refused = seen[chosen]?.[i]?.get(ends)?.refused ?? 0;
    const words = ` of ${limit} used` + (refused ? `, ${refused} refused` : "");
    meter.classList.toggle("hit", refused > 0);
    $(".used", meter).replaceChildren(element("b", {}, String(used)), words);
    const panes = $(".panes", meter);
    panes.setAttribute("aria-valuemax", limit);
    panes.setAttribute("aria-valuenow", used);
    panes.setAttribute("aria-valuetext", used + words);
    const share = (used / limit) * panes.children.length;
    [...panes.children].forEach((pane, at) => pane.classList.toggle("on", at < share));
  });
}

// The countdown is all that moves by itself: in whole seconds for those who ask for less motion.
const calm = matchMedia("(prefers-reduced-motion: reduce)");
const seconds = (ms) => (calm.matches ? Math.ceil(ms / 1000) : (ms / 1000).toFixed(1));

function tick() {
  requestAnimationFrame(tick);
  limits[chosen].forEach(({ used, window, ends }, i) => {
    const open = isOpen(chosen, used);
    const left = open ? Math.min(window, Math.max(0, ends - clock.now())) : window;
    const time = seconds(left);
    const words = open ? ["turns in ", element("b", {}, `${time} s`)] : ["begins with a request"];
    if (turns[i] !== (open && time)) $(".turns", meters.children[i]).replaceChildren(...words);
    turns[i] = open && time;
    const share = calm.matches ? (time * 1000) / window : left / window;
    $(".time i", meters.children[i]).style.transform = `scaleX(${Math.min(1, share)})`;
  });
  if (running && run.end > clock.now()) {
    $(".aimed .result").textContent = `in ${seconds(run.end - clock.now())} s`;
  }
}

// --- The last windows ---

const SHOWN = 8;

function drawStrips() {
  $("#strips").replaceChildren(...limits[chosen].map((quota, i) => {
    const windows = seen[chosen]?.[i] ?? new Map();
    // Grids have a place for windows without a request, too.
    const ends = chosen === "first-request"
      ? [...windows.keys()].sort((a, b) => a - b).slice(-SHOWN)
      : Array.from({ length: SHOWN }, (_, back) => quota.ends - back * quota.window).reverse();
    while (ends.length < SHOWN) ends.unshift(undefined);
    const label = limits[chosen].length > 1 ? `The last windows, ${i + 1}` : "The last windows";
    return element("ol", { class: "strip", "aria-label": label },
      ...ends.map((ends) => box(quota, ends, windows.get(ends))));
  }));
}

function box(quota, ends, window) {
  const fill = element("i");
  const boxed = element("span", { class: "box" }, fill);
  if (!window) return element("li", { class: "unseen", "aria-hidden": true }, boxed);
  const { used, refused } = window;
  const item = element("li", { title: `${used} of ${quota.limit} used, ${refused} refused` }, boxed,
    element("span", { class: "count" }, used + (refused ? `\u2009+${refused}` : "")),
    element("span", {}, secondOfMinute(ends - quota.window)));
  item.classList.toggle("hit", refused > 0);
  item.classList.toggle("now", ends === quota.ends);
  fill.style.height = `${Math.min(1, used / quota.limit) * 100}%`;
  return item;
}

function secondOfMinute(ms) {
  const second = Math.floor(ms / 100) / 10 % 60;
  const text = Number.isInteger(second) ? String(second) : second.toFixed(1);
  return ":" + text.padStart(text.includes(".") ? 4 : 2, "0");
}

// --- Requests at a click ---

function showResponse({ name, response, passed, body }) {
  $("#asked").textContent = `GET /try/${name}`;
  const fields = [...response.headers].map(([field, value]) => {
    const told = /^(x-ratelimit-|retry-after)/.test(field);
    return element("span", { class: told ? "told" : "plain" }, element("b", {}, field), `: ${value}\n`);
  });
  const status = element("span", { class: "status" }, `${response.status} ${response.statusText}\n`);
  $("#fields").hidden = false;
  $("#fields").classList.toggle("refused", !passed);
  $("#fields").replaceChildren(status, ...fields, `\n${body.trim()}`);
}

function say(text, refused = false) {
  $("#said").textContent = text;
  $("#said").classList.toggle("refused", refused);
}

async function click(requests, name = chosen) {
  const answers = await Promise.all(Array.from({ length: requests }, () => send(name)));
  const passed = answers.filter((answer) => answer.passed);
  const refused = answers.filter((answer) => !answer.passed);
  const field = ({ response }, name) => response.headers.get(name);
  // Readers look for the refusal, so the panel shows it.
  if (refused.length) {
    showResponse(refused.at(-1));
    const counts = requests > 1 ? `${passed.length} passed, ${refused.length} refused` : "Refused";
    say(`${counts}: come back in ${field(refused.at(-1), "retry-after")}\u00a0s.`, true);
  } else {
    const left = Math.min(...answers.map((answer) => field(answer, "x-ratelimit-remaining")));
    say(`${requests > 1 ? `All ${requests} passed` : "Passed"}; ${left} left.`);
  }
  return passed.length;
}

// Does it, and says so where there is no answer.
async function attend(work, ...given) {
  try {
    await work(...given);
  } catch (error) {
    if (!(error instanceof Gone)) throw error;
    say("The server does not answer.", true);
    clearTimeout(next);
    next = setTimeout(attend, 2000, look);
  }
}

function choose(name) {
  chosen = name;
  $(`input[value="${name}"]`).checked = true;
  $$("[data-about]").forEach((about) => (about.hidden = about.dataset.about !== name));
  say("");
  draw();
}

// --- Experiments ---

class Stopped extends Error {}

// The one that runs, with what stops it.
let running;

// Until the server's clock shows that time, or the experiment is stopped.
function until(time) {
  const { signal } = running;
  return new Promise((resolve, reject) => {
    const stop = () => reject(new Stopped());
    if (signal.aborted) return stop();
    signal.addEventListener("abort", stop);
    setTimeout(resolve, Math.max(0, time - clock.now()));
  });
}

// Runs it, with what the visitor has said. Its button stops it meanwhile, and no other one starts.
async function perform(button, tell, work) {
  const label = [...button.childNodes];
  const others = $$("#experiments button").filter((other) => other !== button);
  running = new AbortController();
  others.forEach((other) => (other.disabled = true));
  button.textContent = "Stop";
  try {
    tell(await work());
  } catch (error) {
    if (error instanceof Stopped) tell("Stopped.");
    else if (error instanceof Gone) tell("The server does not answer.");
    else throw error;
  } finally {
    running.abort();
    running = undefined;
    others.forEach((other) => (other.disabled = false));
    button.replaceChildren(...label);
  }
}

function experiment(form, work) {
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (running) return running.abort();
    const said = new FormData(form).get("said");
    const outcome = $(".outcome", form);
    const tell = (text) => (outcome.textContent = text);
    perform(event.submitter, tell, () => work(said, tell));
  });
}

// Until nothing is spent under the limit, and its windows last for some time yet.
async function fresh(name, lasting) {
  for (;;) {
    await look();
    const isLate = ({ used, ends }) => isOpen(name, used) && ends - clock.now() < lasting;
    const others = limits[name].filter((quota) => quota.used > 0 || isLate(quota));
    if (!others.length) return;
    await until(Math.max(...others.map(({ ends }) => ends)) + 20);
  }
}

async function burst(said, tell) {
  const name = chosen;
  tell("Waiting for a window with nothing spent.");
  await fresh(name, 1000);
  const { limit } = limits[name][0];
  const passed = await click(8, name);
  const why = limit < 8 ? "refused requests take nothing from the next window" : "all of them fit";
  return `${passed} of 8 passed; you said ${said}. The limit is ${limit}: ${why}.`;
}

// The end of the window shows what has set it.
async function reset(said, tell) {
  const name = chosen;
  tell("Waiting for a window with nothing spent.");
  await fresh(name, 1800);
  const first = await send(name);
  if (!first.passed) return "A request came between. Try again.";
  const [{ ends, window }] = first.told.quotas;
  await until(clock.now() + 1000);
  await send(name);
  await look();
  tell(`Waiting for ${secondOfMinute(ends)}.`);
  await until(ends + 20);
  await look();
  if (limits[name][0].used > 0) return "Something is spent, so the window has moved. Try again.";
  const [found, where] =
    ends - first.told.at === window ? ["first", `${window / 1000} s after the first request`]
    : ends % window === 0 ? ["clock", `the clock's next multiple of ${window / 1000} s`]
    : ["own", "on a grid that is shifted for your key"];
  const more = limits[name].length > 1 ? " The second window turns half a window later." : "";
  const right = found === said ? "As you said" : "Not as you said";
  return `${right}: it was back at ${secondOfMinute(ends)}, ${where}.${more}`;
}

// --- The boundary attack ---

const HALF = 500; // From the boundary, in milliseconds: in which the requests are sent,
const RANGE = 750; // what is drawn,
const LEAD = 1000; // and what it takes to get ready.

// The attack that runs, or ran last: its target, the boundary, the requests around it.
let run = { shots: [] };

// When to send, from the boundary: a whole limit before it, and another one after it.
function plan(limit) {
  const step = 360 / Math.max(1, limit - 1);
  const limitFrom = (at) => Array.from({ length: limit }, (_, i) => ({ at: at + i * step }));
  return [...limitFrom(-450), ...limitFrom(90)];
}

// The next end of a window of which nothing is spent by then.
function nextEnd(quotas) {
  let { ends, window } = quotas[0];
  const spent = (quota) => quota.used > 0 && quota.ends > ends - HALF;
  while (ends - clock.now() < LEAD || quotas.some(spent)) ends += window;
  return ends;
}

// A window from the first request has to be opened before it has an end.
async function openedEnd(name) {
  const [{ used, ends }] = limits[name];
  if (used > 1 || (used === 1 && ends - clock.now() < LEAD)) {
    await until(ends + 20);
    await look();
  }
  if (limits[name][0].used === 0) await send(name);
  return limits[name][0].ends;
}

async function attack(name) {
  const fromFirst = name === "first-request";
  const isAsPlanned = ({ used, ends }) =>
    ends <= run.end - HALF || used === (fromFirst && ends === run.end ? 1 : 0);
  do {
    await look();
    run.end = fromFirst ? await openedEnd(name) : nextEnd(limits[name]);
    await until(run.end - HALF - 200);
    await look();
    // A click may have used a token in the meantime.
  } while (!limits[name].every(isAsPlanned));

  await Promise.all(run.shots.map(async (shot) => {
    await until(run.end + shot.at - clock.best.trip / 2);
    shot.answer = await send(name);
    const { told, sent, answered } = shot.answer;
    shot.at = (told?.at ?? clock.at((sent + answered) / 2)) - run.end;
    draw();
  }));
}

function judge(name, said) {
  run.judged = true;
  const { limit } = limits[name][0];
  const answers = run.shots.map((shot) => shot.answer);
  const passed = answers.filter((answer) => answer.passed).length;
  const took = Math.max(...answers.map((a) => a.answered)) - Math.min(...answers.map((a) => a.sent));
  const astray = run.shots.some((shot, i) => (i < limit) !== (shot.at < 0));
  const count = `${passed} of ${answers.length} passed`;
  $(".aimed .result").textContent = count;
  const result = `${count} within ${(took / 1000).toFixed(2)}\u00a0s`;
  if (astray || took > 2 * HALF) {
    return `${result}, but some were late, by the network or a busy browser. Try again.`;
  }
  const compared = `${result}; you said ${said}.`;
  if (passed <= limit) return `${compared} The limit of ${limit} holds.`;
  if (name === "aligned") return `${compared} The limit is ${limit}. The remedy: two windows at once.`;
  const opener = name === "first-request" ? ", and one had opened the window" : "";
  return `${compared} The limit is ${limit}${opener}.`;
}

async function aim(target, said) {
  const name = target.dataset.target;
  const result = $(".result", target);
  run = { name, shots: plan(limits[name][0].limit) };
  choose(name);
  $$("[data-target]").forEach((other) => other.classList.toggle("aimed", other === target));
  result.textContent = "";
  verdict("Waiting for the end of a window with nothing spent.");
  $("figure").scrollIntoView({ block: "nearest", behavior: calm.matches ? "auto" : "smooth" });
  try {
    await attack(name);
  } catch (error) {
    result.textContent = "";
    run.end = 0;
    throw error;
  }
  return judge(name, said);
}

function verdict(text) {
  $("#verdict").textContent = text;
}

// The requests around the boundary, and below them the windows that they fell into.
function drawLens() {
  if (run.judged) return; // Later requests are not part of the attack.
  const place = (at) => ((at + RANGE) / (2 * RANGE)) * 100;
  $("#lens .dots").replaceChildren(...run.shots.map(({ at, answer }) => {
    const dot = element("i", { class: answer ? (answer.passed ? "passed" : "refused") : "planned" });
    dot.style.left = `${place(at)}%`;
    return dot;
  }));
  if (!run.shots.some((shot) => shot.answer)) return $("#lens .rows").replaceChildren();
  $("#lens .rows").replaceChildren(...limits[run.name].map(({ limit, window }, i) => {
    const row = element("div", { class: "row" });
    for (const [ends, { used, refused }] of seen[run.name][i]) {
      const [left, right] = [ends - window - run.end, ends - run.end].map(place);
      if (right <= 0 || left >= 100) continue;
      const span = element("span", { class: refused ? "hit" : "" }, `${used} of ${limit} used`);
      span.style.left = `${Math.max(0, left)}%`;
      span.style.right = `${Math.max(0, 100 - right)}%`;
      row.append(span);
    }
    return row;
  }));
}

// --- Beginning ---

function fill(slot, text) {
  $$(`[data-fill="${slot}"]`).forEach((place) => (place.textContent = text));
}

function showSetting() {
  const { limit, window } = limits[chosen][0];
  if (shown === `${limit} ${window}`) return;
  shown = `${limit} ${window}`;
  $("#limit").value = limit;
  $("#window").value = window / 1000;
  fill("window", window / 1000);
  fill("twice", 2 * limit);
  const said = $("#attacking [name=said]");
  said.max = 2 * limit;
  said.form.reset();
  verdict(INVITATION);
  $$(".aimed").forEach((target) => target.classList.remove("aimed"));
  $$(".outcome, .result").forEach((outcome) => (outcome.textContent = ""));
  run = { shots: plan(limit) };
}
let shown;
const INVITATION = $("#verdict").textContent;

// A limit and a window of the visitor's own. Counts in windows of that length stay.
function set() {
  if (!$("#setting").reportValidity()) return;
  running?.abort();
  setting = `?limit=${$("#limit").valueAsNumber}&window=${$("#window").valueAsNumber}`;
  say("");
  attend(look);
}

async function begin() {
  fill("origin", location.origin);
  // A restored tab can load before the server has started, so the page retries.
  while (!limits[chosen]) {
    await attend(look);
    if (!limits[chosen]) await new Promise((resolve) => setTimeout(resolve, 1000));
  }
  choose(chosen);
  $("#setting").addEventListener("change", set);
  $("#setting").addEventListener("submit", (event) => event.preventDefault());
  $(".kinds").addEventListener("change", (event) => choose(event.target.value));
  $("#one").addEventListener("click", () => attend(click, 1));
  $("#burst").addEventListener("click", () => attend(click, 8));
  experiment($("#bursting"), burst);
  experiment($("#resetting"), reset);
  $("#attacking").addEventListener("submit", (event) => {
    event.preventDefault();
    if (running) return running.abort();
    const said = new FormData(event.target).get("said");
    const target = event.submitter.closest("[data-target]");
    perform(event.submitter, verdict, () => aim(target, said));
  });
  tick();
}
begin();
