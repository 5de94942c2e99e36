#!/usr/bin/env python3
"""performance_page.py render [--check]               writes the tables of docs/performance.md from docs/performance/*.json; --check: fails
                                                      where the page differs
performance_page.py collect NAME TITLE=FILE...        puts what the bench scripts wrote with --json into docs/performance/NAME.json; tables of
                                                      other titles stay
"""
import importlib.metadata
import json
import os
import pathlib
import re
import subprocess
import sys

from wrap_docs import page

DOCS = pathlib.Path(__file__).resolve().parent.parent / "docs"
PAGE = DOCS / "performance.md"
BEGIN, END = "<!-- tables: scripts/performance_page.py render -->\n", "<!-- end of tables -->\n"
MIB = 2**20


def milliseconds(value):
    if value is None:
        return ""
    if value >= 10000:
        return f"{value / 1000:.0f} s"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def ratio(value):
    return "" if value is None else f"{value:.3g}"


def table(machine):
    lines = [f"## {machine['processor']}", "", machine["software"] + ".", "",
             "| work | Cairn ms | peer | its ms | ratio | of loop | Cairn's memory | its memory |",
             "|---|---|---|---|---|---|---|---|"]
    for group in machine["groups"]:
        lines.append(f"| **{group['title']}** | | | | | | | |")
        for row in group["rows"]:
            cells = [row["work"], milliseconds(row.get("cairn_ms")), row.get("peer", ""),
                     milliseconds(row.get("peer_ms")), ratio(row.get("ratio")), ratio(row.get("of_loop")),
                     row.get("memory", ""), row.get("peer_memory", "")]
            lines.append("|" + "".join(f" {cell} |" if cell else " |" for cell in cells))
    lines += [""] + [f"- {group['title']}: `{group['command']}`; {group['conditions']}." for group in machine["groups"]]
    return "\n".join(lines) + "\n"


def rendered():
    machines = [json.loads(file.read_text()) for file in sorted((DOCS / "performance").glob("*.json"))]
    text = PAGE.read_text()
    before, after = text[: text.index(BEGIN) + len(BEGIN)], text[text.index(END) :]
    return page(before + "\n" + "\n".join(map(table, machines)) + "\n" + after)


def render(check=None):
    text = rendered()
    if check is None:
        PAGE.write_text(text)
    elif text != PAGE.read_text():
        sys.exit("docs/performance.md: expected the tables of docs/performance/*.json, got others (run scripts/performance_page.py render)")


def row_of(found):
    """A line of bench_vs_torch, or of the other bench scripts, which have one peer a line, named after the colon."""
    if "cairn_ms" in found:
        row = {"work": found["work"], "cairn_ms": found["cairn_ms"], "memory": f"{found['cairn_bytes'] / MIB:.0f} MiB"}
        if "peer_ms" in found:
            row |= {"peer": f"PyTorch, {found['peer']}", "peer_ms": found["peer_ms"], "ratio": found["ratio"],
                    "peer_memory": f"{found['peer_bytes'] / MIB:.0f} MiB"}
        return row | ({"of_loop": found["share"]} if "share" in found else {})
    work, _, peer = found["work"].partition(": ")
    if work.startswith("memory of "):  # both in MB
        return {"work": work, "peer": peer.removeprefix("of "), "memory": f"{found['cairn']:,.0f} MB",
                "peer_memory": f"{found['peer']:,.0f} MB"}
    return {"work": work, "cairn_ms": found["cairn"], "peer": peer, "peer_ms": found["peer"], "ratio": found["ratio"]}


def processor():
    fields = dict(re.findall(r"^(model name|flags)\s*: (.*)$", pathlib.Path("/proc/cpuinfo").read_text(), re.M))
    flags = fields.get("flags", "").split()
    features = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16") if flag in flags]
    return f"{fields.get('model name', 'unknown')} ({', '.join(features)})"


def software():
    compiler = subprocess.run(["g++", "-dumpfullversion"], capture_output=True, text=True, check=True).stdout.strip()
    try:
        return f"g++ {compiler}, PyTorch {importlib.metadata.version('torch')}"
    except importlib.metadata.PackageNotFoundError:
        return f"g++ {compiler}"


def collect(name, *files):
    groups = []
    for each in files:
        title, _, file = each.partition("=")
        rows = [row_of(json.loads(line)) for line in pathlib.Path(file).read_text().splitlines()]
        groups.append({"title": title, "command": f"scripts/{pathlib.Path(file).stem}",
                       "conditions": f"load {os.getloadavg()[0]:.1f} at the end", "rows": rows})
    file = DOCS / "performance" / f"{name}.json"
    measured = {group["title"] for group in groups}
    if file.exists():
        groups += [group for group in json.loads(file.read_text())["groups"] if group["title"] not in measured]
    machine = {"processor": f"{processor()}, {os.cpu_count()} threads", "software": software(), "groups": groups}
    file.write_text(json.dumps(machine, indent=1) + "\n")


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in ("render", "collect"):
        sys.exit(__doc__)
    {"render": render, "collect": collect}[sys.argv[1]](*sys.argv[2:])
