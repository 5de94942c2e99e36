"""scripts/plant tells faults that tests see from those that none does and from those that cannot be tried. Argument: the folder of the build."""
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE = "optim/src/schedule.cpp"
DIES = "Dies: test_optim Schedule.*"


def patch(old, new, dies=DIES):
    lines = (ROOT / SOURCE).read_text().splitlines()
    at = next((i for i, line in enumerate(lines) if line.strip() == old), 0)
    return f"Something is wrong.\n\n{dies}\n\n--- a/{SOURCE}\n+++ b/{SOURCE}\n@@ -{at + 1},2 +{at + 1},2 @@\n-{lines[at] if at else old}\n+{new}\n {lines[at + 1]}\n"


FAULTS = {
    "seen": patch("if (!result.applied) return;", "if (result.applied) return;"),
    "unseen": patch("if (!result.applied) return;", "if (!result.applied) return;  // the same"),
    "outdated": patch("what no line says", "x"),
    "no_code": patch("if (!result.applied) return;", "if (!result.applied return;"),
    "no_tests": patch("if (!result.applied) return;", "", "Dies: test_optim NoSuch.*"),
}


class Plant(unittest.TestCase):
    def plant(self, *arguments):
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "optim").mkdir()
            for name, text in FAULTS.items():
                (Path(folder) / f"optim/{name}.patch").write_text(text)
            done = subprocess.run([ROOT / "scripts/plant", "--build", BUILD, "--faults", folder, *arguments], text=True,
                                  capture_output=True)
        return done.returncode, done.stdout + done.stderr

    def test_tells_what_became_of_each(self):
        status, output = self.plant()
        self.assertEqual(status, 1, output)
        self.assertRegex(output, r"optim/seen +died .* Schedule\.")
        self.assertRegex(output, r"optim/unseen +SURVIVED .* test_optim Schedule\.\*")
        self.assertRegex(output, r"optim/outdated +UNUSABLE .* the patch does not apply to optim/src/schedule.cpp")
        self.assertRegex(output, r"optim/no_code +UNUSABLE .* does not compile")
        self.assertRegex(output, r"optim/no_tests +UNUSABLE .* without the fault, test_optim NoSuch\.\* does not pass")
        self.assertTrue(output.endswith("1 died, 1 survived, 3 could not be tried\n"), output)

    def test_succeeds_where_all_die(self):
        status, output = self.plant("optim/seen")
        self.assertEqual((status, output.splitlines()[-1]), (0, "1 died, 0 survived"), output)

    def test_draws_by_a_seed(self):
        draws = [self.plant("--list", "--random", "2", "--seed", seed)[1] for seed in ["1", "1", *"23456789"]]
        self.assertEqual(draws[0], draws[1])
        self.assertIn("2 of 5 faults, --seed 1", draws[0])
        self.assertGreater(len({draw.split("\n", 1)[1] for draw in draws}), 1)

    def test_refuses_an_unknown_name(self):
        self.assertIn("there is no optim/sen: expected FOLDER or FOLDER/NAME", self.plant("optim/sen")[1])


if __name__ == "__main__":
    BUILD = sys.argv.pop()
    unittest.main()
