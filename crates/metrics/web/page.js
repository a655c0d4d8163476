"use strict";
// Asks the daemon once a second, and shows what it says. Names come from others: they become text, never markup.

const COLUMNS = [
  ["name", "Disk", (d) => d.name],
  ["reads", "Reads/s", (d) => whole(d.reads)],
  ["writes", "Writes/s", (d) => whole(d.writes)],
  ["read_bytes", "Read/s", (d) => bytes(d.read_bytes)],
  ["write_bytes", "Written/s", (d) => bytes(d.write_bytes)],
  ["mean_ns", "Latency", (d) => time(d.mean_ns)],
  [null, "Where it goes", layers],
  ["in_flight", "In flight", (d) => whole(d.in_flight)],
  ["errors", "Errors/s", (d) => whole(d.errors)],
];
const GROUP_COLUMNS = [
  ["Group", (g) => g.parent === null ? g.name : `${g.parent} › ${g.name}`],
  ["Disks", (g) => whole(g.disks)],
  ["Operations/s", (g) => whole(g.reads + g.writes + g.others)],
  ["of", (g) => most(g.most_ops, whole)],
  ["Bytes/s", (g) => bytes(g.read_bytes + g.write_bytes)],
  ["of", (g) => most(g.most_bytes, bytes)],
  ["Latency", (g) => time(g.mean_ns)],
  ["Where it goes", layers],
];
const HISTORY = 120;
const SVG = "http://www.w3.org/2000/svg";
const get = (id) => document.getElementById(id);
const heat = [];
let sort = "ops";
let filter = "";

function whole(n) {
  if (n < 10000) return String(n);
  return n < 1e6 ? (n / 1e3).toFixed(1) + "k" : (n / 1e6).toFixed(2) + "M";
}

function bytes(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (n >= 1024 && unit < units.length - 1) { n /= 1024; unit += 1; }
  return n.toFixed(unit && n < 100 ? 1 : 0) + " " + units[unit];
}

/** A limit, if there is one. */
function most(limit, shown) {
  return limit === 0 ? "–" : shown(limit);
}

function time(ns) {
  if (ns === null) return "–";
  if (ns < 1e3) return ns + " ns";
  if (ns < 1e6) return (ns / 1e3).toFixed(ns < 1e4 ? 1 : 0) + " µs";
  return ns < 1e9 ? (ns / 1e6).toFixed(ns < 1e7 ? 1 : 0) + " ms" : (ns / 1e9).toFixed(1) + " s";
}

function drawing(tag, attributes) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

/** Parts of a whole, side by side. */
function strip(parts, label) {
  const svg = drawing("svg", { viewBox: "0 0 100 10", preserveAspectRatio: "none", role: "img", "aria-label": label });
  svg.append(drawing("rect", { class: "track", width: 100, height: 10 }));
  let x = 0;
  for (const [name, share] of parts) {
    svg.append(drawing("rect", { class: name, x, width: Math.max(0, share * 100), height: 10 }));
    x += share * 100;
  }
  const title = drawing("title", {});
  title.textContent = label;
  svg.append(title);
  return svg;
}

function layers(d) {
  const all = d.throttle + d.queue + d.module + d.front_end;
  if (all === 0) return "";
  const parts = [["throttle", d.throttle / all], ["queue", d.queue / all], ["module", d.module / all], ["front-end", d.front_end / all]];
  return strip(parts, parts.map(([name, share]) => `${name} ${Math.round(share * 100)} %`).join(", "));
}

function showReactors(reactors) {
  get("reactors").replaceChildren(...reactors.map((r) => {
    const row = document.createElement("div");
    row.className = "reactor";
    const words = document.createElement("div");
    const left = document.createElement("span");
    left.textContent = `core ${r.core}: ${Math.round(r.busy * 100)} % busy`;
    const right = document.createElement("span");
    right.textContent = `longest turn ${time(r.longest_turn_ns)}`;
    words.append(left, right);
    row.append(words, strip([["busy", r.busy], ["idle", r.idle], ["asleep", r.asleep]], left.textContent));
    return row;
  }));
}

