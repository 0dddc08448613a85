"""Which seeded faults a run plants: those that changed since they were caught, others in turn. And
which refusals a test lifts to see what they prevent.

    python3 tests/course/test_faults.py       needs no build
"""
import json
import os
import re
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from ch07_5d.figures import typed_faults  # noqa: E402
from tools import chapters  # noqa: E402
from tools.exercise import own_code, planted  # noqa: E402
from tools.test import turns  # noqa: E402

runner = own_code.fault_runner()
PATCH = """What:    A sign is wrong.
Target:  {target}
Test:    {test}
Message: differs

--- a/{path}
+++ b/{path}
@@ -1,1 +1,1 @@
-x = 1;
+x = -1;
"""


class Choice(unittest.TestCase):
    """On a source tree with twelve faults, each in a file of its own."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.source = Path(folder.name)
        self.faults = [self.fault(f"fault{i:02}", f"target{i // 3}") for i in range(12)]
        record = self.source / "caught.json"
        for name, value in (("RECORD", record), ("HERE", self.source / "tests" / "faults")):
            patch = mock.patch.object(runner, name, value)
            patch.start()
            self.addCleanup(patch.stop)
        self.note(self.faults)

    def fault(self, name, target):
        (self.source / "tests" / "faults" / "tools").mkdir(parents=True, exist_ok=True)
        (self.source / f"{name}.cpp").write_text("x = 1;\n", encoding="utf-8")
        (self.source / "tests" / f"test_{name}.cpp").write_text(
            f'TEST_CASE("notices {name}") {{}}\n', encoding="utf-8")
        patch = self.source / "tests" / "faults" / "tools" / f"{name}.patch"
        patch.write_text(PATCH.format(target=target, test=f"notices {name}", path=f"{name}.cpp"),
                         encoding="utf-8")
        return runner.Fault(patch)

    def note(self, faults):
        runner.write_record(self.faults, self.source, {fault.name for fault in faults})

    def chosen(self, **environment):
        kept = {name: value for name, value in os.environ.items()
                if name not in ("USP_TEST_ALL", "USP_TEST_EVERYTHING", "USP_FAULTS")}
        with mock.patch.dict(os.environ, {**kept, **environment}, clear=True), \
                mock.patch("builtins.print"):
            return [fault.name for fault in runner.choose(self.faults, self.source)]

    def test_where_nothing_changed_a_sample(self):
        with mock.patch.object(runner, "SAMPLE", ("fault03",)):
            self.assertEqual(self.chosen(), ["fault03"])

    def test_a_changed_file_patch_or_test_chooses_the_fault(self):
        for path in ("fault04.cpp", "tests/faults/tools/fault04.patch", "tests/test_fault04.cpp"):
            before = (self.source / path).read_text(encoding="utf-8")
            after = before.replace("A sign", "The sign").replace("{}", "{ }")
            after = before + "//\n" if path == "fault04.cpp" else after
            (self.source / path).write_text(after, encoding="utf-8")
            self.faults[4] = runner.Fault(self.source / "tests" / "faults" / "tools" / "fault04.patch")
            with self.subTest(path):
                self.assertEqual(self.chosen(), ["fault04"])
            self.note([self.faults[4]])
            self.assertNotEqual(self.chosen(), ["fault04"])

    def test_all_tries_those_that_have_waited_longest_and_so_in_a_few_submissions_every_fault(self):
        (self.source / "fault11.cpp").write_text("//\nx = 1;\n", encoding="utf-8")
        seen, record = [], turns.Record(self.source / "turns.json")
        known = [f"faults:{fault.name}" for fault in self.faults]
        with mock.patch.object(turns, "RECORD", self.source / "turns.json"):
            for _ in range(12):
                chosen = self.chosen(USP_TEST_ALL="1")
                self.assertIn("fault11", chosen)
                self.assertEqual(len(chosen), len(set(chosen)))
                self.assertLessEqual(len(chosen), 3)
                seen += chosen
                record.note([f"faults:{name}" for name in chosen], known)
                record.write()
        self.assertEqual(set(seen), {fault.name for fault in self.faults})

    def test_changed_ones_follow_their_wait_and_book_test_may_name_some(self):
        for number in (2, 7, 9):
            (self.source / f"fault{number:02}.cpp").write_text("//\nx = 1;\n", encoding="utf-8")
        record = turns.Record(self.source / "turns.json")
        record.note(["faults:fault02"], ["faults:fault02"])
        record.write()
        with mock.patch.object(turns, "RECORD", self.source / "turns.json"):
            self.assertEqual(self.chosen(), ["fault07", "fault09", "fault02"])
        self.assertEqual(self.chosen(USP_FAULTS="fault03 fault05"), ["fault03", "fault05"])

    def test_when_its_seconds_are_used_a_run_says_how_many_remain(self):
        said, tree = [], mock.Mock(digest="", root=self.source, built=set())
        tree.run.return_value = (0, "")
        with mock.patch.object(runner, "try_fault", lambda *_: (runner.CAUGHT, "")), \
                mock.patch.object(runner.turns, "FAULTS_TOGETHER", 5), \
                mock.patch("builtins.print", lambda *words, **_: said.append(" ".join(words))):
            code, caught = runner.run_faults([tree], self.faults, self.source / "cache.json", False, False, 1e-9)
            self.assertEqual((code, len(caught)), (0, 0))
            self.assertRegex("\n".join(said), "12 of 12 remain, and wait for their turn")
            code, caught = runner.run_faults([tree], self.faults, self.source / "cache.json", False, False, 60)
        self.assertEqual((code, len(caught)), (0, 12))
        self.assertEqual(len(json.loads((self.source / "tried.json").read_text(encoding="utf-8"))), 12)

    def test_a_test_that_is_skipped_says_nothing_of_its_fault(self):
        skipped = ("import unittest\nclass Alone(unittest.TestCase):\n%s    def test_it(self):\n        %s\n"
                   "unittest.main()\n")
        in_class = "    @classmethod\n    def setUpClass(cls):\n        raise unittest.SkipTest('no browser')\n"
        (self.source / "tests").mkdir(exist_ok=True)
        tree = mock.Mock(root=self.source, build_dir=self.source, jobs=1)
        for text, code in ((skipped % (in_class, "pass"), runner.SKIPPED),
                           (skipped % ("", "self.skipTest('no browser')"), runner.SKIPPED),
                           (skipped % ("", "pass"), 0), (skipped % ("", "self.fail()"), 1)):
            (self.source / "tests/test_alone.py").write_text(text, encoding="utf-8")
            self.assertEqual(runner.Tree.run(tree, runner.NO_TARGET, "tests/test_alone.py Alone.test_it")[0], code)

    def test_newest_is_the_last_chapter(self):
        for chapter in ("ch01_a", "ch10_b", "ch09_c"):
            (self.source / chapter).mkdir()
            (self.source / chapter / "chapter.json").touch()
        (self.source / "ch11_no_chapter_yet").mkdir()
        patch = self.source / "tests" / "faults" / "model" / "fault12.patch"
        patch.parent.mkdir()
        patch.write_text(PATCH.format(target="test_newest", test="", path="newest/x.cpp")
                         .replace("Test:    ", "Test:    a case"), encoding="utf-8")
        fault = runner.Fault(patch)
        self.assertEqual(fault.target, "test_ch10_b")
        self.assertEqual([path for path, _, _ in fault.hunks], ["ch10_b/x.cpp"])

    def test_a_fault_lies_in_the_room_of_what_it_patches_under_a_name_of_its_own(self):
        for path, room in (("ch02_data_parallel/data_parallel/zero.cpp", "data_parallel"),
                           ("newest/train_step.cpp", "model"), ("common/cuda/loaded/nccl.cpp", "cuda"),
                           ("common/CMakeLists.txt", "tools"), (".ci/run", "tools"),
                           ("tests/technique/case_cover.h", "tests")):
            self.assertEqual(runner.room_of(path), room)
        self.assertEqual(len(runner.read_faults()), 12)
        patch = self.source / "tests" / "faults" / "tools" / "fault04.patch"
        elsewhere = self.source / "tests" / "faults" / "cpu" / "fault04.patch"
        elsewhere.parent.mkdir()
        elsewhere.write_text(patch.read_text(encoding="utf-8"), encoding="utf-8")
        with self.assertRaisesRegex(runner.FaultError, "fault04: two faults in (cpu|tools)/ and"):
            runner.read_faults()
        patch.unlink()
        with self.assertRaisesRegex(runner.FaultError, "belongs in tests/faults/tools/, not in cpu/"):
            runner.read_faults()

    def test_everything_is_everything(self):
        self.assertEqual(len(self.chosen(USP_TEST_ALL="1", USP_TEST_EVERYTHING="1")), 12)

    def test_the_record_forgets_what_is_gone_and_keeps_what_was_not_tried(self):
        before = json.loads(runner.RECORD.read_text(encoding="utf-8"))
        (self.source / "fault01.cpp").write_text("//\nx = 1;\n", encoding="utf-8")
        (self.source / "fault02.cpp").write_text("//\nx = 1;\n", encoding="utf-8")
        self.faults = self.faults[1:]
        self.note([self.faults[0]])
        after = json.loads(runner.RECORD.read_text(encoding="utf-8"))
        self.assertEqual(sorted(after), [fault.name for fault in self.faults])
        self.assertNotEqual(after["fault01"], before["fault01"])
        self.assertEqual(after["fault02"], before["fault02"])


class LiftedRules(unittest.TestCase):
    """Each refusal that says "wrong" or "hangs" is lifted by tests/technique/proof/compositions.cpp, or cannot be."""

    maxDiff = None
    KINDS = {"refuse": "wrong", "refuse_hang": "hangs", "refuse_silent": "silent"}
    BY_NAME = {"divides": "wrong", "gives_each": "silent"}  # functions of region.cpp that refuse by a name they get
    PIPEDREAM = "PipeDream does not compute what one process does, with or without it"
    OF_DATA = "it is about the data of a run, and these runs draw their own"
    OF_SIZE = "what cannot be counted has no machine that runs it"
    CANNOT = {"mesh_of_all_ranks": "it compares flags with how many ranks were started",
              "bias_of_the_model": "it needs the files of a model whose routers have biases",
              "tp_of_tokens": "from chapter 4 on tp_of_rows refuses the same, too",
              "turns_of_whole_weights": "turns_of_file refuses the same, too",
              "layers_of_stages": "layers_in_list refuses the same, too",
              "work_of_stages": "a stage of nothing ends the run by a signal",
              "times_before_steps": "it is about printing a schedule, after which nothing trains",
              "tokens_of_vocabulary": OF_DATA, "training_tokens": OF_DATA, "tokens_of_sample": OF_DATA,
              "prompt_of_tokens": OF_DATA, "tokens_at_once": OF_SIZE, "bytes_at_once": OF_SIZE,
              "weights_that_count": OF_SIZE,
              "positions_of_model": "that the model was made for shorter sequences shows in what it writes",
              "waves_of_yarn": "its frequencies are no numbers, on one process as on several",
              "stale_updates_in_one_order": PIPEDREAM, "stale_updates_of_whole_weights": PIPEDREAM,
              "stale_updates_of_one_stage": PIPEDREAM, "stale_updates_after_micro_batches": PIPEDREAM,
              "stale_updates_between_passes": PIPEDREAM, "stale_updates_without_norm": PIPEDREAM}

    def rules(self, text):
        """{rule: kinds} of the refusals of a source."""
        found = {}
        for call, rule in re.findall(r'(?<![.>\w])(\w+)\(\s*"([a-z]+(?:_[a-z0-9]+)+)"\s*,', text):
            kind = {**self.KINDS, **self.BY_NAME}.get(call)
            if kind is not None:
                found.setdefault(rule, set()).add(kind)
        return found

    def sources(self):
        for folder in [ROOT / "common", *ROOT.glob("ch[0-9][0-9]_*")]:
            yield from (path for path in folder.rglob("*") if path.suffix in (".h", ".cpp")
                        and "exercises" not in path.parts and path.name != "rules.h")

    def test_each_has_a_row_or_a_reason(self):
        kinds, by_name = {}, set()
        for path in self.sources():
            text = path.read_text(encoding="utf-8")
            for rule, found in self.rules(text).items():
                kinds.setdefault(rule, set()).update(found)
            if re.search(r"\brefuse(?:_hang|_silent)?\(\s*rule\b", text):
                by_name.add(path.name)
        self.assertEqual(by_name, {"region.cpp"}, "another function refuses by a name; see BY_NAME")
        self.assertEqual({rule: found for rule, found in kinds.items() if len(found) > 1}, {})
        rows = dict(re.findall(r'\{"(\w+)", (wrong|hangs|silent),',
                               (ROOT / "tests/technique/proof/compositions.cpp").read_text(encoding="utf-8")))
        self.assertGreater(len(rows), 40)
        wanted = {rule: kind for rule, (kind,) in kinds.items() if rule not in self.CANNOT}
        self.assertEqual(rows, wanted, "rows of refused_flags(), and rules that exist; CANNOT says why not")
        self.assertLessEqual(set(self.CANNOT), set(kinds), "a reason for no rule")

    def test_a_rule_is_read_whatever_its_lines(self):
        self.assertEqual(self.rules('refuse_hang(\n    "full_pipe", x);\nrefuse("a_b", y); divides("c_d", z, 1);'),
                         {"full_pipe": {"hangs"}, "a_b": {"wrong"}, "c_d": {"wrong"}})


class OfClasses(unittest.TestCase):
    """Those that tests/technique/proof/classes.cpp has to tell apart."""
    text = (ROOT / "tests/technique/proof/classes.cpp").read_text(encoding="utf-8")

    def faults_of(self, message):
        """{what a message names: its faults}"""
        named = {}
        for fault in runner.read_faults():
            found = re.fullmatch(message, fault.message.replace(r"\s+", " "))  # Catch2 breaks lines
            if found and f'TEST_CASE("{fault.test}"' in self.text:
                named.setdefault(re.sub(r"\\(.)", r"\1", found[1]), []).append(fault.name)
        return named

    def test_each_class_has_one_that_shows_in_it_alone(self):
        rows = re.findall(r'^    \{"([^"]+)",$|^    \{"([^"]+)", "--', self.text, re.M)
        self.assertGreater(len(rows), 70)
        self.assertEqual(sorted(self.faults_of(r'class "(.+)" alone differs')), sorted(a + b for a, b in rows))

    def test_each_recipe_has_one_that_a_naive_twin_misses(self):
        recipes = {path.stem for path in (ROOT / "ch07_5d/recipes").glob("*.json")} - {"laptop"}
        self.assertEqual(set(re.findall(r'Recipe\{"(\w+)",', self.text)), recipes)
        self.assertEqual(set(self.faults_of(r"(\w+): only its twins differ")), recipes)


class OfTypes(unittest.TestCase):
    """Those that chapter 7's page says types name, or do not."""
    record = typed_faults.read_json(typed_faults.FOLDER / "typed_faults.json")

    def test_each_fits_the_chapter_and_has_been_planted_in_its_layout(self):
        for name in typed_faults.FAULTS:
            planted.fault_in(name, chapters.resolve("ch07"))
        self.assertEqual({name: own["layout"] for name, own in self.record["faults"].items()}, typed_faults.FAULTS)

    def test_every_class_follows_from_what_was_said_and_what_is_not_named_has_a_reason(self):
        for name, own in self.record["faults"].items():
            if own["class"] not in (typed_faults.REFUSED, typed_faults.SILENT):
                self.assertEqual(typed_faults.class_of(own["says"]), own["class"], name)
        silent = typed_faults.named_in(self.record, typed_faults.SILENT)
        self.assertEqual(sorted(typed_faults.REASONS), silent)

    def test_the_page_has_their_counts(self):
        for name, text in typed_faults.texts(self.record).items():
            self.assertEqual((typed_faults.FOLDER / name).read_text(encoding="utf-8"), text)
        page = (typed_faults.FOLDER.parent / "types.md").read_text(encoding="utf-8")
        named = sum(len(typed_faults.named_in(self.record, own)) for own in typed_faults.NAMED)
        asked = len(self.record["faults"]) - len(typed_faults.named_in(self.record, typed_faults.REFUSED))
        self.assertGreaterEqual(named, 36)
        self.assertIn(f"{named} of {asked}", page)

    def test_the_page_has_all_operations_with_rules_of_their_own(self):
        page = (typed_faults.FOLDER.parent / "types.md").read_text(encoding="utf-8")
        rules = (ROOT / "common/types/rules.cpp").read_text(encoding="utf-8")
        tests = (ROOT / "tests/technique/proof/types.cpp").read_text(encoding="utf-8")
        own = re.findall(r'"(\w+)"', re.search(r"string_view> known = \{(.+?)\};", tests, re.S)[1])
        rows = page[page.index("| operations with rules of their own"):page.index("A test holds every answer of a schema")]
        self.assertEqual(sorted(re.findall(r"`(\w+_\w+|fill|copy|rope|adamw)`", rows)), sorted(own))
        table = re.search(r"vector<Row> rows = \{(.+?)\n  \};", rules, re.S)[1]
        total = len(re.findall(r'"\w+"', table))
        self.assertIn(f"{total - len(own) - 6} of the {total} operations", page)
        self.assertIn(f"the other {len(own)}", page)


if __name__ == "__main__":
    unittest.main()
