// The page of report.html, in parts: what draws, what is drawn of one run, and how it stays fresh.
// DATA stands for what is known of the run.
#pragma once

namespace cairn::observe {

inline constexpr const char* kPageHead = R"html(<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1"><title>Run</title>
<style>
:root { color-scheme: light dark; --ink: #1d2433; --soft: #667085; --line: #e4e7ec; --card: #fff;
  --page: #f5f6f8; --bad: #c8372d; --c0: #3566c9; --c1: #dd8412; --c2: #2f9461; --c3: #a44fa5;
  --c4: #1795a3; --c5: #c9556b; --c6: #84702c; --c7: #7b8494; }
@media (prefers-color-scheme: dark) { :root { --ink: #e7e9ef; --soft: #98a2b3; --line: #2b3240;
  --card: #171b23; --page: #0e1116; --bad: #f2776b; --c0: #7aa2f7; --c1: #f0a94f; --c2: #6cc893;
  --c3: #d58fd6; --c4: #5cc5d0; --c5: #f08aa0; --c6: #c8b06a; --c7: #a2abba; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 14px/1.45 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; }
main { max-width: 1480px; margin: 0 auto; padding: 20px 16px 48px; }
h1 { font-size: 20px; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 14px; margin: 0 0 8px; font-weight: 600; }
header { display: flex; flex-wrap: wrap; gap: 4px 16px; align-items: baseline; }
.soft { color: var(--soft); } .bad { color: var(--bad); }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(132px, 1fr)); gap: 10px;
  margin: 14px 0; }
.tile, .card { background: var(--card); border: 1px solid var(--line); border-radius: 8px; }
.tile { padding: 8px 12px; } .tile b { display: block; font-size: 18px; font-weight: 600;
  font-variant-numeric: tabular-nums; white-space: nowrap; }
.grid { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr));
  gap: 14px; grid-auto-flow: dense; }
.card { padding: 12px 14px; min-width: 0; } .wide { grid-column: 1 / -1; }
pre { margin: 0; font: 12px/1.4 ui-monospace, "DejaVu Sans Mono", monospace; }
.picture { display: block; max-width: 100%; image-rendering: pixelated; }
.scroll { overflow-x: auto; max-height: 420px; }
svg { display: block; width: 100%; overflow: visible; touch-action: pan-y; }
svg text { font-size: 11px; fill: var(--soft); font-variant-numeric: tabular-nums; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 14px; margin-bottom: 6px; font-size: 12px; }
.key { display: inline-block; width: 10px; height: 10px; border-radius: 2px; margin-right: 5px; }
table { border-collapse: collapse; width: 100%; font-size: 13px; }
td, th { padding: 3px 14px 3px 0; text-align: left; vertical-align: top; white-space: nowrap; }
td:last-child { white-space: normal; overflow-wrap: anywhere; min-width: 180px; }
th { color: var(--soft); font-weight: 400; }
ul { margin: 0; padding-left: 18px; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; min-width: 0; }
tr + tr td { border-top: 1px solid var(--line); }
#tip { position: fixed; display: none; z-index: 1; pointer-events: none; background: var(--card);
  border: 1px solid var(--line); border-radius: 6px; padding: 6px 10px; font-size: 12px;
  max-width: 320px; box-shadow: 0 3px 12px #0003; font-variant-numeric: tabular-nums; }
