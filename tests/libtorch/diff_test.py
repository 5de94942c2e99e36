#!/usr/bin/env python3
"""diff_test.py ROOT [--write]: the diffs in docs/libtorch.md are those of the examples, and at most 12 lines of code differ. --write puts them there."""
import difflib
import pathlib
import re
import sys

ALLOWED = 12


def difference(root, program):
    plain, cairn = (root / f"examples/07_libtorch/{program}_{kind}.cpp" for kind in ("plain", "cairn"))
    lines = difflib.unified_diff(plain.read_text().splitlines(), cairn.read_text().splitlines(), n=0, lineterm="")
    return [line for line in list(lines)[2:] if not line.startswith("@@") and len(line) > 1]


def main(root, write=""):
    root = pathlib.Path(root)
    page = root / "docs/libtorch.md"
    text = page.read_text()
    for program in ("conv_net", "dcgan"):
        lines = difference(root, program)
        new = sum(line.startswith("+") for line in lines)
        if new > ALLOWED:
            sys.exit(f"{program}: expected at most {ALLOWED} lines that differ, got {new}")
        block = re.compile(rf"(<!-- {program} -->\n```diff\n)(.*?)(```)", re.DOTALL)
        true = "\n".join(lines) + "\n"
        found = block.search(text)
        if not found:
            sys.exit(f"docs/libtorch.md: expected a diff after '<!-- {program} -->', got none")
        if write:
            text = text[: found.start(2)] + true + text[found.end(2) :]
        elif found.group(2) != true:
            sys.exit(f"docs/libtorch.md: expected the diff of {program} as it is now, got another one (tests/libtorch/diff_test.py . --write)")
    if write:
        page.write_text(text)


if __name__ == "__main__":
    main(*sys.argv[1:])
