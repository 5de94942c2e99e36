"""symbols_test.py ARCHIVE... -- LIBRARY...: every function of CUDA's libraries that Cairn's archives call exists in those libraries.

The simulated GPU links its own in their place; this is what a link with the real ones would find.
"""
import re
import subprocess
import sys

VENDOR = re.compile(r"^(cuda|cublasLt|cudnn|nccl)[A-Z]\w*$")


def names(command, kinds):
    """Symbols of nm's output whose kind is one of these letters."""
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    fields = [line.split() for line in lines]
    return {f[-1].split("@")[0] for f in fields if len(f) >= 2 and f[-2] in kinds}


def main():
    split = sys.argv.index("--")
    archives, libraries = sys.argv[1:split], sys.argv[split + 1:]
    called = {name for archive in archives for name in names(["nm", "-u", archive], "U") if VENDOR.match(name)}
    defined = set().union(*(names(["nm", "-D", "--defined-only", library], "TWi") for library in libraries))
    if len(called) < 50:
        sys.exit(f"expected the archives to call CUDA's libraries, found {len(called)} functions in {archives}")
    missing = sorted(called - defined)
    if missing:
        sys.exit("expected these functions in CUDA's libraries, found none: " + ", ".join(missing))
    print(f"all {len(called)} functions exist")


main()
