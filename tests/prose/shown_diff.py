#!/usr/bin/env python3
"""Compares the diff that a page shows with that of two programs.

    shown_diff.py PAGE NAME BEFORE AFTER [MOST]            fails, and says how they differ, where the ```diff block behind <!-- NAME --> in PAGE is not
                                                           their diff, or where more than MOST lines are new
    shown_diff.py --write PAGE NAME BEFORE AFTER [MOST]    puts it there
"""
import difflib
import pathlib
import re
import sys


def diff_of(before, after):
    lines = [pathlib.Path(path).read_text().splitlines() for path in (before, after)]
    hunks = difflib.unified_diff(*lines, n=1, lineterm="")
    return [line for line in hunks if not line.startswith(("---", "+++"))]


def main(page, name, before, after, most="1000000", write=False):
    page, expected = pathlib.Path(page), diff_of(before, after)
    new = sum(line.startswith("+") and len(line) > 1 for line in expected)
    if new > int(most):
        sys.exit(f"{after}: expected at most {most} lines that {before} has not, got {new}")
    text = page.read_text()
    shown = re.search(rf"(?<=^<!-- {name} -->\n```diff\n).*?(?=^```$)", text, re.S | re.M)
    if shown is None:
        sys.exit(f"{page}: expected a block of ```diff behind <!-- {name} -->, got none")
    if write:
        page.write_text(text[: shown.start()] + "\n".join(expected) + "\n" + text[shown.end() :])
    elif shown.group().splitlines() != expected:
        told = difflib.unified_diff(shown.group().splitlines(), expected, "shown", "true", lineterm="")
        sys.exit(f"{page}: expected the diff of {before} and {after} (shown_diff.py --write):\n" + "\n".join(told))


if __name__ == "__main__":
    arguments = [a for a in sys.argv[1:] if a != "--write"]
    main(*arguments, write="--write" in sys.argv)
