"use strict";
// Requests the data once a second, and updates what has changed. Names are untrusted: they become text, never markup.

// Sort key, title, function for the cell's text, and in which tables the column is shown: all (""), or only wide or narrow ones.
const COLUMNS = [
  ["name", "Disk", null, ""],
  ["ops", "Ops/s", (d) => whole(d.reads + d.writes + d.others), "narrow"],
  ["reads", "Reads/s", (d) => whole(d.reads), "wide"],
  ["writes", "Writes/s", (d) => whole(d.writes), "wide"],
  ["bytes", "Bytes/s", (d) => bytes(d.read_bytes + d.write_bytes), "narrow"],
  ["read_bytes", "Read/s", (d) => bytes(d.read_bytes), "wide"],
  ["write_bytes", "Written/s", (d) => bytes(d.write_bytes), "wide"],
  ["mean_ns", "Latency", (d) => time(d.mean_ns), ""],
  [null, "Time spent", null, "wide"],
  ["in_flight", "In flight", (d) => whole(d.in_flight), "wide"],
  ["errors", "Errors", (d) => whole(d.errors_ever), ""],
];
const GROUP_COLUMNS = [
  ["Group", (g) => g.parent === null ? g.name : `${g.parent} › ${g.name}`, ""],
  ["Disks", (g) => whole(g.disks), "wide"],
  ["Ops/s", (g) => whole(g.reads + g.writes + g.others), ""],
  ["at most", (g) => most(g.most_ops, whole), ""],
  ["Bytes/s", (g) => bytes(g.read_bytes + g.write_bytes), ""],
  ["at most", (g) => most(g.most_bytes, bytes), "wide"],
  ["Latency", (g) => time(g.mean_ns), "wide"],
  ["Time spent", null, "wide"],
];
const LAYERS = [["throttle", "limits"], ["queue", "block layer"], ["module", "store"], ["front_end", "to the guest"]];
const ROWS = 25;
/** Seconds without a reply after which the shown data counts as old. */
const PATIENCE = 3;

const get = (id) => document.getElementById(id);
let sort = "ops";
let filter = "";
let rows = ROWS;
let chosen = null;
let host = "";
let answered = null;
let refused = false;

function whole(n) {
  if (n < 10000) return String(n);
  return n < 1e6 ? (n / 1e3).toFixed(1) + "k" : (n / 1e6).toFixed(2) + "M";
}

function bytes(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (n >= 1024 && unit < units.length - 1) { n /= 1024; unit += 1; }
  return n.toFixed(unit && n < 100 && n % 1 ? 1 : 0) + " " + units[unit];
}

/** The text of a limit; a dash if there is none. */
function most(limit, shown) {
  return limit === 0 ? "–" : shown(limit);
}

function time(ns) {
  if (ns === null) return "–";
  if (ns < 1e3) return ns + " ns";
  if (ns < 1e6) return (ns / 1e3).toFixed(ns < 1e4 ? 1 : 0) + " µs";
  return ns < 1e9 ? (ns / 1e6).toFixed(ns < 1e7 ? 1 : 0) + " ms" : (ns / 1e9).toFixed(1) + " s";
}

function count(n, of) {
  return `${n} ${of}${n === 1 ? "" : "s"}`;
}

