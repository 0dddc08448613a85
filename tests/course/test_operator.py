"""docs/first_operator.md: its patch applies, touches what the page names, and the operator works."""
import os
import re
import shutil
import subprocess
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE, PATCH = ROOT / "docs" / "first_operator.md", ROOT / "docs" / "first_operator.patch"
BUILD = "build/release"  # laid out as the original: an object cache knows what the copies share
MOST = 6


class Operator(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="test_operator_")
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name).resolve() / "tree"
        self.files = re.findall(r"^\+\+\+ b/(\S+)", PATCH.read_text(encoding="utf-8"), re.M)

    def apply(self):
        subprocess.run(["git", "apply", PATCH], cwd=self.root, check=True)

    def test_the_patch_applies_to_the_files_that_the_page_names(self):
        for file in self.files:
            (self.root / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / file, self.root / file)
        self.apply()
        for file in self.files:
            self.assertIn("gelu_forward", (self.root / file).read_text(encoding="utf-8"), file)
        named = re.findall(r"^\| `([\w/.]+)` \|", PAGE.read_text(encoding="utf-8"), re.M)
        self.assertEqual(sorted(named), sorted(self.files))
        self.assertLessEqual(len(named), MOST)

    @unittest.skipUnless("USP_TEST_ALL" in os.environ, "builds the unit tests: --all")
    def test_the_operator_works_and_its_test_sees_a_wrong_sign(self):
        shutil.copytree(ROOT, self.root, symlinks=True, ignore=lambda path, names: [
            name for name in names if name in ("build", "runs", ".git", "__pycache__")])
        self.apply()
        subprocess.run(["cmake", "--preset", "release", "-DUSP_TESTS=ON"], cwd=self.root, check=True,
                       stdout=subprocess.DEVNULL)
        done = self.build_and_test()
        self.assertEqual(done.returncode, 0, done.stdout)
        self.assertIn("2 test cases", done.stdout)
        kernel = self.root / "common/cpu/elementwise.cpp"
        text = kernel.read_text(encoding="utf-8")
        self.assertEqual(text.count("s * (1 + v * (kSlope"), 1)
        kernel.write_text(text.replace("s * (1 + v * (kSlope", "s * (1 - v * (kSlope"), encoding="utf-8")
        done = self.build_and_test()
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("1 passed | 1 failed", done.stdout)

    def build_and_test(self):
        subprocess.run(["ninja", "-C", BUILD, "-j2", "test_common"], cwd=self.root, check=True,
                       stdout=subprocess.DEVNULL)
        return subprocess.run([self.root / BUILD / "bin" / "test_common", "GELU*"], text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)


if __name__ == "__main__":
    unittest.main()
