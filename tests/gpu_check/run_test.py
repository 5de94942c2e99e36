"""scripts/gpu_check run beside programs that are made up: what it does with figures, failures, crashes and hangs, on any machine."""
import json
import os
import stat
import subprocess
import sys
import tarfile
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
import gpu_check_run  # noqa: E402: it lies there

WORKS = r"""
import json, sys, time
if "--list" in sys.argv:
    print("gelu_bf16 add_bf16 o2_update_124m_bf16 gpt2_124m_o0 gpt2_124m_o2 matmul_8192_bf16 lengths_gpt2_124m_o2 captured_blocks_384_o2")
    sys.exit()
for line in sys.stdin:
    name = line.split()[0]
    row = {"work": name, "ms": 2.0, "fastest_ms": 1.9, "peak_bytes": 2**31, "system_allocations": 0.25}
    if name == "add_bf16":
        sys.exit("cairn_works: no memory was left")
    if name in ("gelu_bf16", "o2_update_124m_bf16"):
        row |= {"bytes": 8e9, "kernels": "^map_kernel<Unary<BFloat16>", "share": 0.9, "loop_ms": 1.8}
    if name.startswith("gpt2"):
        row |= {"operations": 1.2e13, "items": 16384}
    if name == "gpt2_124m_o2":
        row |= {"share": 2.5, "loop_ms": 5.0}
    if name.startswith(("lengths", "captured")):
        row |= {"items": 4096, "share": 0.95, "loop_ms": 1.9}
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


PAIR = r"""
import json, sys
if sys.argv[-1] == "copies":
    print(json.dumps({"figure": "copy between GPUs", "ms": 2.0, "gb_s": 150.0}))
elif sys.argv[-1] == "bandwidth":
    print(json.dumps({"figure": "all_reduce", "bytes": 8192, "ms": 0.02, "bus_gb_s": 0.4}))
else:
    print(json.dumps({"figure": "overlap", "ms": 2.0, "alone_ms": 1.8, "delayed_ms": 2.5, "hidden": 0.7}))
"""
# cairn-run: the program that it is given, once.
LAUNCHER = """
import subprocess, sys
for line in subprocess.run(sys.argv[3:], capture_output=True, text=True).stdout.splitlines():
    print("[rank 0]", line)
"""


class Phases(unittest.TestCase):
    def test_come_in_the_order_of_importance_and_fill_four_calls_of_ten_minutes(self):
        usual = [(name, minutes, call) for name, minutes, _, call in gpu_check_run.PHASES if call]
        order = [name for name, _, _ in usual]
        important = ["suite", "gpt2", "attention", "updates", "memory", "convnet", "products"]
        self.assertEqual([name for name in order if name in important], important)
        self.assertEqual([call for _, _, call in usual], sorted(call for _, _, call in usual))
        for call in (1, 2, 3, 4):
            self.assertEqual(sum(minutes for _, minutes, its in usual if its == call), 10, call)
        self.assertTrue({"lengths", "graphs", "recovery", "two_gpus"} <= set(order))


class Run(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name)
        (self.path / "bin").mkdir()
        self.program("bin/cairn_works", WORKS)
        self.program("torch", TORCH)
        (self.path / "cuda_report.json").write_text(json.dumps([{"kernel": "map_kernel<Unary<BFloat16>, BFloat16, BFloat16>",
                                                                 "architecture": "90", "share": share}
                                                                for share in (0.5, 1.86)]))

    def tearDown(self):
        self.folder.cleanup()

    def program(self, name, text):
        path = self.path / name
        path.write_text(f"#!{sys.executable}\n{text}")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    def run_phases(self, phases, *more):
        """(status, rows by what they are of). `phases`: a list of names, or the number of a call."""
        which = ["--call", str(phases)] if isinstance(phases, int) else ["--only", phases]
        done = subprocess.run([sys.executable, "-B", ROOT / "scripts/gpu_check_run.py", "--programs", self.path,
                               "--out", self.path / "out", *which, "--python", self.path / "torch", *more],
                              capture_output=True, text=True, timeout=100,
                              env={**os.environ, "PATH": f"{self.path}:{os.environ['PATH']}"})
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
        self.assertEqual((rows["test_amp"]["ok"], rows["test_amp"]["note"]),
                         (False, "ended with status -6 in Suite.Second"))
        self.assertEqual((rows["test_nn"]["ok"], rows["test_nn"]["measured"]),
                         (True, "2 of 3 passed, 0 failed, 1 skipped"))
        self.assertEqual(rows["test_optim"]["measured"], "not packed")

    def test_time_that_is_up_is_no_failure_and_later_phases_are_not_begun(self):
        self.program("bin/test_core", TESTS.replace("WHAT", "'hang'"))
        status, rows = self.run_phases("suite,memory", "--minutes", "0.15")
        self.assertEqual(status, 0)
        self.assertEqual(rows["test_core"]["note"], "time was up in Suite.Second")
        self.assertEqual(rows["memory"]["measured"], "not begun: no time was left")

    def test_a_call_runs_its_phases_alone(self):
        _, rows = self.run_phases(2)
        # there is no work of attention's
        self.assertEqual({row["phase"] for row in rows.values()}, {"gpt2", "updates"})

    def test_lengths_that_change_and_captured_steps(self):
        _, rows = self.run_phases("lengths,graphs")
        lengths = rows["lengths_gpt2_124m_o2"]
        self.assertEqual((lengths["measured"], lengths["met"]), (0.95, True))
        self.assertIn("0.25 requests of the system", lengths["note"])
        self.assertEqual(rows["captured_blocks_384_o2"]["met"], False)

    def test_out_of_memory_and_on(self):
        self.program("bin/gpu_recovery", "import sys; sys.exit('weights differ')")
        status, rows = self.run_phases("recovery")
        row = rows["out of memory, and on"]
        self.assertEqual((status, row["ok"], row["note"]), (1, False, "weights differ"))

    def test_f8_is_left_out_with_a_sentence(self):
        _, rows = self.run_phases("products")
        self.assertIn("left out", rows["products in f8"]["measured"])

    def test_a_text_is_trained_on_where_one_is_named(self):
        self.assertIn("--text names no file", self.run_phases("text")[1]["text"]["measured"])
        self.program("bin/char_lm", """import json, pathlib, sys
