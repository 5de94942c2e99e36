#!/usr/bin/env python3
"""names.py ROOT PAGE...: fails where a page names, in `inline code`, something that the sources do not have.

Names are words of code: with an underscore or a capital in the middle. File names must be the end of a path in the tree.
"""
import fnmatch
import pathlib
import re
import sys

SOURCES = {".h", ".cpp", ".cu", ".cuh", ".cmake", ".txt", ".py", ".sh", ".json", ""}
FILE = re.compile(r"[\w./*-]+\.(?:h|cpp|cu|cuh|cmake|md|py)\b")
# Names of other projects, and placeholders.
FOREIGN = {"CAIRN_NAME", "ONEDNN_MAX_CPU_ISA", "my_op", "unscale_l2norm", "weight_ih_l0", "message_size",
           "bucket_cap_mb", "gradient_average", "allreduce_trigger_params", "register_comm_hook",
           "gradient_as_bucket_view", "disable_allreduce", "convert_syncbn_model", "master_params", "register_module"}


def tree(root):
    for path in root.iterdir():
        if path.name in ("build", "runs") or path.name.startswith(".") and path.name != ".ci":
            continue  # what git ignores: other projects' sources lie in a virtual environment
        if path.is_dir():
            yield from tree(path)
        elif path.suffix in SOURCES or path.suffix == ".md":
            yield path


def is_name(word):
    return "_" in word.strip("_") or re.search(r"[a-z][A-Z]", word)


def unknown(code, paths, words):
    for file in FILE.findall(code):
        pattern = "*/" + file.removeprefix("../")
        if "NAME" not in file and not any(fnmatch.fnmatch("/" + path, pattern) for path in paths):
            yield file
    for word in re.findall(r"[A-Za-z_]\w+", FILE.sub(" ", code)):
        if is_name(word) and word not in words and word not in FOREIGN:
            yield word


def main(root, *pages):
    root = pathlib.Path(root)
    files = list(tree(root))
    paths = [str(path.relative_to(root)) for path in files]
    here = pathlib.Path(__file__).resolve()
    words = set()
    for path in files:
        if path.suffix != ".md" and path.resolve() != here:
            words.update(re.findall(r"[A-Za-z_]\w+", path.read_text(errors="ignore")))
    found = 0
    for page in pages:
        text = re.sub(r"```.*?```", lambda block: "\n" * block[0].count("\n"), (root / page).read_text(), flags=re.S)
        for number, line in enumerate(text.splitlines(), 1):
            for code in re.findall(r"`([^`]+)`", line):
                for name in unknown(code, paths, words):
                    print(f"{page}:{number}: expected a name of the sources, got '{name}' in `{code}`")
                    found += 1
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
