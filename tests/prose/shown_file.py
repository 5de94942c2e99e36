#!/usr/bin/env python3
"""shown_file.py PAGE FILE: fails unless one of the page's code blocks is the text of the file."""
import pathlib
import re
import sys


def main(page, file):
    blocks = re.findall(r"^```\w+\n(.*?)^```$", pathlib.Path(page).read_text(), flags=re.S | re.M)
    if pathlib.Path(file).read_text() in blocks:
        return 0
    print(f"{page}: expected a block with the text of {file}, got {len(blocks)} others (copy the file's text into the page)")
    return 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
