"""./book new: a chapter of one's own is in order at once, and needs no line elsewhere."""
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tools import chapters  # noqa: E402
from tools.base import BookError  # noqa: E402
from tools.book import delta, new, weave  # noqa: E402

BUILD = "build/release"  # laid out as the original: an object cache knows what the copies share


class New(unittest.TestCase):
    """In a copy of the tree, without what is built or run there."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="test_new_")
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name).resolve() / "tree"
        shutil.copytree(ROOT, self.root, symlinks=True, ignore=lambda path, names: [
            name for name in names if name in ("build", "runs", ".git", "__pycache__")])
        self.before = chapters.find_chapters(self.root)
        self.last = self.before[-1]
        self.ranked = [chapter for chapter in self.before
                       if chapter.ranks and not chapter.is_begun][-1]

    def begin(self, *arguments):
        return subprocess.run([sys.executable, "book", "new", *arguments], cwd=self.root, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, check=False)

    def configure(self):
        """What CMake makes of the tests: {name: description}."""
        done = subprocess.run(["cmake", "--preset", "release"], cwd=self.root, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
        self.assertEqual(done.returncode, 0, done.stdout)
        return json.loads((self.root / BUILD / "tests.json").read_text())

    def test_it_is_in_order_at_once(self):
        done = self.begin("demo", "--parent", self.ranked.short)
        self.assertEqual(done.returncode, 0, done.stderr)
        name = "ch90_demo"
        self.assertIn(f"{name} is a copy of {self.ranked.name}", done.stdout)
        self.assertEqual(delta.check(name, self.root), [])
        chapter = chapters.resolve(name, self.root)
        self.assertEqual((chapter.ranks, chapter.title), (self.ranked.ranks, "Demo"))
        self.assertTrue(chapter.is_begun)
        self.assertFalse((self.root / name / "figures").exists())
        self.assertFalse((self.root / name / "examples").exists())
        readme = self.root / name / "README.md"
        self.assertEqual(weave.woven(readme.read_text(), readme.parent), readme.read_text())
        for command in re.findall(r"^\./book (\w+)", readme.read_text(), re.M):
            self.assertIn(command, ("run", "test", "diff"))

    def test_one_that_is_interrupted_leaves_nothing_in_the_way(self):
        with mock.patch.object(new.changes, "page", side_effect=KeyboardInterrupt):
            self.assertRaises(KeyboardInterrupt, new.begin_chapter, "demo", root=self.root)
        self.assertEqual(chapters.find_chapters(self.root), self.before)
        self.assertFalse((self.root / "ch90_demo").exists())

    def test_its_number_is_no_chapter_to_come(self):
        self.assertEqual(self.begin("demo").returncode, 0)
        self.assertEqual(self.begin("second").returncode, 0)
        self.assertEqual([chapter.name for chapter in chapters.find_chapters(self.root)],
                         [*(chapter.name for chapter in self.before), "ch90_demo", "ch91_second"])
        for wanted in ("90", "ch90", "demo", "ch90_demo", "demo/"):
            self.assertEqual(chapters.resolve(wanted, self.root).name, "ch90_demo", wanted)
        self.assertEqual(chapters.resolve(self.last.name[5:], self.root), self.last)
        (self.root / "ch91_second").rename(self.root / "ch99_second")
        done = self.begin("third")
        self.assertEqual(done.returncode, 2)
        self.assertIn("90 to 99, and there is a ch99_second already", done.stderr)

    def test_the_parent_left_out_is_the_last_chapter(self):
        self.assertEqual(self.begin("demo").returncode, 0)
        name = "ch90_demo"
        self.assertEqual(delta.read_manifest(name, self.root).parent, self.last.name)

    def test_names_that_cannot_be_are_refused_with_one_that_can(self):
        there = next(chapter.name for chapter in reversed(self.before)
                     if chapter.name[5].isalpha())  # so that its name could be given again
        for name, hint in (("Demo", "./book new demo"), ("a b", "./book new a_b"), ("", "new demo"),
                           ("9x", "./book new x"), ("../x", "./book new x"), ("a__b", "new a_b"),
                           ("x" * 41, "40 characters"), (there[5:], there),
                           ("ch07_x", "./book new x")):
            with self.assertRaises(BookError) as caught:
                new.begin_chapter(name, None, self.root)
            self.assertEqual(caught.exception.code, 2)
            self.assertIn(hint, str(caught.exception))
        self.assertEqual(self.begin("demo", "--parent", "ch77").returncode, 2)
        self.assertEqual(chapters.find_chapters(self.root), self.before)

    @unittest.skipIf(shutil.which("cmake") is None, "no cmake here")
    def test_tests_are_compiled_where_they_say_something_new(self):
        before = self.configure()
        lost = [source for test in before.values() for source in test["sources"]
                if not (self.root / "tests" / source).is_file()]
        self.assertEqual(lost, [])  # ./book test reads their cases
        self.begin("demo", "--parent", self.ranked.short)
        name = "ch90_demo"
        tests = self.configure()

        def sources(chapter, among):
            test = among.get(f"technique.{chapter}", {"sources": []})
            return {source.split("/")[-1][:-4] for source in test["sources"]}

        carried = sources(self.ranked.name, tests)
        self.assertEqual(carried - sources(name, tests), set(), "not tested at the end of a chain")
        self.assertEqual(sources(name, tests), sources(self.last.name, before))
        manifest = delta.read_manifest(self.ranked.name, self.root)
        changed = {Path(file).stem for file in [*manifest.adds, *manifest.edits]}
        self.assertLessEqual(carried, changed)
        self.assertTrue({Path(file).stem for file in manifest.adds} & carried)
        first = self.before[0].name
        self.assertEqual(sources(first, tests), sources(first, before))
        self.assertIn(name, tests["parity.ranks"]["targets"])
        self.assertNotIn("only_in_all", tests["parity.ranks"])
        older = [test for test in tests if re.match(rf"parity\.mpi4\.(?!{name}$)", test)]
        self.assertTrue(older and all(tests[test]["only_in_all"] for test in older), older)

    @unittest.skipUnless("USP_TEST_ALL" in os.environ, "builds a chapter: --all")
    def test_it_passes_its_tests(self):
        """A copy of the first chapter with ranks, which takes as long however many chapters follow."""
        parent = next(chapter for chapter in self.before if chapter.ranks)
        self.assertEqual(self.begin("demo", "--parent", parent.short).returncode, 0)
        name = "ch90_demo"
        tests = self.configure()
        self.assertTrue({f"{technique}.cpp" for technique in ("train_step", "strategy")} <=
                        {Path(source).name for source in tests[f"technique.{name}"]["sources"]})
        subprocess.run(["ninja", "-C", BUILD, "-j2", f"test_{name}", name], cwd=self.root, check=True,
                       stdout=subprocess.DEVNULL)
        # It is a copy: pairs of settings will do, where its parent's tests run all of them.
        everyday = {key: value for key, value in os.environ.items() if key != "USP_TEST_FULL"}
        subprocess.run([self.root / BUILD / "bin" / f"test_{name}"], check=True,
                       stdout=subprocess.DEVNULL, env=everyday)


if __name__ == "__main__":
    unittest.main()
