"""The exercises: starters are unsolved, solutions pass, wrong answers fail with their own words.

    python3 tests/course/test_exercises.py       builds the judges of the exercises in code

Random mistakes in a solution must not pass either: what a judge lets through has to give the same
values as the solution, on input that the judge has not seen. ./book test --all also runs the tests
that readers are asked to name, in a copy of the sources with the mistake, and those of chapters
that call the solutions: of one chapter in turn. With USP_TEST_EVERYTHING=1 all of them.
"""
import contextlib
import io
import os
import re
import shutil
import sys
import tempfile
import unittest
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tools import chapters  # noqa: E402
from tools.base import BookError  # noqa: E402
from tools.exercise import answers, check, exercises, own_code, planted, quantity  # noqa: E402
from tools.exercise.lab import Lab, NotYet, RecordedLab  # noqa: E402
from tools.run import build  # noqa: E402
from tools.test import testing  # noqa: E402

faults = own_code.fault_runner()

LEAST_MISTAKES = {"fill": 3, "table": 3, "predict": 2, "decide": 1, "break": 1}
LEAST_MUTANTS = 50    # over all exercises
OBSERVATIONS = "30"   # of a mutant that a judge lets pass, beside the solution
JUDGES_AT_A_TIME = 4  # most of them wait for ranks that wait for each other
TIMEOUT = 20          # seconds, for a judge
REFUSED = re.compile(r"^(mutant_\d+)\.cpp:\d+:\d+: (?:error|fatal error)", re.M)


def answer_in(page):
    """What the `- answer:` line of a solution says. ValueError if there is none."""
    match = re.search(r"^- answer: (.+)$", page.read_text(encoding="utf-8"), re.M)
    if not match:
        raise ValueError(f"{page}: the line `- answer: ...` is missing")
    return match[1]


def form_errors(exercise):
    """What is wrong with an exercise's files, as messages."""
    wrong = [f"{path.name} is missing" for path in needed_files(exercise) if not path.is_file()]
    if wrong:
        return wrong
    if exercise.kind == "fill":
        solution = exercise.solution(".cpp").read_text(encoding="utf-8")
        holes = len(exercises.HOLE.findall(solution))
        if holes < 1:
            wrong.append("the solution has no hole")
        if exercise.answer() != exercises.starter(solution, exercise.name):
            wrong.append("the starter is not the solution with a hole: is it solved already? "
                         "./book exercise --write writes it")
    elif not exercise.is_unsolved():
        wrong.append("the starter is solved already")
    count = len(answers.mistakes(exercise))
    if count < LEAST_MISTAKES[exercise.kind]:
        wrong.append(f"{count} known wrong answers, at least {LEAST_MISTAKES[exercise.kind]}")
    table = exercise.second_part()
    return wrong + (form_errors(table) if table else [])


def needed_files(exercise):
    """What an exercise of its kind consists of."""
    judge = {"fill": [exercise.beside(".judge.cpp"), exercise.solution(".cpp")],
             "predict": [exercise.beside(".judge.py")], "decide": [exercise.beside(".judge.py")],
             "table": [exercise.beside(".judge.py"), exercise.solution(".txt")],
             "break": [testing.find_fault(exercise.fields.get("fault")) or testing.FAULTS / "one that is there"]}
    return [exercise.answer_file, exercise.solution(".md"), exercise.wrong_answers(),
            *judge[exercise.kind]]