told = dict(zip(sys.argv[1::2], sys.argv[2::2]))
folder = pathlib.Path(told["--observe"])
folder.mkdir(parents=True)
loss = 1.48 if told["--text"].endswith("plays.txt") and told["--opt-level"] != "O1" else 2.0
(folder / "metrics.jsonl").write_text(json.dumps({"test_loss": loss, "tokens_per_second": 9}))
""")
        status, rows = self.run_phases("text", "--text", self.path / "plays.txt")
        self.assertEqual(status, 1)
        self.assertEqual(rows["nanoGPT's text O2"]["measured"], "test_loss 1.4800, 9 tokens/s")
        self.assertEqual([rows[f"nanoGPT's text {level}"]["ok"] for level in ("O0", "O1", "O2")], [True, False, True])

    def test_two_gpus_are_skipped_with_a_sentence_where_there_is_one(self):
        self.program("nvidia-smi", "print('GPU 0: NVIDIA H200 (UUID: GPU-0)')")
        status, rows = self.run_phases("two_gpus")
        self.assertEqual(status, 0)
        self.assertEqual(rows["two GPUs"]["measured"], "skipped: the machine has 1 GPU, and NCCL takes one rank a GPU")

    def test_two_gpus(self):
        self.program("nvidia-smi", "print('GPU 0: NVIDIA H200\\nGPU 1: NVIDIA H200')")
        self.program("bin/gpu_pair", PAIR)
        self.program("bin/cairn-run", LAUNCHER)
        self.program("bin/test_parallel", TESTS.replace("WHAT", "'good'"))
        status, rows = self.run_phases("two_gpus")
        self.assertEqual(status, 0)
        self.assertEqual(rows["copy between GPUs"]["measured"], 150.0)
        self.assertEqual(rows["all_reduce, 8,192 bytes"]["measured"], 0.4)
        self.assertEqual(rows["all_reduces hidden by backward"]["measured"], 0.7)
        self.assertEqual(rows["NCCL's ranks, killed and aborted ones, captured steps"]["measured"],
                         "2 of 3 passed, 0 failed, 1 skipped")
        self.assertEqual(rows["sharding"]["measured"], "not packed")

    def test_results_and_logs_are_one_archive_of_bounded_size(self):
        self.program("bin/gpu_recovery",
                     "import random; print('begin'); print(random.Random(1).randbytes(1 << 21).hex()); print('end')")
        self.run_phases("recovery,products")
        archive = self.path / "out/results.tar.xz"
        self.assertLess(archive.stat().st_size, 2 << 20)
        with tarfile.open(archive) as packed:
            self.assertTrue({"results.md", "results.json", "logs/recovery.log",
                             "logs/cairn_works.log"} <= set(packed.getnames()))
            log = packed.extractfile("logs/recovery.log").read().decode()
        self.assertTrue(log.startswith("begin") and log.endswith("end\n"))
        self.assertIn("the middle was left out", log)

    def test_logs_beyond_the_limit_are_named(self):
        logs = self.path / "out/logs"
        logs.mkdir(parents=True)
        for i in range(70):
            (logs / f"old{i}.log").write_bytes(bytes(1 << 20))
            os.utime(logs / f"old{i}.log", (i + 1, i + 1))
        self.run_phases("products")
        with tarfile.open(self.path / "out/results.tar.xz") as packed:
            names = set(packed.getnames())
            self.assertIn("old0.log", packed.extractfile("logs/left_out").read().decode())
        self.assertTrue("logs/old69.log" in names and "logs/old0.log" not in names)

    def test_what_another_run_found_stays(self):
        self.run_phases("products")
        _, rows = self.run_phases("updates")
        self.assertIn("matmul_8192_bf16", rows)


if __name__ == "__main__":
    unittest.main()
