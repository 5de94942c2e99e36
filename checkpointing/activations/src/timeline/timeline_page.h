// The page of write_page; DATA stands for what was recorded.
#pragma once

namespace cairn::checkpointing {

inline constexpr const char* kTimelinePage = R"html(<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Memory over a step</title>
<style>
body { font: 14px/1.4 system-ui, sans-serif; margin: 24px auto; max-width: 1060px; color: #222; }
h1 { font-size: 20px; margin: 0 0 4px; } h2 { font-size: 16px; margin: 28px 0 6px; }
p { margin: 4px 0; color: #555; } svg { display: block; } svg text { font: 12px system-ui, sans-serif; fill: #444; }
table { border-collapse: collapse; margin-top: 6px; } td { padding: 2px 14px 2px 0; } td.n { text-align: right; font-variant-numeric: tabular-nums; }
.key { display: inline-block; width: 11px; height: 11px; border-radius: 2px; margin-right: 6px; }
.legend span.item { margin-right: 16px; white-space: nowrap; }
#tip { position: fixed; display: none; background: #fff; border: 1px solid #bbb; border-radius: 4px; padding: 6px 9px; pointer-events: none;
  box-shadow: 0 2px 8px #0002; font-size: 12px; }
</style></head><body>
<h1 id="title"></h1><p id="facts"></p>
<div class="legend" id="legend"></div>
<div id="chart"></div>
<h2>What the peak holds</h2><p id="peakword"></p><table id="peak"></table>
<h2 id="barsword">Peak of each strategy</h2><div id="bars"></div>
<div id="tip"></div>
<script>
"use strict";
const data = DATA;
const colors = ["#4e79a7", "#f28e2b", "#b07aa1", "#59a14f", "#e15759", "#76b7b2", "#bab0ac"];
const inside = "#8c2d2d";
const words = data.categories.map(c => c.replace("_", " "));
const bytes = b => b >= 1e9 ? (b / 1e9).toFixed(2) + " GB" : b >= 1e6 ? (b / 1e6).toFixed(2) + " MB" : (b / 1e3).toFixed(1) + " kB";
const ms = s => (1e3 * s).toFixed(s < 0.01 ? 2 : 1) + " ms";
const tick = text => text.replace(/\.0+ /, " ");
const safe = t => t.replace(/[&<>"]/g, c => "&#" + c.charCodeAt(0) + ";");
const get = id => document.getElementById(id);
const seconds = r => r.samples[r.samples.length - 1][0];
const used = data.categories.map((_, c) => data.records.some(r => r.samples.some(s => s[1][c] > 0)));
function key(color, text) { return `<span class="item"><span class="key" style="background:${color}"></span>${text}</span>`; }
function contents(r) {  // by category before the peak, and what the operation took beyond
  const before = r.samples[Math.max(0, r.peak - 1)], peak = r.samples[r.peak];
  return { parts: before[1], more: Math.max(0, peak[3] - before[2]), total: peak[3], during: peak[4], at: peak[0] };
}
function step(most) {  // of about five ticks
  const raw = most / 5, unit = Math.pow(10, Math.floor(Math.log10(raw)));
  return [1, 2, 5, 10].map(k => k * unit).find(s => s >= raw);
}
const first = data.records[0], summit = contents(first);
get("title").textContent = `Memory over a step: ${first.name}`;
get("facts").textContent = `${first.device}; peak ${bytes(summit.total)}, ${first.operations.length} operations in ${ms(seconds(first))}`;
get("legend").innerHTML = words.map((w, c) => used[c] ? key(colors[c], w) : "").join("") + key(inside, "peak within an operation");

const W = 1040, H = 340, L = 68, R = 12, T = 10, B = 34;
(function chart() {
  const end = seconds(first), most = 1.06 * summit.total, x = t => L + (W - L - R) * t / end, y = b => H - B - (H - B - T) * b / most;
  let svg = "";
  for (let b = 0, d = step(most); b <= most; b += d)
    svg += `<line x1="${L}" x2="${W - R}" y1="${y(b)}" y2="${y(b)}" stroke="#e4e4e4"/><text x="${L - 8}" y="${y(b) + 4}" text-anchor="end">${b ? tick(bytes(b)) : "0"}</text>`;
  for (let t = 0, d = step(end); t <= end; t += d) svg += `<text x="${x(t)}" y="${H - B + 18}" text-anchor="middle">${tick(ms(t))}</text>`;
  let low = first.samples.map(() => 0);
  data.categories.forEach((_, c) => {
    if (!used[c]) return;
    const high = low.map((l, i) => l + first.samples[i][1][c]);
    let path = "";
    first.samples.forEach((s, i) => { path += (i ? `H${x(s[0]).toFixed(2)}V` : `M${x(s[0]).toFixed(2)},`) + y(high[i]).toFixed(2); });
    for (let i = first.samples.length - 1; i >= 0; --i) {
      path += `${i === first.samples.length - 1 ? "V" : "H" + x(first.samples[i + 1][0]).toFixed(2) + "V"}${y(low[i]).toFixed(2)}`;
    }
    svg += `<path d="${path}H${x(first.samples[0][0]).toFixed(2)}Z" fill="${colors[c]}" fill-opacity="0.85"/>`;
    low = high;
  });
  let line = "";
  first.samples.forEach((s, i) => {
    if (!i) return;
    const a = x(first.samples[i - 1][0]).toFixed(2);
    line += `${i === 1 ? "M" + a + "," : "V"}${y(s[3]).toFixed(2)}H${x(s[0]).toFixed(2)}`;
  });
  svg += `<path d="${line}" fill="none" stroke="${inside}" stroke-width="1"/>`;
  const px = x(summit.at), flip = px > W - 260;
  svg += `<circle cx="${px}" cy="${y(summit.total)}" r="4" fill="${inside}"/><text x="${px + (flip ? -8 : 8)}" y="${y(summit.total) + 4}" text-anchor="${flip ? "end" : "start"}" style="font-weight:600">${bytes(summit.total)}${summit.during ? ", " + safe(summit.during) : ""}</text>`;
  get("chart").innerHTML = `<svg width="${W}" height="${H}" viewBox="0 0 ${W} ${H}">${svg}</svg>`;
  const tip = get("tip");
  get("chart").onmousemove = e => {
    const t = end * (e.clientX - get("chart").getBoundingClientRect().left - L) / (W - L - R);
    let i = first.samples.findIndex(s => s[0] >= t);
    if (t < 0 || i < 1) { tip.style.display = "none"; return; }
    const s = first.samples[i - 1], o = first.operations.filter(p => p[2] <= t && t <= p[3]).pop();
    tip.innerHTML = `<b>${ms(t)}</b> ${o ? safe(o[0]) + ", " + o[1] : "between operations"}<br>` + words.map((w, c) => s[1][c] ? `${key(colors[c], w)} ${bytes(s[1][c])}<br>` : "").join("") + `in all ${bytes(s[2])}, peak ${bytes(first.samples[i][3])}`;
    tip.style.display = "block";
    tip.style.left = Math.min(e.clientX + 14, innerWidth - 240) + "px"; tip.style.top = e.clientY + 14 + "px";
  };
  get("chart").onmouseleave = () => { tip.style.display = "none"; };
})();

get("peakword").textContent = `At ${ms(summit.at)}${summit.during ? ", in " + summit.during : ", between operations"}.`;
get("peak").innerHTML = words.map((w, c) => [w, colors[c], summit.parts[c]]).concat([[`taken by ${summit.during ? safe(summit.during) : "others"} itself`, inside, summit.more]])
  .filter(p => p[2] > 0).sort((a, b) => b[2] - a[2])
  .map(p => `<tr><td>${key(p[1], p[0])}</td><td class="n">${bytes(p[2])}</td><td class="n">${(100 * p[2] / summit.total).toFixed(1)} %</td></tr>`).join("");

(function bars() {
  const all = data.records.map(contents), most = Math.max(...all.map(c => c.total)), row = 30, left = 210, right = 190;
  let svg = "";
  all.forEach((c, i) => {
    const y = i * row + 4, r = data.records[i], scale = (W - left - right) / most;
    let at = left;
    svg += `<text x="${left - 10}" y="${y + 15}" text-anchor="end">${safe(r.name)}</text>`;
    c.parts.concat([c.more]).forEach((b, k) => {
      const color = k < colors.length ? colors[k] : inside;
      svg += `<rect x="${at}" y="${y}" width="${b * scale}" height="${row - 10}" fill="${color}" fill-opacity="0.85"><title>${k < words.length ? words[k] : "the operation itself"}: ${bytes(b)}</title></rect>`;
      at += b * scale;
    });
    svg += `<text x="${at + 8}" y="${y + 15}">${bytes(c.total)}, ${ms(seconds(r))}</text>`;
  });
  get("bars").innerHTML = `<svg width="${W}" height="${all.length * row + 8}">${svg}</svg>`;
  get("barsword").style.display = data.records.length > 1 ? "" : "none";
  get("bars").style.display = data.records.length > 1 ? "" : "none";
})();
</script></body></html>
)html";

}  // namespace cairn::checkpointing
