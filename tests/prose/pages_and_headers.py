#!/usr/bin/env python3
"""Holds names against the public headers; a line on each difference.

    pages_and_headers.py glossary ROOT    every name in the last column of docs/naming.md's terms is in a public header
    pages_and_headers.py errors ROOT      docs/errors.md has a row for each public error class, and for nothing else
    pages_and_headers.py types ROOT       one name, one type: only options that a layer hands on to its kernels, and what libtorch's twin has, share theirs
"""
import pathlib
import re
import sys

TERMS = re.compile(r"^\|[^|]*\|[^|]*\|([^|]*)\|$")
ERROR_CLASS = re.compile(r"namespace cairn::(\w+)|^\s*(?:class|struct) (\w+)(?: final)? : (?:public )?([\w:]+)", re.M)
NAMESPACE_OR_TYPE = re.compile(r"^namespace cairn::([\w:]+) \{|^(?:class|struct|enum class) (?:\[\[nodiscard\]\] )?(\w+)[^;(]*\{", re.M)
ROW = re.compile(r"^\| `(\w+::\w+)` \|", re.M)


def headers(root):
    """Public headers without their comments."""
    for path in sorted(root.glob("**/include/cairn/*/*.h")):
        if path.relative_to(root).parts[0] != "build":
            yield re.sub(r"//.*", "", path.read_text())


def glossary(root):
    words = set(re.findall(r"\w+", " ".join(headers(root))))
    found = 0
    for number, line in enumerate((root / "docs/naming.md").read_text().splitlines(), 1):
        row = TERMS.match(line)
        names = re.findall(r"`([^`]+)`", row[1]) if row else []
        if row and not names and not re.match(r"^[\s-]*$|^ API $", row[1]):
            yield f"docs/naming.md:{number}: expected a name of the API in the last column, got none"
        found += len(names)
        for name in names:
            for word in re.findall(r"\w+", name):
                if word not in words:
                    yield f"docs/naming.md:{number}: expected a name of a public header, got '{word}' in `{name}`"
    if found < 50:
        yield f"docs/naming.md: expected at least 50 names of the API, got {found}"


def public_errors(root):
    """Those that derive from core::Error, over any number of classes."""
    bases = {}
    for text in headers(root):
        folder = ""
        for match in ERROR_CLASS.finditer(text):
            folder = match[1] or folder
            if match[2]:
                bases[f"{folder}::{match[2]}"] = match[3] if "::" in match[3] else f"{folder}::{match[3]}"
    known = {"core::Error"}
    while more := {name for name, base in bases.items() if base in known} - known:
        known |= more
    return known


def errors(root):
    public, rows = public_errors(root), set(ROW.findall((root / "docs/errors.md").read_text()))
    for name in sorted(public - rows):
        yield f"docs/errors.md: expected a row for `{name}`, which a public header has, got none"
    for name in sorted(rows - public):
        yield f"docs/errors.md: expected rows for public error classes only, got one for `{name}`"


def types(root):
    folders = {}
    for text in headers(root):
        folder = ""
        for match in NAMESPACE_OR_TYPE.finditer(text):
            folder = match[1] or folder
            if match[2] and not folder.endswith("detail"):
                folders.setdefault(match[2], set()).add(folder)
    for name, having in sorted(folders.items()):
        if len(having - {"libtorch"}) > 1 and not name.endswith("Options"):
            yield f"expected one public type of the name {name}, got those of {', '.join(sorted(having))}"
    if len(folders) < 200:
        yield f"expected at least 200 public types, got {len(folders)}"


if __name__ == "__main__":
    complaints = list({"glossary": glossary, "errors": errors, "types": types}[sys.argv[1]](pathlib.Path(sys.argv[2])))
    print("\n".join(complaints))
    sys.exit(bool(complaints))
