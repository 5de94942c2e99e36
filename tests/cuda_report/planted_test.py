"""scripts/cuda_report finds each fault of planted.cu, and none where there is none."""
import json
import subprocess
import tempfile
import unittest
from pathlib import Path

HERE = Path(__file__).resolve().parent
SCRIPT = HERE.parent.parent / "scripts/cuda_report"
EXPECTED = {
    "good_kernel": [],
    "narrow_stores_kernel": ["stores of 4 bytes in a main loop", "no loop with stores of 16"],
    "narrow_loads_kernel": ["loads of 4 bytes in a main loop"],
    "single_elements_kernel": ["no loop with loads of 16", "no loop with stores of 16"],
    "local_frame_kernel": ["accesses to a local frame of 128 bytes in a loop"],
    "spill_kernel": ["spills"],
    "unlisted_kernel": ["says what bounds it"],
}


def report(*arguments):
    return subprocess.run([SCRIPT, *map(str, arguments)], capture_output=True, text=True)


class Planted(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        with tempfile.TemporaryDirectory() as folder:
            rows = Path(folder) / "rows.json"
            cls.result = report("--arch", "90", "--rules", HERE / "planted_rules.json", "--json", rows,
                                HERE / "planted.cu")
            cls.rows = {row["kernel"]: row for row in json.loads(rows.read_text())}

    def test_fails_and_names_the_kernels(self):
        self.assertEqual(self.result.returncode, 1, self.result.stderr)
        for kernel, errors in EXPECTED.items():
            self.assertEqual(f"error: sm_90 {kernel}:" in self.result.stdout, bool(errors), kernel)

    def test_finds_each_fault(self):
        for kernel, errors in EXPECTED.items():
            found = "; ".join(self.rows[kernel]["errors"])
            for error in errors:
                self.assertIn(error, found, kernel)

    def test_finds_no_fault_in_the_good_kernel(self):
        good = self.rows["good_kernel"]
        self.assertEqual(good["errors"], [])
        self.assertEqual((set(good["loads"]), set(good["stores"])), ({"16"}, {"16"}))
        self.assertEqual((good["flight_loads"], good["flight_bytes"]), (1, 16))
        self.assertEqual(good["resident"], 2048)

    def test_passes_where_all_is_well(self):
        with tempfile.TemporaryDirectory() as folder:
            alone = Path(folder) / "good.cu"
            text = (HERE / "planted.cu").read_text()
            alone.write_text(text[:text.index("/// Loads in packs")])
            result = report("--arch", "80", "--arch", "90", "--rules", HERE / "planted_rules.json", alone)
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        self.assertIn("2 kernels, 2 bound by memory, 0 with errors", result.stdout)


if __name__ == "__main__":
    unittest.main()
