"""torch_flight_recorder.py FOLDER: what stands in a flight record and, where torchfrtrace is there (.venv, build/libtorch), what it makes of it, as JSON."""
import json
import logging
import pathlib
import pickle
import re
import sys
import types


def torch_folder():
    root = pathlib.Path(__file__).parents[2]
    found = [*root.glob(".venv/lib/python3*/site-packages/torch"), *root.glob("build/libtorch/torch")]
    return next((folder for folder in found if (folder / "distributed/flight_recorder/fr_trace.py").exists()), None)


def trouble(one):
    """[kind, sequence number, ranks] of a collective that is not well."""
    if one.missing_ranks:
        return ["missing", one.collective_seq_id, sorted(one.missing_ranks)]
    errors = {rank: other.type_of_mismatch.state.name for rank, other in (one.mismatch_collectives or {}).items()}
    if errors:
        kind = sorted(errors.values())[0].removeprefix("COLLECTIVE_").split("_")[0].lower()
        return [kind, one.collective_seq_id, sorted(errors)]
    return None


def by_torch(folder):
    for name in ("torch", "torch.distributed"):  # without what their __init__ loads
        package = types.ModuleType(name)
        package.__path__ = [str(folder.joinpath(*name.split(".")[1:]))]
        sys.modules[name] = package
    from torch.distributed.flight_recorder.components.builder import build_db
    from torch.distributed.flight_recorder.components.config_manager import JobConfig
    from torch.distributed.flight_recorder.components.loader import read_dir

    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("Flight Recorder").addHandler(handler)
    arguments = JobConfig().parse_args([sys.argv[1], "--allow-incomplete-ranks"])
    details, version = read_dir(arguments)
    database = build_db(details, arguments, version)
    without_dump = [re.search(r"missed FR dumps from ranks \(\{(.*)\}\)", line) for line in said]
    return {
        "trouble": [one for one in map(trouble, database.collectives) if one],
        "without_dump": sorted({int(rank) for match in without_dump if match for rank in match[1].split(",")}),
        "matched": [[one.group_id, one.collective_seq_id] for one in database.collectives],
        "said": said,
    }


folder = torch_folder()
dumps = {path.name: pickle.loads(path.read_bytes()) for path in sorted(pathlib.Path(sys.argv[1]).glob("rank_*"))}
print(json.dumps({
    "torch": folder and by_torch(folder),
    "entries": {name: [{key: value for key, value in entry.items() if key != "frames"} | {"text": entry["frames"][0]["name"]} for entry in dump["entries"]]
                for name, dump in dumps.items()},
    "groups": {name: dump["pg_config"] for name, dump in dumps.items()},
}))
