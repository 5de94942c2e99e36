"""torch_memory_viz.py FILE: what stands in a memory snapshot and, where torch's reader is there (.venv, build/libtorch), what torch.cuda._memory_viz makes of it, as JSON."""
import base64
import importlib.util
import json
import pathlib
import pickle
import re
import sys


def torch_reader():
    root = pathlib.Path(__file__).parents[2]
    found = [*root.glob(".venv/lib/python3*/site-packages/torch"), *root.glob("build/libtorch/torch")]
    for file in [folder / "cuda/_memory_viz.py" for folder in found]:
        if not file.exists():
            continue
        spec = importlib.util.spec_from_file_location("memory_viz", file)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    return None


def read():
    return pickle.loads(pathlib.Path(sys.argv[1]).read_bytes())


def bytes_by_place(lines):
    """{"active_allocated": {"activations": 4096}}: the innermost frame's file."""
    places = {}
    for line in lines.splitlines():
        path, _, size = line.rpartition(" ")
        state, frames = path.split(";")[1:3]
        place = path.split(";")[-1].split(":")[0] if ":" in frames else frames
        places.setdefault(state, {}).setdefault(place, 0)
        places[state][place] += int(size)
    return places


def replay(events):
    """Live and reserved bytes after the events, and their peak, from where the events begin."""
    live, reserved, peak, categories = 0, 0, 0, {}
    blocks = {}
    for event in events:
        size, action = event["size"], event["action"]
        if action == "alloc":
            blocks[event["addr"]] = event["category"], size
            live += size
            peak = max(peak, live)
        elif action == "free_requested":
            live -= size
            blocks.pop(event["addr"], None)
        elif action.startswith("segment_"):
            reserved += size if action == "segment_alloc" else -size
    for category, size in blocks.values():
        categories[category] = categories.get(category, 0) + size
    return {"live": live, "peak": peak, "reserved": reserved, "categories": categories}


def by_torch(memory_viz):
    snapshot = read()
    page = memory_viz.trace_plot(snapshot)
    shown = pickle.loads(base64.b64decode(json.loads(re.search(r"const local_files = (\[.*\])", page)[1])[0]["base64"]))
    assert shown == snapshot and "Active Memory Timeline" in page
    assert "Allocator State History" in memory_viz.segment_plot(snapshot)
    kept = memory_viz.filter_alloc_free_pairs(read())["device_traces"][-1]
    return {
        "blocks": bytes_by_place(memory_viz.memory(snapshot, format_flamegraph=lambda lines: lines)),
        "summary": memory_viz.segsum(snapshot).split("Legend")[0],
        "trace": memory_viz.trace(snapshot),
        "unfreed": sum(event["size"] for event in kept if event["action"] == "alloc"),
    }


snapshot = read()
events = snapshot["device_traces"][-1]
reader = torch_reader()
print(json.dumps({
    "torch": reader and by_torch(reader),
    "replay": replay(events),
    "frames": [event["frames"] for event in events if "frames" in event],
    "actions": [event["action"] for event in events],
    "dropped": snapshot["dropped_events"],
    "live": sum(block["requested_size"] for segment in snapshot["segments"] for block in segment["blocks"] if block["state"] == "active_allocated"),
    "reserved": sum(segment["total_size"] for segment in snapshot["segments"]),
}))
