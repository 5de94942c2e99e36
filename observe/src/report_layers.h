// What the page has of weights and gradients: how they are distributed, and how far each largest
// gradient is from what its dtype can hold.
#pragma once

namespace cairn::observe {

inline constexpr const char* kLayersScript = R"html(
// Counts by power of two, the higher the more; a count of one can be seen.
function octaves([first, counts], c) {
  if (!counts.length) return "";
  const most = Math.max(...counts), W = 132, H = 26, wide = W / Math.max(16, counts.length);
  const bars = counts.map((n, i) => n === 0 ? "" : `<rect x="${(i * wide).toFixed(1)}" ` +
    `y="${(H - 1 - (H - 1) * n / most).toFixed(1)}" width="${Math.max(1, wide - 1).toFixed(1)}" ` +
    `height="${(1 + (H - 1) * n / most).toFixed(1)}" fill="${c}"/>`).join("");
  const power = i => `2<sup>${i}</sup>`;
  return `<svg class="octaves" viewBox="0 0 ${W} ${H}" style="width:${W}px" height="${H}">${bars}` +
    `</svg><span class="soft">${power(first)} to ${power(first + counts.length)}</span>`;
}
function layers() {
  const overflows = new Map();
  for (const e of run.events)
    if (e[2] === "skip" || e[2] === "overflow") overflows.set(e[4], (overflows.get(e[4]) || 0) + 1);
  const newest = Math.max(...run.layers.map(l => l.step));
  const box = card(`Weights and gradients, at step ${whole(newest)}`, true);
  const bits = (b, none) => b === null ? none : b < 0 ? '<span class="bad">overflow</span>'
    : b.toFixed(1);
  const line = l => `<tr data-layer="${safe(l.name)}"><td>${safe(l.name)}</td>` +
    `<td>${octaves(l.weights, color(0))}</td><td>${octaves(l.gradients, color(1))}</td>` +
    `<td class="n">${l.seen ? plain(l.largest) : "–"}</td>` +
    `<td class="n">${l.seen ? bits(l.bits, "all") + " of " + l.dtype : "–"}</td>` +
    `<td class="n">${l.seen ? bits(l.least_bits, "all") : "–"}</td>` +
    `<td class="n">${l.least_step ? "at step " + whole(l.least_step) : ""}</td>` +
    `<td class="n">${whole(overflows.get(l.name) || 0)}</td></tr>`;
  box.classList.add("scroll");
  box.insertAdjacentHTML("beforeend", `<table><tr><th></th><th>weights</th><th>gradients</th>` +
    `<th class="n">largest gradient</th><th class="n">bits left</th>` +
    `<th class="n" colspan="2">least left</th><th class="n">overflows</th></tr>` +
    run.layers.map(line).join("") + `</table>`);
}
)html";

}  // namespace cairn::observe