</style></head><body><main>
<header><h1 id="name"></h1><span id="state" class="soft"></span></header>
<div id="warnings" class="bad"></div>
<div id="tiles" class="tiles"></div>
<div id="grid" class="grid"></div>
</main><div id="tip"></div>
<script id="data" type="application/json">DATA</script>
<script>
"use strict";
const run = JSON.parse(document.getElementById("data").textContent);
const get = id => document.getElementById(id);
const color = i => `var(--c${i % 8})`;
const safe = t => String(t).replace(/[&<>"']/g, c => "&#" + c.charCodeAt(0) + ";");
const key = (c, text) => `<span><span class="key" style="background:${c}"></span>${text}</span>`;
// A point is [step, value], or of several steps [step, mean, low, high, count, not finite].
const curvesOf = of => new Map(of.curves.map(c => [c.name, c.points.map(p => p.length === 2
  ? { x: p[0], y: p[1], low: p[1], high: p[1], count: 1, bad: p[1] === null ? 1 : 0 }
  : { x: p[0], y: p[1], low: p[2], high: p[3], count: p[4], bad: p[5] })]));
const curves = curvesOf(run);
const last = name => { const c = curves.get(name); return c && c[c.length - 1].y; };

// Numbers.
const trim = t => t.includes(".") && !t.includes("e") ? t.replace(/\.?0+$/, "") : t;
const whole = n => Math.round(n).toString().replace(/\B(?=(\d{3})+$)/g, ",");
function plain(v) {
  if (v === null || v === undefined) return "not finite";
  const size = Math.abs(v);
  if (v !== 0 && (size < 1e-4 || size >= 1e9)) return v.toExponential(2).replace(/\.?0+e/, "e");
  return size >= 1e4 || size >= 1e3 && Number.isInteger(v) ? whole(v) : trim(v.toPrecision(4));
}
const units = {
  plain: [[1, ""]],
  bytes: [" B", " KiB", " MiB", " GiB", " TiB"].map((name, i) => [1024 ** i, name]),
  seconds: [[1e-6, " µs"], [1e-3, " ms"], [1, " s"], [60, " min"], [3600, " h"]],
};
const unit = (kind, most) =>
  units[kind].filter(u => u[0] <= Math.abs(most)).pop() || units[kind][0];
function show(kind, v) {
  if (kind === "plain" || v === null || v === undefined) return plain(v);
  const [size, name] = unit(kind, v);
  return (v / size < 1e4 ? trim((v / size).toPrecision(3)) : whole(v / size)) + name;
}
const percent = share => (100 * share).toFixed(1) + " %";
function span(seconds) {
  const s = Math.max(0, Math.round(seconds)), h = Math.floor(s / 3600), m = Math.floor(s / 60) % 60;
  return h ? `${h} h ${m} min` : m ? `${m} min ${s % 60} s` : `${s} s`;
}
function ticks(low, high, about) {
  const raw = Math.max(high - low, 1e-12) / about, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map(k => k * power).find(s => s >= raw * 0.999);
  const all = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; ++i)
    all.push(i * step);
  return all;
}

// A chart: {title, kind, series: [{name, points}], stacked, powers, marks: [{x, text, kind}]}.
const charts = [];
const markKinds = [["skip", "skipped steps", "var(--bad)"], ["restart", "restarts", "var(--ink)"],
  ["save", "saves", "var(--soft)"]];
function card(title, wide) {
  const box = document.createElement("section");
  box.className = "card" + (wide ? " wide" : "");
  box.innerHTML = `<h2>${safe(title)}</h2>`;
  get("grid").append(box);
  return box;
}
function chart(spec) {
  const box = card(spec.title, spec.wide), area = document.createElement("div");
  const many = spec.series.length > 1;
  const marked = markKinds.filter(([kind]) => (spec.marks || []).some(m => m.kind === kind));
  if (many || marked.length) {
    box.insertAdjacentHTML("beforeend", `<div class="legend">` +
      (many ? spec.series.map((s, i) => key(color(i), safe(s.name))).join("") : "") +
      marked.map(([, name, c]) => key(c, name)).join("") + `</div>`);
  }
  box.append(area);
  charts.push(() => draw(area, spec));
  return box;
}
function range(spec) {
  let low = Infinity, high = -Infinity;
  for (const s of spec.series) for (const p of s.points) {
    if (p.y === null) continue;
    low = Math.min(low, spec.stacked ? 0 : p.low);
    high = Math.max(high, spec.stacked ? p.top : p.high);
  }
  if (low > high) return [0, 1];
  if (spec.capped) {  // a first step that takes long hides no other
    const tops = spec.series.flatMap(s => s.points.map(p => p.high)).sort((a, b) => a - b);
    high = Math.min(high, 3 * tops[Math.floor(0.95 * tops.length)]);
  }
  if (spec.powers) return [Math.floor(Math.log2(low)) - 1, Math.ceil(Math.log2(high)) + 1];
  if (low >= 0 && low < 0.5 * high) low = 0;
  const margin = low === high ? 0.1 * Math.abs(low) || 1 : 0.05 * (high - low);
  return [low === 0 ? 0 : low - margin, high + margin];
}
function draw(area, spec) {
  const W = Math.max(240, area.clientWidth), H = spec.wide ? 260 : 200, R = 8, T = 8, B = 22;
  const xs = spec.series.flatMap(s => [s.points[0].x, s.points[s.points.length - 1].x]);
  const [low, high] = range(spec), first = Math.min(...xs), end = Math.max(...xs, first + 1);
  const [size, suffix] = spec.powers ? [1, ""] : unit(spec.kind, high);
  const rows = ticks(low / size, high / size, 5).filter(t => !spec.powers || Number.isInteger(t));
  const label = t => (spec.powers ? plain(2 ** t) : plain(t * 1)) + suffix;
  const L = 12 + 6.6 * Math.max(...rows.map(t => label(t).length));
  const x = s => L + (W - L - R) * (s - first) / (end - first);
  const up = v => spec.powers ? Math.log2(v) : v;
  const y = v => Math.max(T, H - B - (H - B - T) * (up(v) - low) / (high - low));
  const at = (p, v) => `${x(p.x).toFixed(1)},${y(v).toFixed(1)}`;
  let svg = "";
  for (const t of rows) {
    const h = (H - B - (H - B - T) * (t * size - low) / (high - low)).toFixed(1);
    svg += `<line x1="${L}" x2="${W - R}" y1="${h}" y2="${h}" stroke="var(--line)"/>` +
      `<text x="${L - 6}" y="${+h + 4}" text-anchor="end">${label(t)}</text>`;
  }
  for (const t of ticks(first, end, W / 110).filter(Number.isInteger))
    svg += `<text x="${x(t)}" y="${H - 5}" text-anchor="middle">${whole(t)}</text>`;
  for (const m of spec.marks || []) {
    if (m.x < first || m.x > end) continue;
    const c = markKinds.find(([kind]) => kind === m.kind)[2];
    const from = m.kind === "save" ? H - B - 6 : T;
    svg += `<line data-mark="${m.kind}" x1="${x(m.x)}" x2="${x(m.x)}" y1="${from}" y2="${H - B}" ` +
      `stroke="${c}" ${m.kind === "skip" ? 'stroke-dasharray="3 3"' : 'stroke-width="1.5"'}/>`;
  }
  spec.series.forEach((s, i) => {
    const ok = s.points.filter(p => p.y !== null), c = color(spec.series.length > 1 ? i : 0);
    const curve = `class="curve" data-name="${safe(s.name)}"`;
    for (const p of s.points.filter(q => q.bad))
      svg += `<path d="M${x(p.x)},${H - B}l-4,-7h8z" fill="var(--bad)"/>`;
    if (!ok.length) return;
    if (spec.stacked) {
      svg += `<path ${curve} d="M${ok.map(p => at(p, p.top)).join("L")}L` +
        `${ok.map(p => at(p, p.base)).reverse().join("L")}Z" fill="${c}" fill-opacity="0.85"/>`;
      return;
    }
    if (ok.some(p => p.low !== p.high))
      svg += `<path d="M${ok.map(p => at(p, p.high)).join("L")}L` +
        `${ok.map(p => at(p, p.low)).reverse().join("L")}Z" fill="${c}" fill-opacity="0.18"/>`;
    const raw = `M${ok.map(p => at(p, p.y)).join("L")}`, calm = spec.smooth && ok.length > 60;
    svg += `<path ${curve} d="${raw}" fill="none" stroke="${c}" stroke-width="${calm ? 1 : 1.6}" ` +
      `stroke-opacity="${calm ? 0.35 : 1}" stroke-linejoin="round"/>`;
    if (ok.length === 1) svg += `<circle cx="${x(ok[0].x)}" cy="${y(ok[0].y)}" r="3" fill="${c}"/>`;
    if (calm) svg += `<path d="M${smooth(ok).map(p => at(p, p.y)).join("L")}" fill="none" ` +
      `stroke="${c}" stroke-width="2" stroke-linejoin="round"/>`;
  });
  svg += `<line class="hair" y1="${T}" y2="${H - B}" stroke="var(--soft)" visibility="hidden"/>`;
  area.innerHTML = `<svg viewBox="0 0 ${W} ${H}" height="${H}" role="img">${svg}</svg>`;
  const hair = area.querySelector(".hair"), tip = get("tip");
  const steps = spec.series[0].points.map(p => p.x);
  area.onpointermove = e => {
    const box = area.getBoundingClientRect(), t = (e.clientX - box.left) * W / box.width;
    const step = nearest(steps, first + (t - L) / (W - L - R) * (end - first));
    hair.setAttribute("x1", x(step)), hair.setAttribute("x2", x(step));
    hair.setAttribute("visibility", "visible");
    tip.innerHTML = readout(spec, step), tip.style.display = "block";
    tip.style.left = Math.max(4, Math.min(e.clientX + 14, innerWidth - tip.offsetWidth - 6)) + "px";
    tip.style.top = Math.min(e.clientY + 14, innerHeight - tip.offsetHeight - 6) + "px";
  };
  area.onpointerleave = () => {
    hair.setAttribute("visibility", "hidden"), tip.style.display = "none";
  };
}
// The mean of the neighbours on both sides; at the beginning, which is steep, of fewer.
function smooth(points) {
  const wide = Math.max(4, Math.round(points.length / 50)), sums = [0];
  for (const p of points) sums.push(sums[sums.length - 1] + p.y);
  return points.map((p, i) => {
    const near = Math.min(wide, i), from = i - near, to = Math.min(points.length, i + near + 1);
    return { x: p.x, y: (sums[to] - sums[from]) / (to - from) };
  });
}
function nearest(steps, at) {
  let a = 0, b = steps.length - 1;
  while (b - a > 1) { const m = (a + b) >> 1; if (steps[m] < at) a = m; else b = m; }
  return Math.abs(steps[a] - at) < Math.abs(steps[b] - at) ? steps[a] : steps[b];
}
function readout(spec, step) {
  let text = `<b>step ${whole(step)}</b>`, many = false, steps = 1;
  spec.series.forEach((s, i) => {
    const p = s.points.find(q => spec.apart ? q.x >= step : q.x === step);
    if (!p) return;
    steps = Math.max(steps, p.count || 1);
    const name = spec.series.length > 1 ? key(color(i), safe(s.name)) + " " : "";
    text += `<br>${name}${show(spec.kind, spec.stacked ? p.top - p.base : p.y)}`;
    const ends = [p.low, p.high].map(v => show(spec.kind, v));
    if (p.low !== p.high && !spec.stacked)
      text += ` <span class="soft">(${ends.join(" to ")})</span>`;
    many = many || p.count > 1;
  });
  for (const m of spec.marks || [])
    if (m.x > step - steps && m.x <= step) text += `<br>${safe(m.text)}`;
  return text + (many ? `<br><span class="soft">mean of the steps up to it</span>` : "");
}
// Series upon each other, by the points of the first; `value(point, point of the first)`.
function stack(names, base, value) {
  const low = new Map(base.map(p => [p.x, 0]));
  return names.map(([name, points]) => {
    const at = new Map(points.map(p => [p.x, p]));
    return { name, points: base.map(p => {
      const own = at.get(p.x), from = low.get(p.x), top = from + (own ? value(own, p) : 0);
      low.set(p.x, top);
      return { x: p.x, y: top, base: from, top, low: from, high: top, count: p.count, bad: 0 };
    }) };
  });
}
)html";

