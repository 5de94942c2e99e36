"""Draws what recompute_works curve has measured: a step's time against its peak, as an SVG."""
import statistics

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 430, 64, 20, 44, 52
PLANNER, SEGMENTS, HALVES, INK, GRID = "#1f5fa8", "#c2571a", "#5d8a3a", "#333333", "#e3e3e3"


def ticks(low, high, count):
    raw = (high - low) / count
    unit = next(size for size in (m * 10**e for e in range(-3, 6) for m in (1, 2, 5)) if size >= raw)
    first = int(-(-low // unit))
    return [round(k * unit, 6) for k in range(first, int(high // unit) + 1)]


def draw(found):
    """The SVG's text. Peaks in MB; times over those of plain training in the same run."""
    plain = statistics.median(found["plain"]["ms"])

    def place(row):
        return row["peak"] / 1e6, statistics.median(row["ms"]) / plain

    planner = [place(row) for row in found["points"]]
    predicted = [(row["predicted_peak"] / 1e6, row["predicted_ms"] / plain) for row in found["points"]]
    segments, halves = [place(row) for row in found["segments"]], [place(row) for row in found["halves"]]
    everything = planner + predicted + segments + halves + [place(found["plain"])]
    high = max(x for x, _ in everything) * 1.04
    bottom, top = min(0.98, min(y for _, y in everything) - 0.02), max(y for _, y in everything) + 0.05

    def at(point):
        x = LEFT + (WIDTH - LEFT - RIGHT) * point[0] / high
        return x, HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * (point[1] - bottom) / (top - bottom)

    out = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
           f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>']

    def text(x, y, words, anchor="middle", fill=INK, extra=""):
        out.append(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{fill}"{extra}>{words}</text>')

    def line(a, b, stroke, extra=""):
        out.append(f'<line x1="{a[0]:.1f}" y1="{a[1]:.1f}" x2="{b[0]:.1f}" y2="{b[1]:.1f}" stroke="{stroke}"{extra}/>')

    for y in ticks(bottom, top, 6):
        line(at((0, y)), at((high, y)), GRID)
        text(LEFT - 8, at((0, y))[1] + 4, f"{y:.1f}", "end")
    for x in ticks(0, high, 8):
        text(at((x, bottom))[0], HEIGHT - BOTTOM + 18, f"{x:g}")
    line(at((0, bottom)), at((high, bottom)), INK)
    standing = found["standing"] / 1e6
    line(at((standing, bottom)), at((standing, top)), "#999999", ' stroke-dasharray="2 3"')
    text(at((standing, bottom))[0] + 5, HEIGHT - BOTTOM - 8, "weights", "start", "#777777")
    text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 12, "peak of live tensors, MB")
    text(16, (TOP + HEIGHT - BOTTOM) / 2, "time of a step, plain training = 1",
         extra=f' transform="rotate(-90 16 {(TOP + HEIGHT - BOTTOM) / 2:.1f})"')

    def marks(points, color, joined, hollow=False):
        places = [at(p) for p in sorted(points)]
        if joined:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
            out.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        for x, y in places:
            fill = "white" if hollow else color
            out.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{3 if hollow else 4}" fill="{fill}" stroke="{color}"/>')

    marks(segments, SEGMENTS, True)
    marks(planner, PLANNER, True)
    marks(predicted, PLANNER, False, hollow=True)
    marks(halves, HALVES, False)
    marks([place(found["plain"])], INK, False)
    x = LEFT + 4
    for words, color, hollow in [("planner, measured", PLANNER, False), ("predicted", PLANNER, True),
                                 ("segments of equal length", SEGMENTS, False), ("halves within halves", HALVES, False),
                                 ("plain", INK, False)]:
        out.append(f'<circle cx="{x + 5}" cy="22" r="4" fill="{"white" if hollow else color}" stroke="{color}"/>')
        text(x + 14, 26, words, "start")
        x += 34 + 6.3 * len(words)
    return "\n".join(out + ["</svg>", ""])
