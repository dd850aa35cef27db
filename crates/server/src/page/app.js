// Looks at the server once a second and shows what it sees. Everything from the server enters the page as text.

import { setUpAsk, errorOf } from "./ask.js";
import { Chart } from "./chart.js";
import { PoolMap } from "./map.js";
import { ago, bar, bytes, count, FORMATS, make, short, sum } from "./text.js";

const find = (id) => document.getElementById(id);
const SECOND = 1000;
const PATIENCE = 5 * SECOND;
const SLOWEST = 5 * SECOND;
const CEILINGS = {
  kv: "memory",
  ridge: "arithmetic",
  latency: "the latency aimed at",
  configured: "--max-running",
};

const charts = {
  rate: new Chart(find("rate-chart"), "--f16"),
  ttft: new Chart(find("ttft-chart"), "--accent"),
  itl: new Chart(find("itl-chart"), "--accent"),
  running: new Chart(find("running-chart"), "--int8"),
};
const map = new PoolMap(find("map"), (text) => {
  find("cell").textContent = text ?? "Point at a page to see whose it is.";
});

let timer = null;
let failures = 0;
let last = null; // the last look
let lastMetrics = null;
let newest = -1; // engine's time of the newest relief seen

// ---- The key: in this tab only.

const KEY = "reef-admin-key";

function headers() {
  const key = sessionStorage.getItem(KEY);
  return key ? { authorization: `Bearer ${key}` } : {};
}

function askForKey() {
  const had = sessionStorage.getItem(KEY) !== null;
  find("key-open").hidden = false;
  find("key-wrong").hidden = !had;
  state("locked", "Key needed");
  if (!find("key").open) find("key").showModal();
}

find("key-form").addEventListener("submit", () => {
  const key = find("key-value").value.trim();
  // A header takes no other characters.
  if (/^[\x21-\x7e]+$/.test(key)) sessionStorage.setItem(KEY, key);
  find("key-value").value = "";
  soon(0);
});
find("key-open").addEventListener("click", () => find("key").showModal());

// ---- Looking.

function soon(ms) {
  clearTimeout(timer);
  timer = document.hidden ? null : setTimeout(look, ms);
}

document.addEventListener("visibilitychange", () => soon(0));

function state(name, text) {
  document.body.dataset.state = name;
  if (find("link-text").textContent !== text) find("link-text").textContent = text;
}

function trouble(message) {
  find("trouble").hidden = !message;
  if (message && find("trouble").textContent !== message) find("trouble").textContent = message;
}

async function look() {
  const tokens = Number(find("probe-tokens").value);
  const query = new URLSearchParams({ fidelity: find("probe-fidelity").value });
  if (Number.isInteger(tokens) && tokens >= 1 && tokens <= 1048576) query.set("tokens", tokens);
  try {
    const options = { headers: headers(), cache: "no-store", signal: AbortSignal.timeout(PATIENCE) };
    const response = await fetch(`v1/pool?${query}`, options);
    if (response.status === 401 || response.status === 403) return askForKey();
    if (!response.ok) {
      failed(response.status === 503 ? "Not ready" : "Trouble", await errorOf(response));
      return;
    }
    const pool = await response.json();
    failures = 0;
    state("live", "Live");
    trouble(null);
    show(pool);
    last = pool;
    await lookAtMetrics();
    soon(SECOND);
  } catch (error) {
    const why = error.name === "TimeoutError" ? "it does not answer in time" : "it cannot be reached";
    failed("Not connected", `The server is not there: ${why}.`);
  }
}

function failed(text, message) {
  failures += 1;
  // Once is no trouble yet.
  if (last && failures === 1) return soon(SECOND / 2);
  const wait = Math.min(SECOND * failures, SLOWEST);
  state(last ? "stale" : "loading", text);
  const sentence = message.endsWith(".") ? message : `${message}.`;
  trouble(`${sentence[0].toUpperCase()}${sentence.slice(1)} Trying again every ${wait / SECOND} s.`);
  soon(wait);
}

// ---- Rates: differences between looks.

async function lookAtMetrics() {
  const response = await fetch("metrics", { headers: headers(), cache: "no-store", signal: AbortSignal.timeout(PATIENCE) });
  if (!response.ok) return;
  const text = await response.text();
  const now = {
    ttft: histogram(text, "vllm:time_to_first_token_seconds"),
    itl: histogram(text, "vllm:inter_token_latency_seconds"),
  };
  for (const name of ["ttft", "itl"]) {
    const before = lastMetrics?.[name] ?? now[name];
    const samples = now[name].count - before.count;
    const mean = samples > 0 ? ((now[name].sum - before.sum) / samples) * 1000 : null;
    charts[name].push(performance.now() / 1000, mean);
    if (mean !== null) showDuration(name, mean);
    const overall = now[name].count > 0 ? (now[name].sum / now[name].count) * 1000 : null;
    find(`${name}-more`).textContent = overall === null ? "none yet" : `mean since the start ${duration(overall).join(" ")}`;
  }
  lastMetrics = now;
}

