"""`./book test`: builds what the tests need, runs them with ctest, says how long the rest takes."""
import difflib
import json
import os
import re
import sys
import time

from tools import machine
from tools.base import ROOT, BookError, say
from tools.process import output_of, wait_for
from tools.run import build, packages
from tools.test import budget, inputs, progress, turns

MAX_PARALLEL_TESTS = 4
PRESETS = {None: build.RELEASE, "address": build.SANITIZE, "thread": build.TSAN}
STRING = r'"((?:[^"\\]|\\.)*)"'
CATCH_CASE = re.compile(rf'^(TEMPLATE_)?TEST_CASE\w*\(\s*((?:{STRING}\s*)+)(?:,\s*{STRING})?', re.M)
PYTHON_CASE = re.compile(r"^(?:class (\w+)|    def (test_\w+))", re.M)
FAULTS = ROOT / "tests" / "faults"
# {sanitizer: in so many turns it tries all of its cases, but for those with these tags}, as CMake has it
SANITIZED = {"address": (4, ("[not_sanitized]",)), "thread": (2, ("[not_sanitized]", "[no_races]"))}


def run_tests(sanitize=None, everything=False, full=False, pattern=None, install=True,
              skip_packages=False, only_list=False, minutes=None, record=False, seed=None):
    """Returns the exit code; ctest's summary is the last thing that is printed.

    sanitize: "address", "thread", or None. everything: what takes long too. pattern: only what is
    called so, see find(). minutes: of what takes long as much as fits into so many. record: count
    this submission, and note what ran in it. seed: of orders, samples and turns, instead of the count.
    """
    begin = time.monotonic()
    preset = PRESETS[sanitize]
    if seed is not None:
        os.environ["USP_TEST_TURN"] = str(seed)
    if not skip_packages:
        packages.ensure(packages.TEST, install)
        # One after the other: where there is no Chromium to install, Doxygen comes all the same.
        for job in (packages.DOCS, packages.BROWSER) if everything and not only_list else ():
            packages.ensure(job, install)
    note = progress.writer(f"sanitize.{sanitize}" if sanitize else None)
    # A ./book test within another has half of the cores: other tests run beside it.
    jobs = max(1, machine.usable_cores() // (2 if progress.is_below_another() else 1))
    build.configure(preset, with_tests=True)
    tests = read_tests(build.build_dir(preset))
    share = os.environ.get(budget.SANITIZER_TURN, "")
    if sanitize and not pattern and share.isdigit():
        chosen = share_of(tests, int(share), *SANITIZED[sanitize])
    else:
        chosen = find(pattern, tests, everything) if pattern else None
    left_out = [] if chosen is None or everything else drop_repeated(chosen)
    if only_list:
        return _list(chosen or find("", tests, everything))
    if chosen is None:
        if not sanitize and sys.stdout.isatty():
            say("book: everything; a part of a name runs only that: ./book test rmsnorm")
        if not progress.is_below_another():
            say(f"book: orders, samples and turns are those of submission {turn()}; --seed {turn()} "
                "repeats them")
        build_began = time.monotonic()
        build.prepare(preset, note=note, jobs=jobs)
        if minutes is not None:  # at most: here much of it may have been built before
            longest = progress.durations(build.build_dir(preset)).get("build", 0)
            progress.note_seconds(build.build_dir(preset), "build",
                                  max(longest, time.monotonic() - build_began))
        if everything and minutes is None:
            build.prepare(preset, ["tests_all"], note, jobs=jobs)
    else:
        say("book: " + ", ".join(f"{name}: {len(cases)} cases" if cases else name
                                 for name, cases in chosen.items()))
        if left_out:
            say(f"book: not {', '.join(left_out)}, which have the same cases for other kernels; "
                "their names run them, or --all")
        targets = sorted({target for name in chosen for target in tests[name].targets})
        if targets:
            build.prepare(preset, targets, note, jobs=jobs)
    if minutes is not None:
        return _run_minutes(preset, tests, begin, 60 * minutes, record, min(MAX_PARALLEL_TESTS, jobs), note)
    env = {**_environment(full, everything), **({} if chosen else _limits(everything))}
    return _run(preset, tests, chosen, sanitize, env, note, min(MAX_PARALLEL_TESTS, jobs))


class Test:
    """One test of ctest: the executables that it needs, and where its cases are."""

    def __init__(self, name, fields):
        self.name = name
        self.targets = fields.get("targets", [])
        self.sources = [ROOT / "tests" / source for source in fields.get("sources", [])]
        self.command = fields.get("command", [])  # of a script whose tests can be named
        self.only_in_all = bool(fields.get("only_in_all"))
        self.when_named = bool(fields.get("when_named"))  # though only in all otherwise
        self.is_serial = bool(fields.get("serial"))
        self.turns = int(fields.get("turns", 0))  # in so many --all tries all of its long cases
        self.takes_turns = self.only_in_all or self.turns > 0  # with --minutes

    def cases(self):
        """{source: names of the cases in it}, in Catch2's way or in unittest's."""
        return {source: read_cases(source) for source in self.sources if source.is_file()}


def read_tests(folder):
    """{name: Test} as CMake has written them down."""
    try:
        fields = json.loads((folder / "tests.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BookError(f"cannot read {folder / 'tests.json'}: {error}; delete {folder}")
    return {name: Test(name, field) for name, field in fields.items()}


def read_cases(source, without=()):
    """The names of a file's test cases, as the command line of its program wants them, but for those
    with such a tag."""
    text = source.read_text(encoding="utf-8", errors="replace")
    if source.suffix == ".py":
        names, group = [], None
        for match in PYTHON_CASE.finditer(text):
            group = match[1] or group
            names += [f"{group}.{match[2]}"] if match[2] else []
        return names
    names = []
    for match in CATCH_CASE.finditer(text):
        if any(tag in (match[4] or "") for tag in without):
            continue
        name = "".join(part.replace('\\"', '"') for part in re.findall(STRING, match[2]))
        names.append(name + " - *" if match[1] else name)
    return names


def find(pattern, tests, everything=False):
    """{name of a test: its cases that are meant, or None for all}: what a pattern matches, as a
    part of a name or as a regular expression. Names are those of tests, of the files with their
    cases, and of the cases; that of a fault has to be whole. BookError (2) if nothing matches.
    """
    try:
        matches = re.compile(pattern, re.I).search
    except re.error:
        matches = re.compile(re.escape(pattern), re.I).search
    plain = pattern.lower()

    def is_meant(name):
        return plain in name.lower() or matches(name) is not None

    found = {}
    for name, test in tests.items():
        if is_meant(name):
            found[name] = None
            continue
        cases = [case for source, cases in test.cases().items()
                 for case in cases if is_meant(source.stem) or is_meant(case)]
        if cases:
            found[name] = cases
    if "faults" in tests and find_fault(pattern):
        found["faults"] = [pattern]
    usual = {name: cases for name, cases in found.items()
             if tests[name].when_named or not tests[name].only_in_all}
    if not found:
        raise BookError(f"no test, file of tests or case is called {pattern!r}{_near(plain, tests)}"
                        "; ./book test --list shows all", 2)
    return found if everything else usual or found


def share_of(tests, number, count, without):
    """{test: its cases in this one of so many turns, or None for all}: of each room every fourth, or
    second, of those that a sanitizer tries, and at least one. A room is the folder of files of tests."""
    chosen = {}
    for name, test in tests.items():
        rooms = {}
        for source in test.sources:
            rooms.setdefault(source.parent, []).extend(read_cases(source, without))
        cases = []
        for room in filter(None, rooms.values()):
            step = min(count, len(room))
            cases += room[number % step::step]
        if cases or not test.sources:
            chosen[name] = cases or None
    return chosen


def find_fault(name):
    """The patch of a seeded fault, in whichever room it lies; None if no fault is called so."""
    return next((path for path in FAULTS.rglob("*.patch") if path.stem == name), None)


def drop_repeated(chosen):
    """Takes out of `chosen` the unit tests whose cases an earlier one has, too: the same, compiled
    once more for other kernels, which takes minutes. Returns their names."""
    seen, dropped = set(), []
    for name, cases in chosen.items():
        if not cases or not name.startswith("unit."):
            continue
        if seen.issuperset(cases):
            dropped.append(name)
        seen.update(cases)
    for name in dropped:
        del chosen[name]
    return dropped


def read_faults():
    """[(name, target)] of all seeded faults."""
    return [(path.stem, re.search(r"^Target: +(\S+)", path.read_text(encoding="utf-8"), re.M)[1])
            for path in sorted(FAULTS.rglob("*.patch"))]


def _near(pattern, tests):
    """", did you mean ...", or nothing."""
    words = {word for name, test in tests.items()
             for text in (name, *(source.stem for source in test.sources))
             for word in (text, *re.split(r"[._]", text))}
    words |= {word.lower() for test in tests.values() for cases in test.cases().values()
              for case in cases for word in re.findall(r"[A-Za-z]\w{3,}", case)}
    close = difflib.get_close_matches(pattern, sorted(words), 3)
    return f"; did you mean ./book test {close[0]}?" if close else ""


def _list(chosen):
    for name, cases in chosen.items():
        print(name)
        for case in cases or ():
            print(f"    {case}")
    return 0


def _run(preset, tests, chosen, sanitize, env, note, jobs):
    """Whole tests by ctest, single cases by their own programs; the first failure's exit code."""
    folder = build.build_dir(preset)
    whole = [name for name, cases in (chosen or {}).items() if not cases]
    codes = [_run_cases(folder, tests[name], cases, env)
             for name, cases in (chosen or {}).items() if cases]
    if chosen is None or whole:
        # --no-tests=error: a choice that matches nothing must not look like a success.
        command = ["ctest", "--test-dir", str(folder), "--output-on-failure", "--no-tests=error",
                   "-j", str(jobs)]
        if whole:
            command += ["-R", f"^({'|'.join(map(re.escape, whole))})$"]
        elif sanitize:
            command += ["-L", "unit|technique"]
        elif "USP_TEST_ALL" not in env:
            command += ["-LE", "^all$"]
        now = {} if whole or sanitize else inputs.digests()
        left_out = _unchanged(now, folder, "USP_TEST_ALL" in env)
        if left_out:
            command += ["-E", f"^({'|'.join(map(re.escape, left_out))})$"]
        expected = [test for name, test in tests.items() if name not in left_out
                    and (name in whole if whole else "USP_TEST_ALL" in env or not test.only_in_all)]
        with progress.Progress(folder, expected, note, jobs) as shown:
            code, _ = wait_for(command, {**env, **shown.environment}, shown.read_line)
        inputs.note(now, shown.passed, folder / inputs.HERE)
        codes.append(code if code >= 0 else 128 - code)
    return next((code for code in codes if code), 0)


def _unchanged(now, folder, everything):
    """Which of the long tests of pages are left out: those that have passed on what they would read,
    but for one in turn where everything is tested."""
    names = sorted(inputs.unchanged(now, folder))
    names = [name for name in names if not everything or name not in in_turn(names)]
    if names:
        say(f"book: not {', '.join(names)}, which have passed on what they read; their names run them")
    return names


def _run_minutes(preset, tests, begin, seconds, record, jobs, note):
    """What every commit has to pass, then what has waited longest, until so many seconds after the
    begin."""
    folder = build.build_dir(preset)
    summary = budget.Summary()
    usual = _environment(full=False, everything=False)
    now, passed = inputs.digests(), set()

    def ctest(names, env, turn_of):
        summary.begin_run()
        command = ["ctest", "--test-dir", str(folder), "--output-on-failure", "--no-tests=error",
                   "-j", str(jobs), "-R", f"^({'|'.join(map(re.escape, names))})$"]
        with progress.Progress(folder, [tests[name] for name in names], note, jobs, summary,
                               turn_of) as shown:
            code, signals = wait_for(command, {**usual, **env, **shown.environment}, shown.read_line)
        passed.update(shown.passed)
        if signals:
            raise BookError("the tests were interrupted", 128 + signals[0])
        return code if code >= 0 else 128 - code

    run = budget.Run(preset, tests, read_faults() if turns.FAULTS in tests else [], begin, begin + seconds,
                     jobs, ctest, summary)
    left_out = _unchanged(now, folder, everything=False)
    took = run.run_usual(
        [name for name, test in tests.items() if not test.only_in_all and name not in left_out])
    say(f"book: what every commit has to pass took {progress.in_words(took)}, where "
        f"{budget.USUAL_S // 60} min are planned; {progress.in_words(max(0, run.end - time.monotonic()))} left "
        "for what has waited longest")
    run.run_waiting()
    say(f"book: {run.left()}")
    if record and run.code:
        say("book: a test failed, so tests/turns.json stays as it is")
    elif record:
        inputs.note(now, passed, inputs.RECORD)
        run.write_record()
        say(f"book: tests/turns.json has submission {run.record.submissions}; commit it")
    print(summary.text())
    return run.code


def _run_cases(folder, test, cases, env):
    """Runs single cases of a test; returns the exit code."""
    if test.name == "faults":
        command = [*test.command, *(word for case in cases for word in ("--only", case))]
        command.remove("--chosen")
    elif test.command:
        command = [*test.command, *cases]
    else:
        names = [re.sub(r"([\\,\[])", r"\\\1", case) for case in cases]
        command = [str(folder / "bin" / test.targets[0]), ",".join(names)]
    code, _ = wait_for(command, env)
    return code if code >= 0 else 128 - code


def _environment(full, everything):
    """What tests see: two of them share the cores, so threads that wait must sleep, not spin."""
    env = machine.thread_environment()
    env.setdefault("OMP_WAIT_POLICY", "passive")
    env.setdefault("UBSAN_OPTIONS", "print_stacktrace=1:halt_on_error=1")
    env.setdefault("TSAN_OPTIONS", f"suppressions={ROOT / 'tests' / 'tsan.supp'}")
    # UCX, below some MPIs, takes a lock while a thread ends; the thread sanitizer crashes there.
    env.setdefault("UCX_MEM_EVENTS", "no")
    env.setdefault("USP_TEST_TURN", str(turn()))
    if everything:
        env["USP_TEST_ALL"] = "1"
        env.setdefault(budget.SANITIZER_TURN, str(turn() % turns.TURNS))
    if full or os.environ.get("USP_TEST_EVERYTHING") == "1":
        env["USP_TEST_FULL"] = "1"
    elif everything:
        env["USP_TEST_FULL"] = "in_turns"  # a share of the long combinations, see case_cover.h
    return env


def _limits(everything):
    """What seeded faults see where no test is named."""
    if everything:
        return {"USP_EVERY_TEST_RUNS": "1"}  # so they need not run theirs without the fault
    return {"USP_FAULT_SECONDS": str(budget.DAILY_FAULTS_S)}


def changed_files():
    """Paths that differ from where this branch left the main one, or are new; None without git."""
    def git(*arguments):
        return output_of(["git", "-C", str(ROOT), *arguments])
    bases = (git("merge-base", "HEAD", main)
             for main in ("origin/main", "origin/master", "main", "master"))
    base = next(filter(None, bases), "HEAD").strip()
    listed = (git("diff", "--name-only", "-z", base),
              git("ls-files", "-o", "--exclude-standard", "-z"))
    if None in listed:
        return None
    return {path for text in listed for path in text.split("\0") if path}


def turn():
    """How many submissions tests/turns.json counts, or the number that a ./book test above gives."""
    given = os.environ.get("USP_TEST_TURN", "")
    return int(given) if given.isdigit() else turns.Record().submissions


def in_turn(items, count=1):
    """So many of the items, in their order, or more where turns.TURNS turns would not reach all; in
    another turn others. For what costs minutes, so that one run tests a share of it. Everything where
    USP_TEST_EVERYTHING=1 is in the environment."""
    items = list(items)
    count = max(count, -(-len(items) // turns.TURNS))
    if os.environ.get("USP_TEST_EVERYTHING") == "1" or count >= len(items):
        return items
    first = turn() * count % len(items)
    chosen = sorted((first + index) % len(items) for index in range(count))
    return [items[index] for index in chosen]
