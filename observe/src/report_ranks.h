// The page's part on the ranks of a job, side by side.
#pragma once

namespace cairn::observe {

inline constexpr const char* kRanksScript = R"html(
function ranks() {
  const all = run.side_by_side, steps = s => s.own + s.wait, time = v => show("seconds", v);
  const slow = all.find(s => s.rank === run.slowest);
  // A chart has eight colours: of more ranks it shows those that take longest.
  const shown = all.slice().sort((a, b) => b.own - a.own).slice(0, 8)
    .sort((a, b) => a.rank - b.rank);
  const series = shown.filter(s => s.points.length).map(s => ({ name: "rank " + s.rank,
    points: s.points.map(([x, y]) => ({ x, y, low: y, high: y, count: 1, bad: 0 })) }));
  const box = series.length ? chart({ title: "Each rank's own time a step, without waiting",
    kind: "seconds", series, capped: true, apart: true, wide: true, marks: turns })
    : card("Ranks", true);
  const others = all.filter(s => s !== slow).sort((a, b) => a.own - b.own);
  const other = others[Math.floor(others.length / 2)];
  if (slow) box.insertAdjacentHTML("beforeend", `<p class="bad">Rank ${slow.rank} is the ` +
    `slowest: ${time(slow.own)} of its own a step, where the others take ` +
    `${time(other.own)} and wait ${percent(other.wait / steps(other))} of a step.</p>`);
  const table = document.createElement("div");
  box.append(table);
  rows(table, ["rank", "own time", "waits", "peak memory", "step", "where"], all.map(s => [
    s.rank + (s === slow ? ", the slowest" : ""), time(s.own),
    `${time(s.wait)}, ${percent(s.wait / (steps(s) || 1))}`, show("bytes", s.memory), whole(s.step),
    s.where + (s.running && run.renewed - s.renewed > 60 + 20 * run.every
      ? `; no news for ${span(run.renewed - s.renewed)}` : "")]));
  const missing = run.ranks - all.length;
  if (missing) box.insertAdjacentHTML("beforeend",
    `<p class="bad">${missing} of ${run.ranks} ranks have told nothing.</p>`);
}
)html";

}  // namespace cairn::observe
