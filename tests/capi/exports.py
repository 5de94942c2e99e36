#!/usr/bin/env python3
"""exports.py LIBRARY HEADER LIST: fails unless the library exports what the header declares and the list has, and
nothing else."""
import pathlib
import re
import subprocess
import sys

library, header, listed = sys.argv[1:]
table = subprocess.run(["nm", "-D", "--defined-only", library], capture_output=True, text=True, check=True).stdout
exported = {line.split()[-1] for line in table.splitlines()}
text = re.sub(r"/\*.*?\*/", "", pathlib.Path(header).read_text(), flags=re.S)
declared = set(re.findall(r"\b(cairn_\w+)\(", text))
names = set(pathlib.Path(listed).read_text().split())
for what, others in (("declared by the header", declared), ("listed", names)):
    if exported != others:
        sys.exit(f"expected to export what is {what}, got {sorted(exported - others)} more and without "
                 f"{sorted(others - exported)}")
print(f"{len(exported)} functions")
