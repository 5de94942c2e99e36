"""planted_test.py NVCC TEST_PTX: test_ptx sees each of these faults in the headers that only nvcc compiles."""
import concurrent.futures
import itertools
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
DEVICE = "cuda/device/"
LAUNCH = "cuda/launch.cuh"
NVCC, PROGRAM = sys.argv.pop(1), sys.argv.pop(1)
MADE = Path(PROGRAM).resolve().parent.parent / "tests"
MMA = "m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}"
SUMS = ', "\n        "{%8, %9}, {%0, %1, %2, %3};"\n        : '
LDMATRIX = "x4.shared.b16 {%0, %1, %2, %3}"

# What is wrong, the header, what stands there once and what in its place; the twins that see it.
FAULTS = [
    ("a copy of 8 bytes", DEVICE + "async_copy.cuh", "[%0], [%1], 16;", "[%0], [%1], 8;", "copy_async"),
    ("a copy through L1", DEVICE + "async_copy.cuh", "cp.async.cg", "cp.async.ca", "copy_async"),
    ("a copy's operands swapped", DEVICE + "async_copy.cuh", "[%0], [%1], 16;", "[%1], [%0], 16;", "copy_async"),
    ("a copy to a generic address", DEVICE + "async_copy.cuh", "__cvta_generic_to_shared(shared)", "reinterpret_cast<std::uintptr_t>(shared)",
     "copy_async"),
    ("a group that is not committed", DEVICE + "async_copy.cuh", "cp.async.wait_all;", "cp.async.wait_group 0;", "copy_async"),
    ("nobody waits", DEVICE + "async_copy.cuh", 'asm volatile("cp.async.wait_all;" ::: "memory");', "", "copy_async"),
    ("words of a load swapped", DEVICE + "packed.cuh", "{{words.x, words.y,", "{{words.y, words.x,", "move_16_bytes"),
    ("words of a store swapped", DEVICE + "packed.cuh", "value.words[2], value.words[3])", "value.words[3], value.words[2])", "move_16_bytes"),
    ("a load of 8 bytes", DEVICE + "packed.cuh", "const uint4 words = *static_cast<const uint4*>(address);",
     "const auto* half = static_cast<const uint2*>(address); const uint4 words = {half[0].x, half[0].y, half[1].x, half[1].y};", "move_16_bytes"),
    ("matrices swapped", DEVICE + "tile.cuh", LDMATRIX, "x4.shared.b16 {%0, %2, %1, %3}", "load_rows"),
    ("not transposed", DEVICE + "tile.cuh", ".x4.trans", ".x4", "load_columns"),
    ("transposed", DEVICE + "tile.cuh", LDMATRIX, LDMATRIX.replace("x4", "x4.trans"), "load_rows"),
    ("two matrices of four", DEVICE + "tile.cuh", LDMATRIX + ", [%4]", "x2.shared.b16 {%0, %1}, [%4]", "load_rows"),
    ("registers of a factor swapped", DEVICE + "tile.cuh", MMA, MMA.replace("{%4, %5, %6, %7}", "{%4, %6, %5, %7}"), "multiply_f16"),
    ("sums swapped", DEVICE + "tile.cuh", MMA, MMA.replace("{%0, %1, %2, %3}", "{%2, %1, %0, %3}"), "multiply_f16"),
    ("halves of another type", DEVICE + "tile.cuh", "f32.f16.f16.f32", "f32.bf16.bf16.f32", "multiply_f16"),
    ("sums of before not read", DEVICE + "tile.cuh", MMA + SUMS + '"+f"(sums[0])', MMA + SUMS + '"=f"(sums[0])', "multiply_f16"),
    ("a pair backwards", DEVICE + "tile.cuh", "__floats2bfloat162_rn(first, second)", "__floats2bfloat162_rn(second, first)", "convert_bf16"),
    ("rounded towards zero", DEVICE + "convert.cuh", "__float2half_rn(x)", "__float2half_rz(x)", "convert_f16"),
    ("a power of another number", DEVICE + "online_softmax.cuh", '"f"(x)', '"f"(-x)', "powers_of_two"),
    ("shared memory not asked for", LAUNCH, "if (grid.shared_bytes > kDefaultSharedBytes)", "if (false)", "move_16_bytes"),
    ("too little asked for", LAUNCH, "static_cast<int>(grid.shared_bytes))", "static_cast<int>(kDefaultSharedBytes))", "move_16_bytes"),
    ("blocks and threads swapped", LAUNCH, "<<<static_cast<unsigned>(grid.blocks), static_cast<unsigned>(grid.threads)",
     "<<<static_cast<unsigned>(grid.threads), static_cast<unsigned>(grid.blocks)", "move_16_bytes"),
    ("the default stream", LAUNCH, "static_cast<cudaStream_t>(queue.stream())>>>", "nullptr>>>", "move_16_bytes"),
]


def run(twins, twin):
    done = subprocess.run([PROGRAM, "--gtest_brief=1", f"--gtest_filter=*/{twin}"], env={**os.environ, "CAIRN_PTX_TWINS": str(twins)},
                          capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def plant(faults, include):
    for sentence, header, right, wrong, _ in faults:
        planted = include / header
        text = (planted if planted.exists() else ROOT / "kernels/src" / header).read_text()
        if text.count(right) != 1:
            sys.exit(f"{sentence}: expected {right!r} once in {header}")
        planted.parent.mkdir(parents=True, exist_ok=True)
        planted.write_text(text.replace(right, wrong))


def survivors_of(faults):
    """What of these faults, each of another twin, no test sees."""
    with tempfile.TemporaryDirectory() as scratch:
        twins = Path(scratch)
        plant(faults, twins / "include")
        made, other = ("twins.so", "twins.ptx") if faults[0][1] == LAUNCH else ("twins.ptx", "twins.so")
        (twins / other).symlink_to(MADE / other)
        compiled = subprocess.run([ROOT / "tests/ptx/compile_twins", NVCC, twins / made, twins / "include"], capture_output=True, text=True)
        if compiled.returncode != 0:
            return [f"{[fault[0] for fault in faults]} do not compile:\n{compiled.stderr}"]
        results = [(fault[0], *run(twins, fault[-1])) for fault in faults]
        return [f"{sentence} survives:\n{output}" for sentence, status, output in results if status != 1 or "[  FAILED  ]" not in output]


def rounds():
    """The faults that are compiled together: of the kernels one of each twin, of launches each alone."""
    found = [[fault] for fault in FAULTS if fault[1] == LAUNCH]
    of_twin = {}
    for fault in FAULTS:
        if fault[1] != LAUNCH:
            of_twin.setdefault(fault[-1], []).append(fault)
    return found + [[f for f in some if f] for some in itertools.zip_longest(*of_twin.values())]


class Planted(unittest.TestCase):
    def test_passes_without_one(self):
        status, output = run(MADE, "*")
        self.assertEqual(status, 0, output)

    def test_finds_each(self):
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            survivors = [text for some in pool.map(survivors_of, rounds()) for text in some]
        self.assertEqual(survivors, [], "\n".join(survivors))


if __name__ == "__main__":
    unittest.main()