def code_errors(exercise, judge, mutants):
    """What is wrong with a C++ exercise's judge. judge(*arguments) is its exit code and output."""
    wrong = []
    with ThreadPoolExecutor(JUDGES_AT_A_TIME) as pool:
        known = answers.mistakes(exercise)
        names = ["solution", "starter", *(mistake.name for mistake in known), *mutants]
        verdicts = dict(zip(names, pool.map(judge, names)))
        passed = [name for name in mutants if verdicts[name][0] == check.RIGHT]
        same = dict(zip(passed, pool.map(
            lambda name: judge(name, "solution", OBSERVATIONS), passed)))
    code, output = verdicts["solution"]
    if code != check.RIGHT:
        wrong.append(f"the solution does not pass: {output}")
    if verdicts["starter"][0] != check.UNSOLVED:
        wrong.append("the starter is not unsolved")
    for mistake in known:
        code, output = verdicts[mistake.name]
        if code != check.NOT_YET:
            wrong.append(f"{mistake.name}: exit code {code}, it should fail")
        elif not output.startswith(mistake.says):
            wrong.append(f"{mistake.name}: the verdict should begin with\n  {mistake.says}\nand is"
                         f"\n  {output}")
    for name in mutants:
        if verdicts[name][0] not in (check.RIGHT, check.NOT_YET):
            wrong.append(f"{name}: exit code {verdicts[name][0]}: {verdicts[name][1]}")
    for name, (code, output) in same.items():
        if code != check.RIGHT:
            wrong.append(f"{name} passes, and gives other values than the solution: {output}")
    return wrong


def begun_by_a_reader(exercise):
    """Has somebody had an answer judged here? A fresh clone remembers none."""
    return not exercise.is_unsolved() and bool(exercises.Progress().entries.get(exercise.name))


class Form(unittest.TestCase):
    def test_every_exercise_has_its_parts_and_is_unsolved(self):
        for exercise in exercises.find_exercises():
            if begun_by_a_reader(exercise):
                continue
            self.assertEqual("\n".join(form_errors(exercise)), "", exercise.name)

    def test_numbers_are_consecutive_and_files_belong_to_an_exercise(self):
        for chapter in chapters.find_chapters():
            found = exercises.find_exercises(chapter=chapter)
            self.assertEqual([exercise.number for exercise in found],
                             list(range(1, len(found) + 1)), chapter.short)
            stems = {exercise.page.stem for exercise in found}
            for folder in (chapter.folder / "exercises", ROOT / "solutions" / chapter.name):
                for path in folder.glob("*.*") if folder.is_dir() else ():
                    self.assertIn(path.name.partition(".")[0], stems, str(path))

    def test_a_page_of_the_chapter_names_every_exercise(self):
        for exercise in exercises.find_exercises():
            pages = "".join(page.read_text(encoding="utf-8")
                            for page in exercise.chapter.folder.glob("*.md"))
            self.assertTrue(re.search(rf"\./book check {exercise.name}\b", pages),
                            f"no page names ./book check {exercise.name}")

    def test_links_of_the_tasks_lead_somewhere(self):
        for exercise in exercises.find_exercises():
            for target in re.findall(r"\]\(([^)#\s]+)", exercise.text):
                self.assertTrue((exercise.page.parent / target).exists(),
                                f"{exercise.page}: {target}")


class Code(unittest.TestCase):
    """Answers in C++, each judged by the program that judges a reader's."""

    @classmethod
    def setUpClass(cls):
        cls.found = [exercise for exercise in exercises.find_exercises()
                     if exercise.kind == "fill"]
        cls.mutants = {}
        build_courses(cls.found)

    def test_solutions_pass_starters_are_unsolved_wrong_answers_fail_with_their_words(self):
        total, wrong = 0, []
        for exercise in self.found:
            mutants = compiled_mutants(exercise)
            total += len(mutants)
            wrong += [f"{exercise.name}: {line}"
                      for line in code_errors(exercise, judge_of(exercise), mutants)]
        self.assertEqual("\n".join(wrong), "")
        self.assertGreaterEqual(total, LEAST_MUTANTS)


