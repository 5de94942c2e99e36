"""scripts/gpu_check pack, of a program on simulated GPUs: what is packed unpacks and starts elsewhere, and what is too large is no pack.
Argument: the folder of the build."""
import os
import subprocess
import sys
import tarfile
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


class Pack(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = Path(folder.name)

    def bash(self, commands):
        """With the script's functions, and a pack in this test's folder."""
        begin = f"source $0 --help >/dev/null; pack={self.path} built={BUILD}; "
        return subprocess.run(["bash", "-c", begin + commands, ROOT / "scripts/gpu_check"], text=True, capture_output=True,
                              env={**os.environ, "XZ_OPT": "-0"})  # which is soon done

    @unittest.skipUnless((ROOT / ".git").exists(), "what is packed is what git lists")
    def test_runs_where_it_is_unpacked(self):
        made = self.bash(f"gather {self.path}/files gpu_recovery && compress {self.path}/files")
        self.assertEqual(made.returncode, 0, made.stderr)
        with tarfile.open(self.path / "pack.tar.xz") as archive:
            archive.extractall(self.path / "there", filter="data")
        done = subprocess.run([self.path / "there/scripts/gpu_check", "run", "--sim", "--only", "machine,recovery", "--minutes", "2"], text=True,
                              capture_output=True, cwd="/")
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertIn("goes on", (self.path / "there/runs/gpu_check/results.md").read_text())

    def test_over_the_limit_is_removed_and_says_what_is_large(self):
        files = self.path / "files/lib"
        files.mkdir(parents=True)
        for name, size in (("libsmall.so", 50_000), ("liblarge.so", 2_000_000)):
            (files / name).write_bytes(os.urandom(size))
        done = self.bash(f"limit=$((1 << 20)); compress {self.path}/files")
        self.assertEqual(done.returncode, 1, done.stdout)
        self.assertRegex(done.stderr, r"expected a pack of at most 1024 KiB, got \d+ KiB .* largest: 19\d\d KiB lib/liblarge.so, \d+ KiB lib/libsmall.so\n$")
        self.assertFalse((self.path / "pack.tar.xz").exists())
        done = self.bash(f"limit=$((2 << 20)); compress {self.path}/files")
        self.assertEqual(done.returncode, 0, done.stderr)


if __name__ == "__main__":
    BUILD = Path(sys.argv.pop(1)).resolve()
    unittest.main()