inline constexpr const char* kRunScript = R"html(
// The page from above: what it is, is it learning, is it fast, is it about to fall over.
document.title = run.name;
get("name").textContent = run.name + (run.ranks < 2 ? "" : run.rank === 0
  ? `, ${run.ranks} ranks` : `, rank ${run.rank} of ${run.ranks}`);
const warnings = [];
if (run.failures) warnings.push("Not written: " + run.failures);
if (run.dropped) warnings.push(`${whole(run.dropped)} records were told too fast and dropped.`);
if (run.too_many_names) warnings.push("There are more names than curves.");
get("warnings").textContent = warnings.join(" ");
const skips = run.events.filter(e => e[2] === "skip" || e[2] === "overflow");
const marksOf = (event, kind) => run.events.filter(e => e[2] === event)
  .map(e => ({ x: e[1], text: `${kind}: ${e[3]}`, kind }));
const turns = [...marksOf("checkpoint", "save"), ...marksOf("restart", "restart")];
const marks = [...marksOf("skip", "skip"), ...turns];
const partName = n => n === "wait" ? "waiting for ranks" : n;
const speed = run.curves.map(c => c.name).find(n => n.endsWith("_per_second"));
const words = n => n.replace(/_per_second$/, " per second").replace(/_/g, " ");
const known = [["loss", "Loss"], ["accuracy", "Accuracy"], ["lr", "Learning rate"],
  ["loss_scale", "Loss scale"], ["gradient_norm", "Gradient norm"],
  ["machine_share", "Share of the machine's limit"]];

