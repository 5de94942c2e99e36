"""What scripts/gpu_check writes: results.json, and one page, results.md. Foretells a kernel's speed from scripts/cuda_report's table."""
import json
import re
import tarfile

SATURATED = 0.9  # cuda_report's "in flight" is against what 90 % of a copy's bandwidth needs


def kernel_report(folder):
    """Rows of scripts/cuda_report --json, which 'pack' leaves beside the programs; none where there are none."""
    try:
        return json.loads((folder / "cuda_report.json").read_text())
    except (OSError, ValueError):
        return []


def foreseen_share(rows, kernels):
    """Of a copy's bytes a second: by Little's law, what the slowest of these kernels has in flight on sm_90,
    at most all."""
    shares = [min(1.0, SATURATED * row["share"]) for row in rows
              if str(row["architecture"]) == "90" and re.search(kernels, row["kernel"])]
    return min(shares, default=None)


def number(value):
    if not isinstance(value, float):
        return "" if value is None else str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.2f}"


def verdict(row):
    if row.get("ok") is False:
        return "FAILED"
    if "met" in row and row["met"] is not None:
        return "met" if row["met"] else "missed"
    return "ok" if row.get("ok") else ""


def cells(row):
    unit = row.get("unit", "")
    return [row["what"], f"{number(row['measured'])} {unit}".strip(), number(row.get("foreseen")),
            number(row.get("goal")), verdict(row), row.get("note", "")]


def line(row):
    what, measured, foreseen, goal, judged, note = cells(row)
    return f"{what:<48} {measured:<24} {foreseen:>6} {goal:>6} {judged:<7} {note}"


def phase_table(rows):
    head = ["| | measured | foreseen | goal | | |", "|---|---|---|---|---|---|"]
    return head + ["| " + " | ".join(cell.replace("|", "/") for cell in cells(row)) + " |" for row in rows]


def markdown(rows, sim):
    failures, missed = (sum(test(row) for row in rows)
                        for test in (lambda r: r.get("ok") is False, lambda r: r.get("met") is False))
    lines = ["# GPU check" + (": a dry run on simulated GPUs, without figures" if sim else ""), "",
             f"{len(rows)} results, {failures} failures, {missed} goals missed. 'Foreseen' is what was predicted before: by scripts/cuda_report "
             "for kernels, on paper in docs/adr/0021 for the rest.", ""]
    for phase in dict.fromkeys(row["phase"] for row in rows):
        lines += [f"## {phase}", "", *phase_table([row for row in rows if row["phase"] == phase]), ""]
    return "\n".join(lines)


def replace(path, text):
    """As a whole: a run may be cut off at any time."""
    beside = path.with_name(path.name + ".new")
    beside.write_text(text)
    beside.replace(path)


ARCHIVE_LIMIT = 64 << 20  # what can be carried
LOG_LIMIT = 1 << 20       # of each log; its beginning and its end


def shortened(log):
    if log.stat().st_size <= LOG_LIMIT:
        return log
    half = LOG_LIMIT // 2
    with open(log, "rb") as file:
        begin = file.read(half)
        file.seek(-half, 2)
        end = file.read()
    short = log.with_name(log.name + ".short")
    short.write_bytes(begin + b"\n... the middle was left out ...\n" + end)
    return short


def archive(out):
    """results.tar.xz: the pages and the newest logs, within ARCHIVE_LIMIT before compression. Named in it:
    what was left out."""
    logs = sorted((out / "logs").glob("*"), key=lambda log: -log.stat().st_mtime)
    part, room, left_out = out / "results.tar.xz.new", ARCHIVE_LIMIT, []
    with tarfile.open(part, "w:xz", preset=1) as packed:
        for name in ("results.md", "results.json"):
            packed.add(out / name, name)
            room -= (out / name).stat().st_size
        for log in [log for log in logs if not log.name.endswith((".short", "left_out"))]:
            short = shortened(log)
            if short.stat().st_size > room:
                left_out.append(log.name)
                continue
            packed.add(short, f"logs/{log.name}")
            room -= short.stat().st_size
        if left_out:
            (out / "logs/left_out").write_text("\n".join(left_out) + "\n")
            packed.add(out / "logs/left_out", "logs/left_out")
    part.replace(out / "results.tar.xz")


def write(out, rows, sim):
    replace(out / "results.json", json.dumps({"dry_run": sim, "rows": rows}, indent=1) + "\n")
    replace(out / "results.md", markdown(rows, sim))