function showGroups(live) {
  get("groups-section").hidden = live.all_groups === 0;
  const rows = live.groups.map((group) => {
    const row = document.createElement("tr");
    for (const [, content] of GROUP_COLUMNS) {
      const cell = document.createElement("td");
      cell.append(content(group));
      row.append(cell);
    }
    return row;
  });
  get("groups").tBodies[0].replaceChildren(...rows);
  get("groups-shown").textContent = `${live.groups.length} of ${live.all_groups}`;
}

function showDisks(live) {
  const rows = live.disks.map((disk) => {
    const row = document.createElement("tr");
    for (const [key, , content] of COLUMNS) {
      const cell = document.createElement("td");
      cell.append(content(disk));
      if (key === "name") cell.title = disk.kind + ": " + disk.name;
      if (key === "errors" && disk.errors > 0) cell.className = "bad";
      row.append(cell);
    }
    return row;
  });
  get("disks").tBodies[0].replaceChildren(...rows);
  get("shown").textContent = `${live.disks.length} of ${live.matching}`;
}

function showHeat(bounds) {
  const canvas = get("heat");
  const cx = canvas.getContext("2d");
  const style = getComputedStyle(document.documentElement);
  const [ink, color] = [style.getPropertyValue("--quiet"), style.getPropertyValue("--accent")];
  cx.clearRect(0, 0, canvas.width, canvas.height);
  const buckets = bounds.length + 1;
  const [left, width] = [52, (canvas.width - 52) / HISTORY];
  const height = canvas.height / buckets;
  const most = Math.max(1, ...heat.flat());
  cx.fillStyle = color;
  heat.forEach((column, i) => column.forEach((count, bucket) => {
    if (count === 0) return;
    cx.globalAlpha = 0.12 + 0.88 * Math.sqrt(count / most);
    cx.fillRect(left + (HISTORY - heat.length + i) * width, canvas.height - (bucket + 1) * height, Math.ceil(width), Math.ceil(height));
  }));
  cx.globalAlpha = 1;
  cx.fillStyle = ink;
  cx.font = "11px system-ui, sans-serif";
  cx.textAlign = "right";
  bounds.forEach((ns, i) => { if (i % 3 === 0) cx.fillText(time(ns), left - 6, canvas.height - (i + 1) * height + 4); });
}

function show(live) {
  const { total } = live;
  get("ops").textContent = whole(total.reads + total.writes + total.others);
  get("bytes").textContent = bytes(total.read_bytes + total.write_bytes);
  get("mean").textContent = time(total.mean_ns);
  get("in-flight").textContent = whole(total.in_flight);
  get("errors").textContent = whole(total.errors);
  heat.push(live.latencies);
  if (heat.length > HISTORY) heat.shift();
  showHeat(live.bounds_ns);
  showReactors(live.reactors);
  showGroups(live);
  showDisks(live);
  get("state").textContent = `${count(live.all, "disk")}, ${count(live.machines, "machine")} connected`;
  get("state").className = "";
}

function count(n, of) {
  return `${n} ${of}${n === 1 ? "" : "s"}`;
}

async function ask() {
  try {
    const query = new URLSearchParams({ sort, filter });
    const reply = await fetch("live.json?" + query, { cache: "no-store", signal: AbortSignal.timeout(5000) });
    if (!reply.ok) throw new Error(await reply.text());
    show(await reply.json());
  } catch (error) {
    get("state").textContent = "the daemon does not answer";
    get("state").className = "bad";
  }
}

async function run() {
  for (;;) {
    if (!document.hidden) await ask();
    await new Promise((done) => setTimeout(done, 1000));
  }
}

/** A heading that does nothing. */
function heading(title) {
  const head = document.createElement("th");
  head.scope = "col";
  const words = document.createElement("button");
  words.disabled = true;
  words.textContent = title;
  head.append(words);
  return head;
}

get("groups").tHead.rows[0].append(...GROUP_COLUMNS.map(([title]) => heading(title)));
for (const [key, title] of COLUMNS) {
  const head = key === null ? heading(title) : document.createElement("th");
  head.scope = "col";
  if (key !== null) {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = title;
    button.addEventListener("click", () => {
      sort = key;
      for (const other of get("disks").tHead.rows[0].cells) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", key === "name" ? "ascending" : "descending");
      ask();
    });
    head.append(button);
  }
  get("disks").tHead.rows[0].append(head);
}
get("filter").addEventListener("input", (event) => { filter = event.target.value; ask(); });
run();