const tile = (name, text) => `<div class="tile"><span class="soft">${safe(name)}</span>` +
  `<b>${safe(text)}</b></div>`;
let tiles = tile("step", whole(run.step));
for (const name of ["loss", "accuracy", "lr", "loss_scale", "gradient_norm"])
  if (curves.has(name)) tiles += tile(words(name), plain(last(name)));
if (speed) tiles += tile(words(speed), plain(last(speed)));
if (curves.has("seconds/step")) tiles += tile("step's time", show("seconds", last("seconds/step")));
if (curves.has("memory/peak")) tiles += tile("peak memory", show("bytes", last("memory/peak")));
tiles += tile("skipped steps", whole(run.counts.skip));
if (run.counts.restart) tiles += tile("restarts", whole(run.counts.restart));
if (run.slowest >= 0) tiles += tile("slowest", "rank " + run.slowest);
for (const [name, value] of run.summary)
  if (!curves.has(name)) tiles += tile(words(name), plain(value));
get("tiles").innerHTML = tiles;

if (run.advice.length)
  card("Advice", true).insertAdjacentHTML("beforeend",
    `<ul>${run.advice.map(t => `<li>${safe(t)}</li>`).join("")}</ul>`);

const done = new Set();
for (const [name, title] of known) {
  if (!curves.has(name)) continue;
  done.add(name);
  const points = curves.get(name), positive = points.every(p => p.y === null || p.low > 0);
  chart({ title, kind: "plain", series: [{ name, points }],
    smooth: name !== "lr" && name !== "loss_scale",
    powers: name === "loss_scale" && positive, wide: name === "loss",
    marks: name === "loss_scale" || name === "loss" ? marks : [] });
}
for (const c of run.curves) {
  if (done.has(c.name) || /^(seconds|memory)\//.test(c.name)) continue;
  const title = words(c.name);
  chart({ title: title[0].toUpperCase() + title.slice(1), kind: "plain", smooth: true,
    series: [{ name: c.name, points: curves.get(c.name) }] });
}

const steps = curves.get("seconds/step");
const parts = run.curves.filter(c => c.name.startsWith("seconds/") && c.name !== "seconds/step")
  .map(c => [partName(c.name.slice(8)), curves.get(c.name)]);
const sum = points => points.reduce((all, p) => all + (p.y || 0) * (p.count - p.bad), 0);
if (steps) {
  // A part's points have its steps' counts: a save is not in each.
  const series = parts.length ? stack(parts, steps, (p, s) => p.y * p.count / s.count)
    : [{ name: "step", points: steps }];
  if (parts.length) {
    const top = series[series.length - 1].points;
    series.push({ name: "the rest", points: steps.map((p, i) => ({ ...p, base: top[i].top,
      top: Math.max(top[i].top, p.y), y: p.y })) });
  }
  const box = chart({ title: "Where a step's time goes", kind: "seconds", series,
    stacked: parts.length > 0, capped: true, marks: turns });
  if (parts.length) {
    const counted = steps.reduce((a, p) => a + p.count, 0);
    const all = sum(steps), shares = parts.map(([name, points]) => [name, sum(points) / all]);
    shares.push(["the rest", Math.max(0, 1 - shares.reduce((a, s) => a + s[1], 0))]);
    box.insertAdjacentHTML("beforeend", `<table>` + shares.map(([name, share], i) =>
      `<tr><td>${key(color(i), safe(name))}</td><td class="n">${percent(share)}</td>` +
      `<td class="n">${show("seconds", share * all / counted)} a step` +
      `</td></tr>`).join("") + `</table>`);
  }
}
if (run.side_by_side.length > 1) ranks();
const memory = run.curves.filter(c => c.name.startsWith("memory/") && c.name !== "memory/peak")
  .map(c => [c.name.slice(7), curves.get(c.name)]).filter(([, p]) => p.some(q => q.high > 0));
if (memory.length) {
  const box = chart({ title: "Memory by category", kind: "bytes", stacked: true,
    series: stack(memory.map(([n, p]) => [words(n), p]), memory[0][1], p => p.y) });
  const most = new Map(run.most_memory.values.map(([n, v]) => [n.slice(7), v]));
  const all = [...most.values()].reduce((a, b) => a + b, 0);
  box.insertAdjacentHTML("beforeend", `<table><tr><th>the most seen, at step ` +
    `${whole(run.most_memory.step)}</th><th class="n">${show("bytes", all)}</th><th></th></tr>` +
    memory.map(([n], i) => `<tr><td>${key(color(i), safe(words(n)))}</td>` +
      `<td class="n">${show("bytes", most.get(n))}</td>` +
      `<td class="n">${percent(most.get(n) / all)}</td></tr>`).join("") + `</table>`);
}

for (const image of run.images) {  // small ones in pixels that can be seen
  const zoom = Math.max(1, Math.min(4, Math.floor(480 / image.width)));
  card(`${image.name}, at step ${whole(image.step)}`).insertAdjacentHTML("beforeend",
    `<img class="picture" alt="${safe(image.name)}" style="width:${zoom * image.width}px" ` +
    `src="data:image/png;base64,${image.png}">`);
}
for (const text of run.texts) {
  const box = card(`${text.name}, at step ${whole(text.step)}`, true);
  box.classList.add("scroll");
  box.insertAdjacentHTML("beforeend", `<pre>${safe(text.text)}</pre>`);
}
if (run.layers.length) layers();
function rows(box, head, lines) {
  box.classList.add("scroll");
  box.insertAdjacentHTML("beforeend", `<table><tr>${head.map(h => `<th>${h}</th>`).join("")}</tr>` +
    lines.map(l => `<tr>${l.map(t => `<td>${safe(t)}</td>`).join("")}</tr>`).join("") + `</table>`);
}
if (skips.length) {
  const by = new Map();
  for (const e of skips) by.set(e[4] || e[3], [...(by.get(e[4] || e[3]) || []), e]);
  rows(card("Skipped steps, by culprit"), ["culprit", "times", "last"],
    [...by].sort((a, b) => b[1].length - a[1].length).map(([name, all]) => {
      const e = all[all.length - 1];
      return [name, whole(all.length), `step ${whole(e[1])}: ${e[3]}`];
    }));
}
if (turns.length) {
  const saves = run.events.filter(e => e[2] === "checkpoint"), end = saves[saves.length - 1];
  const took = parts.find(([name]) => name === "save");
  const box = card("Saves and restarts");
  rows(box, ["step", "what", ""], [
    ...(end ? [[whole(end[1]), "last save", `${whole(run.counts.checkpoint)} in all` + (took
      ? `, ${show("seconds", sum(took[1]) / run.counts.checkpoint)} each` : "")]] : []),
    ...run.events.filter(e => e[2] === "restart").reverse()
      .map(e => [whole(e[1]), "restart", e[3]])]);
}
if (run.events.length) {  // those of earlier processes too
  const began = Math.min(run.started, run.events[0][0]);
  rows(card("Events"), ["step", "after", "what", ""],
    run.events.slice().reverse().map(e => [whole(e[1]), span(e[0] - began), e[2], e[3]]));
}
rows(card("About"), ["", ""], run.about);

// The file is written anew while the run goes on: so is this page, unless somebody reads a value.
const stale = () => Date.now() / 1000 - run.renewed > 60 + 20 * run.every;
function say() {
  const for_ = span(run.renewed - run.started), ago = span(Date.now() / 1000 - run.renewed);
  get("state").textContent = !run.running ? `ended after ${for_}`
    : stale() ? `no news for ${ago}: ended without a word?` : `running for ${for_}, ${ago} ago`;
  get("state").className = run.running && stale() ? "bad" : "soft";
}
say();
if (run.running) {
  setInterval(say, 1000);
  const again = () => {
    if (get("tip").style.display === "block" || document.hidden) setTimeout(again, 500);
    else location.reload();
  };
  setTimeout(again, 1000 * (stale() ? 30 : Math.max(1, run.every)));
}
)html";

inline constexpr const char* kPageEnd = R"html(
const redraw = () => charts.forEach(f => f());
redraw();
let width = innerWidth;
addEventListener("resize", () => { if (width !== innerWidth) width = innerWidth, redraw(); });
</script></body></html>
)html";

}  // namespace cairn::observe
