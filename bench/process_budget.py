"""Runs process_budget for every net and some budgets, prints a table, and draws it: what the process took at most against the budget.

    python3 bench/process_budget.py PROGRAM [--svg FILE] [--json FILE] [--nets mlp,gpt]

Budgets lie between the least that a schedule fits in and what plain training takes. Status 1 where a process took more than its budget, 2 % and 8 MB, or
learned other bits than plain training."""
import argparse
import json
import subprocess
import sys
import time

SHARES = [0.02, 0.2, 0.4, 0.7, 1.0]
SLACK, MB = 1.02, 1e6
WIDTH, LEFT, RIGHT, TOP, ROW = 760, 96, 24, 64, 54
INK, GRID, BUDGET, PROCESS, PLANNING, PLAIN = "#333333", "#e3e3e3", "#999999", "#1f5fa8", "#5d8a3a", "#c2571a"


def run(program, net, budget):
    made = subprocess.run([program, net, str(budget)], capture_output=True, text=True, check=True)
    return json.loads(made.stdout)


def measure(program, net):
    plain = run(program, net, 0)
    least = run(program, net, 1)["least"]
    budgets = [int(least + share * max(0, plain["process"] - least)) for share in SHARES]
    return {"net": net, "plain": plain, "least": least, "runs": [run(program, net, budget) for budget in budgets]}


def bound(row):
    return row["budget"] * SLACK + 8 * MB


def wrong(found):
    """What does not hold of a net's runs, in words."""
    for row in found["runs"]:
        what = f"{found['net']}, {row['budget'] / MB:.1f} MB"
        if row["least"]:
            yield f"{what}: refused, with {row['least'] / MB:.1f} MB as the least"
        elif row["gradients"] != found["plain"]["gradients"]:
            yield f"{what}: other bits than plain training"
        if max(row["process"], row["planning"]) > bound(row):
            yield f"{what}: took {row['process'] / MB:.1f} MB, {row['planning'] / MB:.1f} while planning"


def draw(all_found):
    height = TOP + ROW * len(all_found) + 46
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="12">',
           f'<rect width="{WIDTH}" height="{height}" fill="white"/>']
    high = 1.04 * max(max(row["process"], row["budget"]) for found in all_found
                      for row in [found["plain"], *found["runs"]]) / MB

    def x(megabytes):
        return LEFT + (WIDTH - LEFT - RIGHT) * megabytes / high

    def text(at, y, words, anchor="middle", fill=INK):
        out.append(f'<text x="{at:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{fill}">{words}</text>')

    bottom = TOP + ROW * len(all_found)
    for tick in range(0, int(high) + 1, 20 if high < 200 else 50):
        out.append(f'<line x1="{x(tick):.1f}" y1="{TOP - 8}" x2="{x(tick):.1f}" y2="{bottom}" stroke="{GRID}"/>')
        text(x(tick), bottom + 16, str(tick))
    text((LEFT + WIDTH - RIGHT) / 2, bottom + 36, "the process, MB at most")
    for i, found in enumerate(all_found):
        middle = TOP + ROW * i + ROW / 2 - 4
        text(LEFT - 8, middle + 4, found["net"].replace("_", " "), "end")
        for k, row in enumerate(found["runs"]):
            y = middle + 8 * (k - 2)
            out.append(f'<line x1="{x(0):.1f}" y1="{y}" x2="{x(row["budget"] / MB):.1f}" y2="{y}" stroke="{GRID}" stroke-width="5"/>')
            out.append(f'<line x1="{x(row["budget"] / MB):.1f}" y1="{y - 4}" x2="{x(row["budget"] / MB):.1f}" y2="{y + 4}" stroke="{INK}" stroke-width="1.5"/>')
            out.append(f'<circle cx="{x(row["planning"] / MB):.1f}" cy="{y}" r="3" fill="white" stroke="{PLANNING}"/>')
            out.append(f'<circle cx="{x(row["process"] / MB):.1f}" cy="{y}" r="3" fill="{PROCESS}"/>')
        plain = x(found["plain"]["process"] / MB)
        out.append(f'<line x1="{plain:.1f}" y1="{middle - 21}" x2="{plain:.1f}" y2="{middle + 21}" stroke="{PLAIN}" stroke-dasharray="3 2"/>')
    at = LEFT
    for words, mark in [("budget", f'<line x1="0" y1="-5" x2="0" y2="5" stroke="{INK}" stroke-width="1.5"/>'),
                        ("the process took at most", f'<circle r="3" fill="{PROCESS}"/>'),
                        ("while it was planned", f'<circle r="3" fill="white" stroke="{PLANNING}"/>'),
                        ("plain training",
                         f'<line x1="0" y1="-6" x2="0" y2="6" stroke="{PLAIN}" stroke-dasharray="3 2"/>')]:
        out.append(f'<g transform="translate({at:.1f} 26)">{mark}</g>')
        text(at + 10, 30, words, "start")
        at += 30 + 6.6 * len(words)
    return "\n".join(out + ["</svg>", ""])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("program")
    parser.add_argument("--svg")
    parser.add_argument("--json")
    parser.add_argument("--nets")
    given = parser.parse_args()
    nets = given.nets.split(",") if given.nets else subprocess.run([given.program, "--list"], capture_output=True,
                                                                   text=True, check=True).stdout.split()
    begin, all_found, problems = time.time(), [], []
    for net in nets:
        found = measure(given.program, net)
        all_found.append(found)
        problems += wrong(found)
        for row in found["runs"]:
            over = (max(row["process"], row["planning"]) - row["budget"]) / MB
            print(f"{net:11} budget {row['budget'] / MB:6.1f}  planning {row['planning'] / MB:6.1f}  process {row['process'] / MB:6.1f} ({over:+5.1f})  "
                  f"before {row['before'] / MB:5.1f}  after {row['after'] / MB:5.1f}  beside {row['beside'] / MB:4.1f}  plain {found['plain']['process'] / MB:6.1f}  "
                  f"{row['planning_seconds']:4.1f} s  {row['schedule'][:60]}", flush=True)
    print(f"{len(all_found)} nets, {sum(len(f['runs']) for f in all_found)} runs, {time.time() - begin:.0f} s",
          *problems, sep="\n")
    if given.json:
        with open(given.json, "w", encoding="utf-8") as file:
            json.dump(all_found, file)
    if given.svg:
        with open(given.svg, "w", encoding="utf-8") as file:
            file.write(draw(all_found))
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
