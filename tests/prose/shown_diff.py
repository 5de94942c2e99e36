#!/usr/bin/env python3
"""Compares the diff that a page shows with that of two programs.

    shown_diff.py PAGE BEFORE AFTER            fails, and says how they differ, where PAGE's ```diff block is not their diff
    shown_diff.py --write PAGE BEFORE AFTER    puts it there
"""
import difflib
import pathlib
import re
import sys

BLOCK = re.compile(r"(?<=^```diff\n).*?(?=^```$)", re.S | re.M)


def diff_of(before, after):
    lines = [pathlib.Path(path).read_text().splitlines() for path in (before, after)]
    hunks = difflib.unified_diff(*lines, n=1, lineterm="")
    return "\n".join(line for line in hunks if not line.startswith(("---", "+++"))) + "\n"


def main(page, before, after, write):
    page, expected = pathlib.Path(page), diff_of(before, after)
    text = page.read_text()
    shown = BLOCK.search(text)
    if shown is None:
        sys.exit(f"{page}: expected a block of ```diff, got none")
    if write:
        page.write_text(text[: shown.start()] + expected + text[shown.end() :])
    elif shown.group() != expected:
        told = difflib.unified_diff(shown.group().splitlines(), expected.splitlines(), "shown", "true", lineterm="")
        sys.exit(f"{page}: expected the diff of {before} and {after} (shown_diff.py --write):\n" + "\n".join(told))


if __name__ == "__main__":
    arguments = [a for a in sys.argv[1:] if a != "--write"]
    main(*arguments, write="--write" in sys.argv)