/** Sets an element's text if it differs, so that an unchanged element is not redrawn. */
function put(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function hide(element, hidden) {
  if (element.hidden !== hidden) element.hidden = hidden;
}

function dress(element, classes) {
  if (element.className !== classes) element.className = classes;
}

function made(tag, classes, text) {
  const element = document.createElement(tag);
  if (classes) element.className = classes;
  if (text !== undefined) element.textContent = text;
  return element;
}

/** A bar that shows parts of a whole side by side, in the colours of `kind`. */
function newStrip(kind) {
  const element = made("div", "strip " + kind);
  element.setAttribute("role", "img");
  return element;
}

function fillStrip(element, parts, label) {
  if (element.title === label) return;
  element.title = label;
  let end = 0;
  parts.forEach((share, i) => {
    end += share * 100;
    element.style.setProperty("--end-" + i, end.toFixed(1) + "%");
  });
}

/** Shows how a disk's or group's time divides among the layers. */
function layers(element, d) {
  const all = LAYERS.reduce((sum, [key]) => sum + d[key], 0);
  hide(element, all === 0);
  if (all === 0) return;
  const shares = LAYERS.map(([key]) => d[key] / all);
  fillStrip(element, shares, LAYERS.map(([, word], i) => `${word} ${Math.round(shares[i] * 100)} %`).join(", "));
}

/** Gives `parent` one child per item: `make` creates missing children, `fill` sets the content of each. */
function each(parent, items, make, fill) {
  while (parent.children.length > items.length) parent.lastElementChild.remove();
  items.forEach((item, i) => {
    const element = parent.children[i] ?? parent.appendChild(make(i));
    fill(element, item);
  });
}

function newReactor() {
  const reactor = made("div", "reactor");
  const words = made("div");
  words.append(made("span"), made("span"));
  reactor.append(words, newStrip("times"));
  return reactor;
}

function fillReactor(element, r) {
  const [words, bar] = element.children;
  put(words.children[0], `core ${r.core}: ${Math.round(r.busy * 100)} % busy`);
  put(words.children[1], `longest turn ${time(r.longest_turn_ns)}`);
  const shares = [r.busy, r.idle, r.asleep].map((share) => Math.round(share * 100) / 100);
  fillStrip(bar, shares, ["busy", "polling", "asleep"].map((word, i) => `${word} ${Math.round(shares[i] * 100)} %`).join(", "));
}

function newGroup() {
  const row = made("tr");
  for (const [, text, where] of GROUP_COLUMNS) {
    const cell = made("td", where);
    if (text === null) cell.append(newStrip("layers"));
    row.append(cell);
  }
  return row;
}

function fillGroup(row, group) {
  GROUP_COLUMNS.forEach(([, text], i) => {
    const cell = row.children[i];
    if (text === null) layers(cell.firstChild, group); else put(cell, text(group));
  });
}

function newDisk() {
  const row = made("tr");
  for (const [key, , , where] of COLUMNS) {
    const cell = made("td", where);
    if (key === null) cell.append(newStrip("layers"));
    if (key === "name") {
      const button = made("button");
      button.type = "button";
      cell.append(button);
    }
    row.append(cell);
  }
  row.addEventListener("click", () => choose(row.cells[0].firstChild.textContent));
  return row;
}

function fillDisk(row, disk) {
  COLUMNS.forEach(([key, , text, where], i) => {
    const cell = row.children[i];
    if (key === null) layers(cell.firstChild, disk);
    else if (key === "name") {
      put(cell.firstChild, disk.name);
      if (cell.title !== disk.kind) cell.title = disk.kind;
    } else put(cell, text(disk));
    if (key === "errors") dress(cell, disk.errors_ever > 0 ? "bad" : where);
  });
  dress(row, disk.name === chosen ? "chosen" : "");
}

function showDisks(live) {
  const disks = live.disks.slice(0, rows);
  each(get("disks").tBodies[0], disks, newDisk, fillDisk);
  put(get("shown"), `${disks.length} of ${live.matching}`);
  const more = live.disks.length - disks.length;
  hide(get("more"), more === 0);
  put(get("more"), `Show ${more} more`);
}

/** The latency below which this share of requests completed, to the precision of the buckets. */
function quantile(bounds, counts, share) {
  const all = counts.reduce((sum, n) => sum + n, 0);
  if (all === 0) return "–";
  let left = all * share;
  const bucket = counts.findIndex((n) => (left -= n) <= 0);
  return bucket < bounds.length ? "< " + time(bounds[bucket]) : "> " + time(bounds[bounds.length - 1]);
}

/** Fills a list of terms and descriptions. */
function tellFacts(list, pairs) {
  each(list, pairs.flat(), (i) => made(i % 2 ? "dd" : "dt"), put);
}

function facts(disk) {
  const users = disk.users.map((u) => `${u.controller} (${u.kind}, ${u.connected ? "a VM is connected" : "no VM"})`);
  return [
    ["Kind", disk.kind + (disk.read_only ? ", read-only" : "")],
    ["Size", `${bytes(disk.bytes)}: ${disk.bytes / disk.block_bytes} blocks of ${disk.block_bytes} B`],
    ...(disk.store_block_bytes === disk.block_bytes ? [] : [["Store's blocks", `${disk.store_block_bytes} B`]]),
    ...(disk.file === null ? [] : [["File", disk.file]]),
    ["UUID", disk.uuid],
    ["Controllers", users.join(", ") || "none"],
    ...(disk.claimed_by === null ? [] : [["Claimed by", disk.claimed_by]]),
    ["In flight", `${disk.in_flight}, ${disk.waiting} of them waiting; peak of the last minute ${disk.in_flight_max}`],
    ["Errors", `${disk.operations.reduce((sum, op) => sum + op.errors_ever, 0)}` + (disk.overdue ? `; ${disk.overdue} over the deadline` : "")],
    ...(disk.last_failure === null ? [] : [["Last failure", failure(disk.last_failure)]]),
  ];
}

/** The text of a request that the store failed. */
function failure(f) {
  return `${f.op} of ${count(f.blocks, "block")} from block ${f.lba}: ${f.error}, at ${new Date(f.at_ms).toLocaleString()}`;
}

function limits(disk) {
  return disk.limits.map((limit) => {
    const words = [
      [limit.ops, whole, "requests"], [limit.read_ops, whole, "reads"], [limit.write_ops, whole, "writes"],
      [limit.bytes, bytes, ""], [limit.read_bytes, bytes, "read"], [limit.write_bytes, bytes, "written"],
    ].filter(([n]) => n > 0).map(([n, shown, of]) => `${shown(n)} ${of}`.trim());
    return [limit.group === null ? "Disk" : `Group ${limit.group}`, words.length ? words.join(", ") + " per second" : "none"];
  });
}

function newOperation() {
  const block = made("div", "operation");
  block.append(made("b"), made("dl"));
  return block;
}

function showCloser(live) {
  const disk = live.disk;
  hide(get("gone"), disk !== null);
  hide(get("closer-body"), disk === null);
  if (disk === null) return;
  tellFacts(get("facts"), facts(disk));
  tellFacts(get("limits"), limits(disk));
  if (live.seconds !== null) {
    closerHeat.add(live.bounds_ns, live.seconds, disk.reads.map((n, i) => n + disk.writes[i]));
  }
  each(get("operations"), disk.operations, newOperation, (block, op) => {
    put(block.firstChild, op.op);
    const counts = { read: disk.reads, write: disk.writes }[op.op];
    const spread = counts === undefined ? [] : [["Median, p99", [0.5, 0.99].map((share) => quantile(live.bounds_ns, counts, share)).join(", ")]];
    tellFacts(block.lastChild, [
      ["Per second", `${whole(op.ops)}, ${bytes(op.bytes)}`],
      ["Latency", op.mean_ns === null ? "–" : `${time(op.mean_ns)} mean`],
      ...spread,
      ["Total", `${op.ops_ever}; longest ${time(op.max_ns_ever)}`],
      ["Failed", String(op.errors_ever)],
    ]);
    dress(block.lastChild, op.errors_ever > 0 ? "failed" : "");
  });
}

/** Opens the panel with a disk's details, or closes it for null. */
function choose(disk) {
  if (disk !== chosen) closerHeat.clear();
  chosen = disk;
  get("closer").hidden = disk === null;
  document.body.classList.toggle("closer", disk !== null);
  put(get("closer-name"), disk ?? "");
  const hash = disk === null ? "" : "#disk=" + encodeURIComponent(disk);
  if (location.hash !== hash) history.replaceState(null, "", location.pathname + hash);
  if (disk !== null) get("closer").scrollTop = 0;
  for (const row of get("disks").tBodies[0].rows) dress(row, row.cells[0].textContent === disk ? "chosen" : "");
  ask();
}

function show(live) {
  const { total, seconds } = live;
  const known = seconds !== null;
  host = live.host;
  put(get("host"), host);
  put(get("ops"), known ? whole(total.reads + total.writes + total.others) : "–");
  put(get("bytes"), known ? bytes(total.read_bytes + total.write_bytes) : "–");
  put(get("mean"), time(total.mean_ns));
  put(get("in-flight"), whole(total.in_flight));
  put(get("errors"), whole(total.errors_ever));
  put(get("error-rate"), `errors, ${known ? whole(total.errors) : "–"} per second`);
  dress(get("errors"), total.errors_ever > 0 ? "bad" : "");
  if (known) heat.add(live.bounds_ns, seconds, live.latencies);
  each(get("reactors"), live.reactors, newReactor, fillReactor);
  hide(get("groups-section"), live.all_groups === 0);
  each(get("groups").tBodies[0], live.groups, newGroup, fillGroup);
  put(get("groups-shown"), `${live.groups.length} of ${live.all_groups}`);
  showDisks(live);
  if (chosen !== null) showCloser(live);
  put(get("state"), `${count(live.all, "disk")}, ${count(live.vms, "VM")} connected · ${live.version}`);
}

/** Shows the age of the data if it is old. */
function tell() {
  const age = answered === null ? 0 : (performance.now() - answered) / 1000;
  const stale = answered !== null && (refused || age > PATIENCE);
  hide(get("stale"), !stale);
  document.body.classList.toggle("stale", stale);
  const title = (stale ? "No answer – " : "") + (host ? host + " – " : "") + "Aryk";
  if (document.title !== title) document.title = title;
  if (!stale) return;
  const seconds = Math.round(age);
  put(get("age"), seconds < 120 ? count(seconds, "second") : count(Math.floor(seconds / 60), "minute"));
  put(get("state"), "no answer");
}

async function ask() {
  const query = new URLSearchParams({ sort, filter });
  if (chosen !== null) query.set("disk", chosen);
  const asked = query.toString();
  try {
    const reply = await fetch("live.json?" + asked, { cache: "no-store", signal: AbortSignal.timeout(5000) });
    if (!reply.ok) throw new Error(await reply.text());
    const live = await reply.json();
    answered = performance.now();
    refused = false;
    const now = new URLSearchParams({ sort, filter });
    if (chosen !== null) now.set("disk", chosen);
    // The user may have chosen another disk since the request.
    if (now.toString() === asked) show(live);
  } catch {
    refused = true;
    if (answered === null) put(get("state"), "the daemon does not answer");
  }
  tell();
}

async function run() {
  for (;;) {
    if (!document.hidden) await ask();
    await new Promise((done) => setTimeout(done, 1000));
  }
}

/** A column heading; a heading with a key sorts by it. */
function heading(title, where, key) {
  const head = made("th", where);
  head.scope = "col";
  if (!key) {
    head.append(made("span", "", title));
    return head;
  }
  const button = made("button", "", title);
  button.type = "button";
  if (key === sort) head.setAttribute("aria-sort", "descending");
  button.addEventListener("click", () => {
    sort = key;
    for (const other of get("disks").tHead.rows[0].cells) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", key === "name" ? "ascending" : "descending");
    ask();
  });
  head.append(button);
  return head;
}

const heat = new Heat(get("heat"), get("heat-most"));
const closerHeat = new Heat(get("closer-heat"), get("closer-most"));
get("groups").tHead.rows[0].append(...GROUP_COLUMNS.map(([title, , where]) => heading(title, where)));
get("disks").tHead.rows[0].append(...COLUMNS.map(([key, title, , where]) => heading(title, where, key)));
get("filter").addEventListener("input", (event) => { filter = event.target.value; rows = ROWS; ask(); });
get("more").addEventListener("click", () => { rows = Infinity; ask(); });
get("close").addEventListener("click", () => choose(null));
document.addEventListener("keydown", (event) => { if (event.key === "Escape" && chosen !== null) choose(null); });
document.addEventListener("visibilitychange", () => { if (!document.hidden) ask(); });
setInterval(() => { if (!document.hidden) tell(); }, 1000);
if (location.hash.startsWith("#disk=")) choose(decodeURIComponent(location.hash.slice(6)));
run();
