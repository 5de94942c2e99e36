// The page that compares runs: their curves over one another, and what differs.
#pragma once

namespace cairn::observe {

inline constexpr const char* kComparisonScript = R"html(
const runs = run.runs.map(r => ({ ...r, curves: curvesOf(r) }));
const words = n => n.replace(/^(seconds|memory)\//, "").replace(/_/g, " ");
document.title = "Runs compared";
get("name").textContent = runs.map(r => r.name).join(" · ");
get("state").textContent = runs.some(r => r.running)
  ? "some still ran when this was written" : "all have ended";

const end = (r, name) => { const c = r.curves.get(name); return c && c[c.length - 1].y; };
const middle = (r, name) => {  // of the later half
  const c = (r.curves.get(name) || []).map(p => p.y);
  const late = c.slice(Math.floor(c.length / 2)).sort((a, b) => a - b);
  return late[Math.floor(late.length / 2)];
};
const or = (v, text) => v === undefined ? "–" : text(v);
function table(title, head, lines) {
  const box = card(title, true);
  box.classList.add("scroll");
  const cells = (tag, line) => line.map(t => `<${tag}>${safe(t)}</${tag}>`).join("");
  box.insertAdjacentHTML("beforeend", `<table><tr>${cells("th", head)}</tr>` +
    lines.map(line => `<tr>${cells("td", line)}</tr>`).join("") + `</table>`);
  return box;
}
const totals = [...new Set(runs.flatMap(r => r.summary.map(([name]) => name)))]
  .filter(name => name !== "steps" && !runs.some(r => r.curves.has(name)));
table("In numbers", ["", ...runs.map(r => r.name)], [
  ["steps", ...runs.map(r => whole(r.step))],
  ...["loss", "accuracy"].filter(n => runs.some(r => r.curves.has(n)))
    .map(n => ["last " + n, ...runs.map(r => or(end(r, n), plain))]),
  ...totals.map(n => [words(n), ...runs.map(r => or((r.summary.find(s => s[0] === n) || [])[1],
    plain))]),
  ["a step's time", ...runs.map(r => or(middle(r, "seconds/step"), v => show("seconds", v)))],
  ["peak memory", ...runs.map(r => or(end(r, "memory/peak"), v => show("bytes", v)))],
  ["skipped steps", ...runs.map(r => whole(r.counts.skip))],
  ["ranks", ...runs.map(r => whole(r.ranks))],
]);

const known = ["loss", "accuracy", "lr", "loss_scale", "gradient_norm"];
const names = [...new Set([...known, ...runs.flatMap(r => [...r.curves.keys()])])];
for (const name of names) {
  const inner = /^(seconds|memory)\//.test(name);
  if (inner && name !== "seconds/step" && name !== "memory/peak") continue;
  const series = runs.filter(r => r.curves.has(name))
    .map(r => ({ name: r.name, points: r.curves.get(name) }));
  if (!series.length) continue;
  const title = { lr: "Learning rate", "seconds/step": "A step's time",
    "memory/peak": "Peak memory" }[name];
  chart({ title: title || words(name)[0].toUpperCase() + words(name).slice(1), series,
    kind: inner ? name.split("/")[0].replace("memory", "bytes") : "plain", apart: true,
    smooth: !inner && name !== "lr" && name !== "loss_scale", capped: name === "seconds/step",
    wide: name === "loss" });
}

const about = runs.map(r => new Map(r.about));
const differs = [...new Set(about.flatMap(a => [...a.keys()]))]
  .filter(what => new Set(about.map(a => a.get(what))).size > 1);
if (differs.length) table("What differs", ["", ...runs.map(r => r.name)],
  differs.map(what => [what, ...about.map(a => or(a.get(what), t => t))]));
)html";

}  // namespace cairn::observe