def build_courses(found):
    """Builds the judges of all answers. Mutants that do not compile are left out."""
    for _ in range(3):
        held = []
        try:
            with mock.patch("sys.stdout", io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                build.prepare(build.RELEASE, [exercise.target("course") for exercise in found],
                              held.append)
            return
        except BookError as error:
            names = set(REFUSED.findall("".join(held)))
            if not names:
                raise AssertionError(f"{error}\n{''.join(held)}") from None
            text = "".join(held)
            for exercise in found:
                # The object that failed is named before its messages.
                parts = re.split(r"^FAILED: ", text, flags=re.M)
                own = "".join(part for part in parts if exercise.target("course") in part[:400])
                refused = set(REFUSED.findall(own))
                if refused:
                    answers.refuse(exercise, source_of(exercise), refused)
                    source_of(exercise).unlink()
    raise AssertionError("the mutants do not compile")


def source_of(exercise):
    return build.build_dir(build.RELEASE) / "exercises" / f"{exercise.target('course')}.cpp"


def compiled_mutants(exercise):
    """The names of the mutants that the program has."""
    return re.findall(r'^ *\{"(mutant_\d+)"', source_of(exercise).read_text(encoding="utf-8"), re.M)


def judge_of(exercise):
    program = build.binary(build.RELEASE, exercise.target("course"))
    return lambda *arguments: check.run_judge(program, *arguments, timeout=TIMEOUT)


class Numbers(unittest.TestCase):
    """Predictions and settings, judged by what the programs say."""

    def test_solutions_pass_and_wrong_answers_fail_with_their_words(self):
        for exercise in exercises.find_exercises():
            if exercise.kind not in ("predict", "decide"):
                continue
            with self.subTest(exercise.name), lab_for(exercise):
                right = answer_in(exercise.solution(".md"))
                check.verdict(exercise, right)
                for mistake in answers.mistakes(exercise):
                    with self.assertRaises(NotYet, msg=mistake.name) as caught:
                        check.verdict(exercise, mistake.name)
                    self.assertTrue(caught.exception.lines[0].startswith(mistake.says),
                                    f"{mistake.name}: {caught.exception.lines}")


class CachedLab(Lab):
    """Runs and estimates each setting once; the files stay until the object goes."""

    def __init__(self):
        super().__init__()
        self.known = {}

    def __exit__(self, *_):
        pass

    def _once(self, method, *words, **flags):
        key = repr((method.__name__, words, sorted(flags.items())))
        if key not in self.known:
            self.known[key] = method(*words, **flags)
        return self.known[key]

    def estimate(self, chapter, **flags):
        return self._once(super().estimate, chapter, **flags)

    def run(self, chapter, **flags):
        return self._once(super().run, chapter, **flags)

    def plan(self, cluster, batch, words):
        return self._once(super().plan, str(cluster), batch, words)

    def kernels(self, name, *size):
        return self._once(super().kernels, name, *size)


def tables():
    """The exercises that ask for a table, and the second parts of those that ask for one beside code."""
    found = exercises.find_exercises()
    return [part for part in found + [exercise.second_part() for exercise in found]
            if part and part.kind == "table"]


class Tables(unittest.TestCase):
    """Tables, judged by what the programs make of them."""

    def test_solutions_pass_and_wrong_answers_fail_with_their_words(self):
        for exercise in tables():
            solution = exercise.solution(".txt").read_text(encoding="utf-8")
            with self.subTest(exercise.name), lab_for(exercise):
                check.verdict(exercise, solution)
                for mistake in answers.mistakes(exercise):
                    with self.assertRaises(NotYet, msg=mistake.name) as caught:
                        check.verdict(exercise, mistake.text(solution, exercise.name))
                    self.assertTrue(caught.exception.lines[0].startswith(mistake.says),
                                    f"{mistake.name}: {caught.exception.lines}")

    def test_what_a_reader_begins_with_is_not_right_without_its_mark(self):
        for exercise in tables():
            if begun_by_a_reader(exercise):
                continue
            lines = exercise.answer().splitlines(keepends=True)
            marked = [line for line in lines if line.strip() != exercises.UNANSWERED]
            self.assertEqual(len(lines) - len(marked), 1, exercise.name)
            with self.subTest(exercise.name), lab_for(exercise), self.assertRaises(NotYet):
                check.verdict(exercise, "".join(marked))


@contextlib.contextmanager
def lab_for(exercise):
    """Within it, what a judge asks the programs for a second time is not run again. Where times
    decide, nothing is run: the machine may be busy, and the runs are recorded ones."""
    runs = exercise.solution(".runs.json")
    lab = RecordedLab(runs) if runs.is_file() else CachedLab()
    with mock.patch.object(check, "Lab", lambda: lab), contextlib.redirect_stderr(io.StringIO()):
        yield
    lab.cleanup()


def mistake_before(exercise, mistake):
    """The NotYet on what a wrong answer has before the colon; None where only the test is wrong."""
    try:
        check.words_of_test(exercise, mistake.name)
    except NotYet as wrong:
        return wrong
    return None


def wrong_tests(exercise):
    """[(mistake, words)] of the wrong answers that name a wrong test."""
    return [(mistake, check.words_of_test(exercise, mistake.name))
            for mistake in answers.mistakes(exercise) if not mistake_before(exercise, mistake)]


class Tests(unittest.TestCase):
    """Tests that readers are asked to name."""

    def found(self):
        return [exercise for exercise in exercises.find_exercises() if exercise.kind == "break"]

    def test_the_solution_is_the_test_that_has_to_notice_the_fault(self):
        for exercise in self.found():
            fault = faults.Fault(testing.find_fault(exercise.fields["fault"]))
            words = check.words_of_test(exercise, answer_in(exercise.solution(".md")))
            self.assertEqual(words, fault.test, exercise.name)

    def test_answers_name_cases_of_the_chapter(self):
        tests = testing.read_tests(build.build_dir(build.RELEASE)).values()
        for exercise in self.found():
            fault = faults.Fault(testing.find_fault(exercise.fields["fault"]))
            names = {name for test in tests if fault.target in test.targets
                     for cases in test.cases().values() for name in cases}
            for answer in [fault.test, *(words for _, words in wrong_tests(exercise))]:
                meant = [name for name in names if answer.lower() in name.lower()]
                self.assertEqual(len(meant), 1, f"{exercise.name}: {answer}")

    def test_what_stands_before_the_colon_fails_with_its_words(self):
        """Where an exercise asks for more than a test; nothing is built for it."""
        judged = [exercise for exercise in self.found() if exercise.beside(".judge.py").is_file()]
        self.assertTrue(judged)
        for exercise in judged:
            wrong = [each for each in answers.mistakes(exercise) if mistake_before(exercise, each)]
            self.assertGreaterEqual(len(wrong), LEAST_MISTAKES["predict"], exercise.name)
            for mistake in wrong:
                found = mistake_before(exercise, mistake)
                self.assertTrue(found.lines[0].startswith(mistake.says),
                                f"{mistake.name}: {found.lines}")

    @unittest.skipUnless("USP_TEST_ALL" in os.environ, "builds a copy of the sources: --all")
    def test_the_named_test_fails_and_another_does_not(self):
        """Of some of them; that each fault is noticed by its test shows tests/faults/run.py."""
        for exercise in testing.in_turn(self.found()):
            mistakes, words = zip(*wrong_tests(exercise))
            right = check.words_of_test(exercise, answer_in(exercise.solution(".md")))
            with self.subTest(exercise.name), contextlib.redirect_stderr(io.StringIO()):
                right, *wrong = check.judge_tests(exercise, [right, *words])
                self.assertNotIsInstance(right, NotYet, right)
                for mistake, found in zip(mistakes, wrong):
                    self.assertIsInstance(found, NotYet, mistake.name)
                    self.assertTrue(found.lines[0].startswith(mistake.says), found.lines)

    def test_a_verdict_is_that_on_the_one_answer(self):
        exercise = next(one for one in self.found() if not one.beside(".judge.py").is_file())
        with mock.patch.object(check, "judge_tests", side_effect=[[["it fails"]], [NotYet("no")]]) \
                as judge:
            self.assertEqual(check.verdict(exercise, "a"), ["it fails"])
            with self.assertRaisesRegex(NotYet, "^no$"):
                check.verdict(exercise, "b")
        self.assertEqual([call.args for call in judge.call_args_list],
                         [(exercise, ["a"]), (exercise, ["b"])])


class Planted(unittest.TestCase):
    def test_a_program_with_a_mistake_is_built_with_a_time_left(self):
        chapter, tree = chapters.resolve("ch07"), mock.Mock(jobs=2, build_dir=Path("x"))
        tree.commands.return_value = [["configure"], ["build", 1]]
        with mock.patch.object(planted.own_code, "fault_runner") as runner, \
                mock.patch.object(planted, "run_step") as step, mock.patch.object(planted.build, "run_build") as built:
            runner.return_value.FaultError = BookError
            runner.return_value.Tree.return_value = tree
            with planted.Copy(chapter).program():
                pass
        step.assert_called_once_with("configuring the copy", ["configure"], live=False)
        built.assert_called_once_with(tree.build_dir, [chapter.name], ["build", "1"], 2)  # which says how far it is
        tree.build.assert_called_once_with([chapter.name])  # what it takes for a failure


class OwnCode(unittest.TestCase):
    """Chapters that call what a reader has written."""

    def test_the_patches_fit_the_chapters(self):
        found = own_code.replaceable()
        self.assertGreater(len(found), 0)
        for exercise in found:
            texts = "".join(own_code.patched_texts([exercise]).values())
            self.assertIn(f"exercises/{exercise.answer_file.name}\"", texts, exercise.name)
        own_code.patched_texts(found)  # together, too

    @unittest.skipUnless("USP_TEST_ALL" in os.environ, "builds a copy of the sources: --all")
    def test_chapters_pass_their_tests_on_the_solutions(self):
        """Of one chapter in turn."""
        every = sorted({exercise.chapter.name for exercise in own_code.replaceable()})
        chosen = testing.in_turn(every)
        found = [each for each in own_code.replaceable() if each.chapter.name in chosen]
        own_code.write_copy(found, {
            exercise.answer_file: exercise.solution(".cpp").read_text(encoding="utf-8")
            for exercise in found})
        everyday = {name: value for name, value in os.environ.items() if name != "USP_TEST_FULL"}
        with mock.patch.dict(os.environ, everyday, clear=True):
            for chapter in chosen:
                code = own_code.run_book(["test", f"technique.{chapter}", "--no-install"])
                self.assertEqual(code, 0, chapter)

    def test_a_patch_that_does_not_fit_is_named(self):
        exercise = own_code.replaceable()[0]
        with tempfile.TemporaryDirectory(prefix="test_exercises_") as folder:
            for name in own_code.patched_texts([exercise]):
                path = Path(folder) / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text("// rewritten\n", encoding="utf-8")
            with self.assertRaisesRegex(BookError, "does not hold these lines once"):
                own_code.patched_texts([exercise], Path(folder))


class Quantities(unittest.TestCase):
    def test_units(self):
        for text, kind, value in (("24 MB", "bytes", 24e6), ("1.5GiB", "bytes", 1.5 * 2**30),
                                  ("24,000,000 bytes", "bytes", 24e6), ("2e3 kb", "bytes", 2e6),
                                  ("33 %", "percent", 33), ("12", "messages", 12),
                                  ("12 messages", "messages", 12), ("1.5 ms", "seconds", 1.5e-3)):
            self.assertAlmostEqual(quantity.parse(text, kind), value, msg=text)

    def test_what_is_no_number_or_has_no_unit(self):
        for text, kind, message in (("24", "bytes", "has no unit; units here: .*MB"),
                                    ("24 apples", "bytes", "the unit 'apples' is unknown"),
                                    ("many", "bytes", "is no number of bytes; .*24 MB")):
            with self.assertRaisesRegex(BookError, message) as caught:
                quantity.parse(text, kind)
            self.assertEqual(caught.exception.code, 2)

    def test_a_suspect_has_its_words_and_a_near_number_passes(self):
        suspects = [(50, "half of it is missing")]
        check.compare_number(100.9, 100, "bytes", 0.01, suspects)
        for given, words in ((50.2, "half of it is missing"), (200, "too much, by a factor of 2 at most"),
                             (25, "too little, by a factor of 10 at most")):
            with self.assertRaises(NotYet) as caught:
                check.compare_number(given, 100, "bytes", 0.01, suspects)
            self.assertEqual(caught.exception.lines[0], words)
        with self.assertRaises(NotYet):
            check.compare_number(float("nan"), 100, "bytes", 0.01, suspects)


class Guards(unittest.TestCase):
    """Each guard sees what it is for."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="test_exercises_")
        self.addCleanup(folder.cleanup)
        root = Path(folder.name)
        real = next(exercise for exercise in exercises.find_exercises() if exercise.kind == "fill")
        for path in ("exercises", "chapter.json"):
            source, copy = real.chapter.folder / path, root / real.chapter.name / path
            (shutil.copytree if source.is_dir() else shutil.copy)(
                source, copy if source.is_dir() else copy.parent / path)
        shutil.copytree(ROOT / "solutions" / real.chapter.name,
                        root / "solutions" / real.chapter.name)
        self.exercise = exercises.resolve(real.name, root)
        self.exercise.answer_file.write_text(
            exercises.starter(self.solution(), real.name), encoding="utf-8")

    def solution(self):
        return self.exercise.solution(".cpp").read_text(encoding="utf-8")

    def rewrite(self, path, old, new):
        text = path.read_text(encoding="utf-8")
        self.assertIn(old, text)
        path.write_text(text.replace(old, new, 1), encoding="utf-8")

    def judge(self, **verdicts):
        """A judge that is right about everything, but for these answers."""
        said = {mistake.name: (check.NOT_YET, mistake.says)
                for mistake in answers.mistakes(self.exercise)}
        said = {**said, "solution": (check.RIGHT, ""), "starter": (check.UNSOLVED, ""), **verdicts}
        return lambda name, *other: said[f"{name}_beside_the_solution" if other else name]

    def test_what_is_in_order(self):
        self.assertEqual(form_errors(self.exercise), [])
        self.assertEqual(code_errors(self.exercise, self.judge(), []), [])

    def test_a_solved_starter(self):
        self.exercise.answer_file.write_text(self.solution(), encoding="utf-8")
        self.assertRegex("".join(form_errors(self.exercise)), "is it solved already")
        found = code_errors(self.exercise, self.judge(starter=(check.RIGHT, "")), [])
        self.assertEqual(found, ["the starter is not unsolved"])

    def test_a_solution_that_fails(self):
        found = code_errors(self.exercise, self.judge(solution=(check.NOT_YET, "no")), [])
        self.assertEqual(found, ["the solution does not pass: no"])

    def test_a_message_that_is_no_longer_said(self):
        judge = self.judge()
        first = answers.mistakes(self.exercise)[0]
        self.rewrite(self.exercise.solution(".wrong.md"), first.says, "something else")
        self.assertRegex("".join(code_errors(self.exercise, judge, [])),
                         f"{first.name}: the verdict should begin with\n  something else")

    def test_a_wrong_answer_that_passes(self):
        first = answers.mistakes(self.exercise)[0].name
        found = code_errors(self.exercise, self.judge(**{first: (check.RIGHT, "")}), [])
        self.assertEqual(found, [f"{first}: exit code 0, it should fail"])

    def test_a_mutant_that_passes_with_other_values(self):
        judge = self.judge(mutant_0=(check.NOT_YET, ""), mutant_1=(check.RIGHT, ""),
                           mutant_1_beside_the_solution=(check.NOT_YET, "seed 1"),
                           mutant_2=(check.RIGHT, ""),
                           mutant_2_beside_the_solution=(check.RIGHT, ""))
        self.assertEqual(code_errors(self.exercise, judge, ["mutant_0", "mutant_1", "mutant_2"]),
                         ["mutant_1 passes, and gives other values than the solution: seed 1"])

    def test_a_mistake_that_does_not_fit_the_solution(self):
        self.rewrite(self.exercise.solution(".wrong.md"), "```diff\n-", "```diff\n-x")
        with self.assertRaisesRegex(BookError, "stand 0 times in the solution"):
            answers.course_answers(self.exercise)

    def test_a_page_without_a_field_or_a_hint(self):
        text = self.exercise.page.read_text(encoding="utf-8")
        for broken, message in ((text.replace("- size:", "- length:"), "`- size: ...` is missing"),
                                (text.replace("## Hint 3", "### Hint 3"), "has 2 hints and not 3"),
                                (text.replace("- kind: fill", "- kind: guess"), "'guess' is none")):
            self.exercise.page.write_text(broken, encoding="utf-8")
            with self.assertRaisesRegex(BookError, message):
                exercises.resolve(self.exercise.name, self.exercise.chapter.folder.parent)

    def test_too_few_wrong_answers_and_a_missing_file(self):
        path = self.exercise.solution(".wrong.md")
        path.write_text("# Known mistakes\n", encoding="utf-8")
        self.assertIn("0 known wrong answers, at least 3", form_errors(self.exercise))
        path.unlink()
        self.assertIn(f"{path.name} is missing", form_errors(self.exercise))


class Reader(unittest.TestCase):
    """What a reader sees of states, hints and solutions."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="test_exercises_")
        self.addCleanup(folder.cleanup)
        state = mock.patch.object(exercises, "STATE", Path(folder.name) / "state.json")
        state.start()
        self.addCleanup(state.stop)
        load = mock.patch.object(exercises.Progress.__init__, "__defaults__", (exercises.STATE,))
        load.start()
        self.addCleanup(load.stop)
        self.exercise = exercises.find_exercises()[0]

    def said(self, function, *arguments):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            function(*arguments)
        return out.getvalue()

    def test_each_hint_says_more(self):
        for number in (1, 2, 3, 3):
            said = self.said(exercises.show_hint, self.exercise)
            self.assertEqual([hint in re.sub(r"^  ", "", said, flags=re.M)
                              for hint in self.exercise.hints],
                             [index < number for index in range(3)])
        self.assertIn(f"./book solution {self.exercise.name}", said)

    def test_the_solution_is_not_shown_without_being_asked_for(self):
        if begun_by_a_reader(self.exercise):
            self.skipTest("it is begun here")
        with mock.patch.object(sys, "stdin", io.StringIO("")):
            with self.assertRaisesRegex(BookError, "is not solved yet; --yes") as caught:
                exercises.show_solution(self.exercise)
        self.assertEqual(caught.exception.code, 2)
        self.assertIn("solutions/", self.said(exercises.show_solution, self.exercise, True))
        self.assertIn("solutions/", self.said(exercises.show_solution, self.exercise))  # asked once

    def test_a_fresh_clone_is_skipped_and_green(self):
        if begun_by_a_reader(self.exercise):
            self.skipTest("it is begun here")
        with contextlib.redirect_stdout(io.StringIO()) as out:
            self.assertEqual(check.check_exercise(self.exercise), 0)
        self.assertIn("skipped", out.getvalue())

    def test_a_hole_that_still_has_its_mark_is_named(self):
        code = next(one for one in exercises.find_exercises() if one.kind == "fill")
        text = exercises.starter(code.solution(".cpp").read_text(encoding="utf-8"), code.name)
        begun = text.replace("  USP_TODO", "  f();\n  USP_TODO")
        for answer, named in ((text, False), (begun, True)):
            with mock.patch.object(exercises.Exercise, "answer", lambda _, answer=answer: answer):
                said = self.said(check.check_exercise, code)
            self.assertIn("skipped", said)
            self.assertEqual("still stands in it" in said, named)

    def test_a_table_is_judged_when_its_mark_is_gone_and_only_as_a_file(self):
        table = next(one for one in exercises.find_exercises() if one.kind == "table")
        text = table.solution(".txt").read_text(encoding="utf-8")
        for answer, unsolved in ((f"# begin here\n {exercises.UNANSWERED}\n{text}", True),
                                 (text, False)):
            with mock.patch.object(exercises.Exercise, "answer", lambda _, answer=answer: answer):
                self.assertEqual(table.is_unsolved(), unsolved)
        with self.assertRaisesRegex(BookError, "is a table: edit") as caught:
            check.check_exercise(table, text)
        self.assertEqual(caught.exception.code, 2)
        self.assertIn(f"take out its line {exercises.UNANSWERED}", exercises.how_to_answer(table))

    def test_a_table_beside_code_is_judged_once_the_code_is_right(self):
        code = next(one for one in exercises.find_exercises() if one.second_part())
        self.assertEqual(len(check._stamp(code)), 2)  # either is watched
        judge, said = mock.Mock(), mock.patch.object(check, "run_judge", return_value=(check.RIGHT, "less moves\n"))
        with mock.patch.object(check, "_compile"), mock.patch.object(check, "load_judge", return_value=judge), said, \
                mock.patch.object(exercises.Exercise, "answer", lambda self: answer[self.kind]):
            answer = {"fill": "code", "table": f"{exercises.UNANSWERED}\nx: 1 MB\n"}
            with self.assertRaisesRegex(NotYet, "the table is missing"):
                check.verdict(code, "code")
            judge.judge.assert_not_called()
            before, answer["table"] = exercises.digest(code), "x: 1 MB\n"
            self.assertNotEqual(exercises.digest(code), before)
            judge.judge.side_effect = [["x it is"], NotYet("not x")]
            self.assertEqual(check.verdict(code, "code"), ["less moves", "x it is"])
            with self.assertRaisesRegex(NotYet, "^not x$") as caught:
                check.verdict(code, "code")
            self.assertIn(code.second_part().answer_file.name, caught.exception.lines[-1])

    def test_a_compilers_messages_are_those_about_the_answer(self):
        code = next(one for one in exercises.find_exercises() if one.kind == "fill")
        file = f"ch01/exercises/{code.answer_file.name}"
        lines = ["FAILED: judge.o\n", "c++ -O1 -c judge.cpp\n", f"{file}: In function 'f':\n",
                 f"{file}:17:23: error: expected initializer\n", f"{file}:18:7: note: perhaps\n",
                 "/usr/include/c++/12/string:52: note: candidate\n"]
        self.assertEqual(check.compiler_messages(lines, code), [lines[3].rstrip()])
        told = check.compiler_messages([f"{answers.TABLE}:4:3: error: could not convert\n"], code)
        self.assertRegex(told[0], f"is declared otherwise.*{code.functions()[0]}")
        self.assertEqual(check.compiler_messages(["killed\n"], code), ["killed"])

    def test_names(self):
        for name in ("ch01.ex1", "1.1", "ch01_single_gpu/ex1", "01.ex1"):
            self.assertEqual(exercises.resolve(name).name, "ch01.ex1")
        for name, message in (("ch01.ex99", "has no exercise 99; exercises there: ch01.ex1"),
                              ("ring", "is called like ch02.ex1")):
            with self.assertRaisesRegex(BookError, message) as caught:
                exercises.resolve(name)
            self.assertEqual(caught.exception.code, 2)


if __name__ == "__main__":
    os.environ.setdefault("USP_JUDGE_TIMEOUT", "1")
    # ctest gives the folder of the programs, "--bin", which are built by then.
    unittest.main(argv=[sys.argv[0], *(word for index, word in enumerate(sys.argv[1:], 1)
                                       if word != "--bin" and sys.argv[index - 1] != "--bin")])
