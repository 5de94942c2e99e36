"""scripts/gpu_check run beside programs that are made up: what it does with figures, failures, crashes and hangs, on any machine."""
import json
import os
import stat
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent

WORKS = r"""
import json, sys, time
if "--list" in sys.argv:
    print("gelu_bf16 add_bf16 o2_update_124m_bf16 gpt2_124m_o0 gpt2_124m_o2 matmul_8192_bf16")
    sys.exit()
for line in sys.stdin:
    name = line.split()[0]
    row = {"work": name, "ms": 2.0, "fastest_ms": 1.9, "peak_bytes": 2**31}
    if name == "add_bf16":
        sys.exit("cairn_works: no memory was left")
    if name in ("gelu_bf16", "o2_update_124m_bf16"):
        row |= {"bytes": 8e9, "kernels": "^map_kernel<Unary<BFloat16>", "share": 0.9, "loop_ms": 1.8}
    if name.startswith("gpt2"):
        row |= {"operations": 1.2e13, "items": 16384}
    if name == "gpt2_124m_o2":
        row |= {"share": 2.5, "loop_ms": 5.0}
    if name.startswith("matmul"):
        row |= {"operations": 1e12, "share": 0.97, "loop_ms": 1.94}
    print(json.dumps(row), flush=True)
"""

# Stands for an interpreter that has PyTorch, and for bench/peer_torch.py.
TORCH = r"""
import json, sys
if sys.argv[1] == "-c":
    print("2.0 13.0 9")
    sys.exit()
for line in sys.stdin:
    print(json.dumps({"work": line.split()[0], "ms": 5.0, "peak_bytes": 3 * 2**30}), flush=True)
"""

TESTS = r"""
import json, os, sys, time
if "--gtest_list_tests" in sys.argv:
    print("Suite.\n  First\n  Second\n  Third")
    sys.exit()
print("[ RUN      ] Suite.First\n[       OK ] Suite.First\n[ RUN      ] Suite.Second", flush=True)
what = WHAT
if what == "crash":
    os.abort()
if what == "hang":
    time.sleep(600)
tests = [{"name": n, "classname": "Suite", "result": "COMPLETED"} for n in ("First", "Second", "Third")]
tests[2]["result"] = "SKIPPED"
if what == "fail":
    tests[1]["failures"] = [{"failure": "no"}]
json.dump({"testsuites": [{"testsuite": tests}]}, open(os.environ["GTEST_OUTPUT"][5:], "w"))
sys.exit(what == "fail")
"""


class Run(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name)
        (self.path / "bin").mkdir()
        self.program("bin/cairn_works", WORKS)
        self.program("torch", TORCH)
        (self.path / "cuda_report.json").write_text(json.dumps(
            [{"kernel": "map_kernel<Unary<BFloat16>, BFloat16, BFloat16>", "architecture": "90", "share": share} for share in (0.5, 1.86)]))

    def tearDown(self):
        self.folder.cleanup()

    def program(self, name, text):
        path = self.path / name
        path.write_text(f"#!{sys.executable}\n{text}")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    def run_phases(self, phases, *more):
        """(status, rows by what they are of)."""
        done = subprocess.run([sys.executable, "-B", ROOT / "scripts/gpu_check_run.py", "--programs", self.path, "--out", self.path / "out", "--only", phases,
                               "--python", self.path / "torch", *more], capture_output=True, text=True, timeout=100, env={**os.environ})
        self.page = (self.path / "out/results.md").read_text()
        rows = json.loads((self.path / "out/results.json").read_text())["rows"]
        return done.returncode, {row["what"]: row for row in rows}

    def test_a_kernel_stands_beside_its_goal_and_what_was_foreseen(self):
        _, rows = self.run_phases("memory")
        gelu = rows["gelu_bf16"]
        self.assertEqual((gelu["measured"], gelu["goal"], gelu["met"]), (0.9, 0.85, True))
        self.assertAlmostEqual(gelu["foreseen"], 0.45)  # the slowest of the kernels that match
        self.assertIn("4,000 GB/s", gelu["note"])
        self.assertIn("| gelu_bf16 | 0.90 of copy | 0.45 | 0.85 | met |", self.page)

    def test_a_work_that_fails_says_why_and_the_next_runs(self):
        status, rows = self.run_phases("memory,products")
        self.assertEqual(status, 1)
        self.assertIn("no memory was left", rows["add_bf16: Cairn"]["measured"])
        self.assertEqual(rows["matmul_8192_bf16"]["met"], True)

    def test_some_works_of_a_phase_alone(self):
        _, rows = self.run_phases("memory", "--works", "gelu")
        self.assertEqual(set(rows), {"gelu_bf16"})

    def test_pytorch_is_asked_in_turn(self):
        status, rows = self.run_phases("updates,gpt2")
        self.assertEqual(status, 0)  # a goal that is missed is no failure
        ratio = rows["o2_update_124m_bf16: PyTorch's time over Cairn's"]
        self.assertEqual((ratio["measured"], ratio["goal"], ratio["foreseen"]), (2.5, 1.5, 2.0))
        self.assertEqual(rows["gpt2_124m_o2: peak memory"]["note"], "PyTorch 3.00 GiB")
        self.assertEqual(rows["gpt2_124m_o2"]["measured"], 16384 / 2.0 * 1000)
        self.assertEqual(rows["gpt2_124m_o2: O0's time over its own"]["met"], False)

    def test_tests_that_fail_crash_and_hang_are_named(self):
        self.program("bin/test_core", TESTS.replace("WHAT", "'fail'"))
        self.program("bin/test_amp", TESTS.replace("WHAT", "'crash'"))
        self.program("bin/test_nn", TESTS.replace("WHAT", "'good'"))
        status, rows = self.run_phases("suite")
        self.assertEqual(status, 1)
        self.assertEqual((rows["test_core"]["ok"], rows["test_core"]["note"]), (False, "Suite.Second"))
        self.assertEqual((rows["test_amp"]["ok"], rows["test_amp"]["note"]), (False, "ended with status -6 in Suite.Second"))
        self.assertEqual((rows["test_nn"]["ok"], rows["test_nn"]["measured"]), (True, "2 of 3 passed, 0 failed, 1 skipped"))
        self.assertEqual(rows["test_optim"]["measured"], "not packed")

    def test_time_that_is_up_is_no_failure_and_later_phases_are_not_begun(self):
        self.program("bin/test_core", TESTS.replace("WHAT", "'hang'"))
        status, rows = self.run_phases("suite,memory", "--minutes", "0.15")
        self.assertEqual(status, 0)
        self.assertEqual(rows["test_core"]["note"], "time was up in Suite.Second")
        self.assertEqual(rows["memory"]["measured"], "not begun: no time was left")

    def test_what_another_run_found_stays(self):
        self.run_phases("products")
        _, rows = self.run_phases("updates")
        self.assertIn("matmul_8192_bf16", rows)


if __name__ == "__main__":
    unittest.main()
