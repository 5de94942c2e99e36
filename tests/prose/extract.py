#!/usr/bin/env python3
"""Writes C++ sources from the code in the prose: the ```cpp blocks of pages and the examples in headers' comments.

    extract.py list ROOT PAGE...              the lines (PAGE:LINE) where programs begin: blocks that hold a main
    extract.py programs ROOT OUT PAGE...      OUT/program_0.cpp ..., one a program, in the order of `list`
    extract.py fragments ROOT OUT FILE...     OUT, one source that holds every other block and example

Pages and headers are named relative to ROOT. #line directives make the compiler name the page and the line.

An example in a header is a run of comment lines that begin with "//   " (or "///   "), of which the first begins as code does and one
ends as a statement does: formulas, layouts and tables do not. A fragment that begins with a class or a function is compiled at
namespace scope, any other inside a function. What fragments take for granted (a model, a loader) is in setup.h.
"""
import pathlib
import re
import sys

DEFINITION = re.compile(r"(class|struct|template|enum)\b|(?!(for|if|while|switch|return|auto)\b)[\w:<>&*]+( [\w:<>&*]+)* \w+\([^;]*\) (const )?(override )?\{$")
CODE = re.compile(r"[\w:]+[ (<.]")
STATEMENT = re.compile(r"[;{}]\s*(//.*)?$")


class Block:
    def __init__(self, path, line, text):
        self.path, self.line, self.lines = path, line, text

    def is_program(self):
        return any(re.match(r"int main\(", line) for line in self.lines)

    def includes(self):
        return [line for line in self.lines if line.startswith("#include")]

    def body(self):
        """The block with its includes blanked out: lines keep their numbers."""
        return ["" if line.startswith("#include") else line for line in self.lines]

    def is_definition(self):
        code = [line for line in self.body() if line.strip() and not line.startswith(("//", "using "))]
        return bool(code) and DEFINITION.match(code[0]) is not None


def blocks_of_page(path, lines):
    start = None
    for number, line in enumerate(lines, 1):
        if start is None and line.strip() == "```cpp":
            start = number
        elif start is not None and line.strip() == "```":
            yield Block(path, start + 1, lines[start : number - 1])
            start = None
    if start is not None:
        sys.exit(f"{path}:{start}: expected the end of this block (a line of ```)")


def examples_of_header(path, lines):
    run = []
    for number, line in enumerate(lines + [""], 1):
        match = re.match(r" *///?   (.*)$", line)
        if match or (run and re.match(r" *///?$", line)):
            run.append((number, match.group(1) if match else ""))
            continue
        text = [code for _, code in run]
        if text and CODE.match(text[0]) and any(STATEMENT.search(code) for code in text):
            yield Block(path, run[0][0], text)
        run = []


def blocks_of(root, path):
    lines = (root / path).read_text().splitlines()
    return list(blocks_of_page(path, lines) if path.endswith(".md") else examples_of_header(path, lines))


def source_of_fragments(blocks):
    parts = ['#include "setup.h"']
    for block in blocks:
        parts += block.includes()
    for number, block in enumerate(blocks):
        opening, closing = ("", "") if block.is_definition() else ("void fragment() {", "}")
        parts += [f"namespace prose_{number} {{", "using namespace prose;", opening,
                  f'#line {block.line} "{block.path}"']
        parts += block.body() + [closing, "}"]
    return "\n".join(parts) + "\n"


def write(path, text):
    """Leaves a file that is as it should be untouched, so that nothing is compiled anew."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def main(mode, root, *arguments):
    root = pathlib.Path(root)
    if mode == "list":
        for page in arguments:
            for block in blocks_of(root, page):
                if block.is_program():
                    print(f"{block.path}:{block.line}")
        return
    out, files = pathlib.Path(arguments[0]), arguments[1:]
    blocks = [block for file in files for block in blocks_of(root, file)]
    if mode == "fragments":
        write(out, source_of_fragments([block for block in blocks if not block.is_program()]))
        return
    programs = [block for block in blocks if block.is_program()]
    for number, block in enumerate(programs):
        write(out / f"program_{number}.cpp", "\n".join([f'#line {block.line} "{block.path}"'] + block.lines) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
