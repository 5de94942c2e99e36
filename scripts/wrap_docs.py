#!/usr/bin/env python3
"""wrap_docs.py [--check] PAGE...: wraps the prose of Markdown pages at 100 columns. Code, tables, headings and comments stay, inline code and links stay
whole. --check: names the pages that it would change, and fails."""
import pathlib
import re
import sys

WIDTH = 100
TOKEN = re.compile(r"(?:!?\[(?:`[^`]*`|[^\]`])*\]\([^)]*\)|`[^`]+`|[^\s])+")
LIST = re.compile(r"^(\s*)([-*]|\d+\.) +")
VERBATIM = re.compile(r"^(\||#|    |<!--|!\[)")
ENDS_PARAGRAPH = re.compile(r"^(\s*([-*]|\d+\.) +|\s*```|\||#|<!--|!\[)")
STARTS_BLOCK = re.compile(r"^([-+*#>|]+|\d+[.)])$")  # must not begin a line


def wrapped(text, first, rest):
    lines, line = [], first
    for token in TOKEN.finditer(text):
        word = token[0]
        if line in (first, rest) and not line.strip(" -*0123456789."):
            line += word
        elif len(line) + 1 + len(word) > WIDTH and not STARTS_BLOCK.match(word):
            lines.append(line)
            line = rest + word
        else:
            line += " " + word
    return [*lines, line]


def paragraph(lines, start):
    """The end of the paragraph or list item that begins here, and what its lines begin with."""
    item = LIST.match(lines[start])
    first = item[0] if item else re.match(r"^\s*", lines[start])[0]
    rest = " " * len(first)
    end = start + 1
    while end < len(lines) and lines[end].strip() and not ENDS_PARAGRAPH.match(lines[end]) and (
        not item or lines[end].startswith(rest)):
        end += 1
    return end, first, rest


def page(text):
    lines, out, i, code = text.split("\n"), [], 0, False
    while i < len(lines):
        fence = lines[i].lstrip().startswith("```")
        code ^= fence
        if code or fence or not lines[i].strip() or VERBATIM.match(lines[i]):
            out.append(lines[i])
            i += 1
            continue
        end, first, rest = paragraph(lines, i)
        raw = lines[i:end]
        if all(len(line) <= WIDTH for line in raw):
            out += raw
        else:
            out += wrapped(" ".join([raw[0][len(first) :], *map(str.strip, raw[1:])]), first, rest)
        i = end
    return "\n".join(out)


def main(arguments):
    check = arguments[:1] == ["--check"]
    changed = 0
    for path in map(pathlib.Path, arguments[check:]):
        text = path.read_text()
        if page(text) != text:
            changed += 1
            print(f"{path}: expected prose wrapped at {WIDTH} columns (scripts/wrap_docs.py)") if check else path.write_text(page(text))
    return bool(check and changed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