function duration(ms) {
  return ms >= 10_000 ? [short(ms / 1000), "s"] : [short(ms), "ms"];
}

function showDuration(id, ms) {
  const [value, unit] = duration(ms);
  find(id).textContent = value;
  find(`${id}-unit`).textContent = unit;
}

// Sum and count of a histogram, over all its labels.
function histogram(text, name) {
  const found = { sum: 0, count: 0 };
  for (const line of text.split("\n")) {
    if (!line.startsWith(name)) continue;
    const end = line.slice(name.length);
    const value = Number(line.slice(line.lastIndexOf(" ") + 1));
    if (/^_sum[ {]/.test(end)) found.sum += value;
    if (/^_count[ {]/.test(end)) found.count += value;
  }
  return found;
}

function showRates(pool) {
  const again = last && pool.now_ms < last.now_ms;
  if (again) {
    // Another server: its numbers begin anew.
    Object.values(charts).forEach((chart) => chart.clear());
    [lastMetrics, newest, last] = [null, -1, null];
  }
  const seconds = performance.now() / 1000;
  charts.running.push(seconds, pool.running);
  find("running").textContent = count(pool.running);
  find("running-unit").textContent = pool.running === 1 ? "sequence" : "sequences";
  const limits = pool.ceilings;
  const limit = Math.min(limits.kv, limits.ridge, limits.latency ?? Infinity, limits.configured);
  find("running-more").textContent = `${count(pool.waiting)} waiting · ${count(pool.paused)} paused · about ${count(limit)} at most, by ${CEILINGS[limits.binding] ?? limits.binding}`;
  if (!last || pool.now_ms <= last.now_ms) return;
  const elapsed = (pool.now_ms - last.now_ms) / 1000;
  const rate = (name) => (pool.counters[name] - last.counters[name]) / elapsed;
  const generated = rate("generated_tokens");
  charts.rate.push(seconds, generated);
  find("rate").textContent = short(generated);
  find("rate-more").textContent = `prefill ${short(rate("prefill_rows"))} tok/s · ${short(rate("steps"))} steps/s`;
}

// ---- The parts of the page.

function show(pool) {
  showRates(pool);
  document.title = `Reef · ${pool.model}`;
  find("model").textContent = pool.model;
  find("why").dataset.waits = pool.would_wait;
  sentence(find("why-text"), pool.why_not);
  showMemory(pool);
  showRelief(pool);
  showRequests(pool);
  const counters = pool.counters;
  const broken = counters.violations ? ` · ${count(counters.violations)} invariants broken: please report` : "";
  find("foot").textContent = `Reef ${pool.version} · ${count(counters.finished)} requests served, ${count(counters.failed)} failed · ${count(counters.generated_tokens)} tokens generated · up ${ago(Math.max(pool.now_ms, 1000))}${broken}`;
}

// Names stand between backticks.
function sentence(element, text) {
  const parts = text.split("`").map((part, index) => make(index % 2 ? "code" : "span", "", part));
  element.replaceChildren(...parts);
}

function showMemory(pool) {
  const accounts = pool.accounts;
  const idle = pool.held.cached ?? {};
  const held = accounts.used_bytes - accounts.cached_bytes;
  find("memory-sum").textContent = `${bytes(held)} held of ${bytes(accounts.budget_bytes)} · peak ${bytes(accounts.peak_bytes)}`;
  const part = (amount, className, name) => [amount, className, `${name}: ${bytes(amount)}`];
  bar(find("bar"), [
    ...FORMATS.map((format) => part((accounts.used[format] ?? 0) - (idle[format] ?? 0), `fill-${format}`, format)),
    part(accounts.cached_bytes, "fill-cached", "idle prefixes"),
    part(accounts.fenced_bytes, "fill-fenced", "behind the fence"),
    part(accounts.free_bytes, "fill-free", "free"),
    part(accounts.reserved_bytes, "fill-reserved", "kept for re-encoding"),
    part(accounts.table_bytes + accounts.fragmentation_bytes, "fill-overhead", "tables and cut-off"),
  ]);
  map.show(pool);
  showLegend();
}

function showLegend() {
  const entries = map.legend().map(([look, name, amount]) => {
    const entry = make("li");
    const swatch = make("i", typeof look === "string" ? `fill-${look}` : "");
    if (typeof look !== "string") swatch.style.backgroundColor = look.color;
    entry.append(swatch, make("span", "", name), make("b", "", bytes(amount)));
    return entry;
  });
  find("legend").replaceChildren(...entries);
}

function showRelief(pool) {
  const entries = [...pool.relief].reverse();
  find("relief-empty").hidden = entries.length > 0;
  const counters = pool.counters;
  find("relief-sum").textContent = entries.length ? `${count(counters.encoded_blocks)} blocks re-encoded, ${count(counters.dropped_blocks)} dropped` : "";
  const shown = entries.slice(0, 80).map((entry) => {
    const line = make("li", entry.at_ms > newest && newest >= 0 ? "new" : "");
    const what = entry.blocks ? `${count(entry.blocks)} ${entry.blocks === 1 ? "block" : "blocks"}` : "";
    const back = entry.bytes ? `−${bytes(entry.bytes)}` : "";
    line.append(
      make("span", `chip fill-${entry.rung}`, entry.rung),
      make("span", "who", entry.request === null ? "prefixes" : `#${entry.request}`),
      make("span", "what", [what, back].filter(Boolean).join(", ") || "stands still"),
      make("span", "when", ago(entry.ago_ms)),
    );
    line.title = `step ${entry.step}, ${entry.reason}${entry.harm ? `, expected harm ${entry.harm.toPrecision(2)} nats a token` : ""}`;
    return line;
  });
  newest = entries.length ? Math.max(newest, entries[0].at_ms) : Math.max(newest, 0);
  find("relief").replaceChildren(...shown);
}

function showRequests(pool) {
  const several = pool.tenants.length > 1;
  const rows = pool.requests.map((row) => requestRow(row, several));
  find("rows").replaceChildren(...rows);
  find("requests").hidden = rows.length === 0;
  find("requests-empty").hidden = rows.length > 0;
  const more = pool.requests_left_out ? ` · ${count(pool.requests_left_out)} more wait` : "";
  find("requests-sum").textContent = rows.length ? `${count(rows.length)} shown${more}` : "";
}

function requestRow(row, several) {
  const line = make("tr");
  const cell = (className, text) => {
    const made = make("td", className, text);
    line.append(made);
    return made;
  };
  const name = make("th", "", `#${row.key}`);
  name.scope = "row";
  if (several) name.append(make("small", "", row.tenant ?? ""));
  if (row.branches > 1) name.append(make("small", "", `${row.branches} branches`));
  line.append(name);
  const contract = cell("", row.fidelity);
  if (row.priority) contract.append(make("small", "", `priority ${row.priority}`));
  const stands = row.pause ? `${row.pause}${row.paused_ms === null ? "" : ` · ${ago(row.paused_ms)}`}` : null;
  const at = cell("");
  at.append(make("span", `state state-${row.state}`, row.state));
  if (stands) at.append(make("small", "", stands));
  const prompt = cell("number", count(row.prompt_tokens));
  if (row.cached_tokens) prompt.append(make("small", "", `${count(row.cached_tokens)} cached`));
  else if (row.state === "prefill") prompt.append(make("small", "", `${count(row.computed_tokens)} done`));
  cell("number", count(row.generated_tokens)).append(make("small", "", `of ${count(row.max_tokens)}`));
  const memory = cell("memory");
  const line_bar = make("div", "bar thin");
  bar(line_bar, FORMATS.map((format) => [row.bytes[format] ?? 0, `fill-${format}`, `${format}: ${bytes(row.bytes[format] ?? 0)}`]));
  line_bar.setAttribute("role", "img");
  memory.append(make("span", "", bytes(sum(row.bytes))), line_bar);
  cell("number", row.dropped_tokens ? count(row.dropped_tokens) : "–");
  cell("number", row.pauses ? count(row.pauses) : "–");
  const rung = cell("");
  if (row.last_rung) rung.append(make("span", `chip fill-${row.last_rung.rung}`, row.last_rung.rung));
  else rung.textContent = "–";
  return line;
}

// ---- Controls.

for (const input of document.querySelectorAll("input[name=mode]")) {
  input.addEventListener("change", () => {
    map.mode = input.value;
    if (last) map.draw(), showLegend();
  });
}

find("probe").addEventListener("submit", (event) => event.preventDefault());
find("probe").addEventListener("input", () => last && soon(150));

const THEME = "reef-theme";
const preferred = matchMedia("(prefers-color-scheme: dark)");

function theme() {
  return document.documentElement.dataset.theme ?? (preferred.matches ? "dark" : "light");
}

function redraw() {
  find("theme").textContent = theme() === "dark" ? "Light" : "Dark";
  Object.values(charts).forEach((chart) => chart.draw());
  map.draw();
  if (last) showLegend();
}

function setTheme(name) {
  document.documentElement.dataset.theme = name;
  redraw();
}

find("theme").addEventListener("click", () => {
  setTheme(theme() === "dark" ? "light" : "dark");
  localStorage.setItem(THEME, theme());
});
preferred.addEventListener("change", redraw);
const kept = localStorage.getItem(THEME);
if (kept === "dark" || kept === "light") document.documentElement.dataset.theme = kept;
redraw();

find("base-url").textContent = new URL("v1", document.baseURI).href;
setUpAsk({ headers, onUnauthorized: askForKey });
look();
