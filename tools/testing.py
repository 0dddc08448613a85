"""`./book test`: builds what the tests need, runs them with ctest, says how long the rest takes."""
import difflib
import json
import os
import re
import sys

from tools import build, machine, packages, progress
from tools.base import ROOT, BookError, say
from tools.process import output_of, wait_for

MAX_PARALLEL_TESTS = 4
PRESETS = {None: build.RELEASE, "address": build.SANITIZE, "thread": build.TSAN}
STRING = r'"((?:[^"\\]|\\.)*)"'
CATCH_CASE = re.compile(rf'^(TEMPLATE_)?TEST_CASE\w*\(\s*((?:{STRING}\s*)+)', re.M)
PYTHON_CASE = re.compile(r"^(?:class (\w+)|    def (test_\w+))", re.M)
FAULTS = ROOT / "tests" / "faults"


def run_tests(sanitize=None, everything=False, full=False, pattern=None, install=True,
              skip_packages=False, only_list=False):
    """Returns the exit code; ctest's summary is the last thing that is printed.

    sanitize: "address", "thread", or None. everything: what takes long too. pattern: only what is
    called so, see find().
    """
    preset = PRESETS[sanitize]
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
    chosen = find(pattern, tests, everything) if pattern else None
    if only_list:
        return _list(chosen or find("", tests, everything))
    if chosen is None:
        if not sanitize and sys.stdout.isatty():
            say("book: everything; a part of a name runs only that: ./book test rmsnorm")
        build.prepare(preset, note=note, jobs=jobs)
        if everything:
            build.prepare(preset, ["tests_all"], note, jobs=jobs)
    else:
        say("book: " + ", ".join(f"{name}: {len(cases)} cases" if cases else name
                                 for name, cases in chosen.items()))
        targets = sorted({target for name in chosen for target in tests[name].targets})
        if targets:
            build.prepare(preset, targets, note, jobs=jobs)
    env = _environment(full, everything)
    if everything and chosen is None:
        env["USP_EVERY_TEST_RUNS"] = "1"  # so seeded faults need not run theirs without the fault
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


def read_cases(source):
    """The names of a file's test cases, as the command line of its program wants them."""
    text = source.read_text(encoding="utf-8", errors="replace")
    if source.suffix == ".py":
        names, group = [], None
        for match in PYTHON_CASE.finditer(text):
            group = match[1] or group
            names += [f"{group}.{match[2]}"] if match[2] else []
        return names
    names = []
    for match in CATCH_CASE.finditer(text):
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
    if "faults" in tests and (FAULTS / f"{pattern}.patch").is_file():
        found["faults"] = [pattern]
    usual = {name: cases for name, cases in found.items()
             if tests[name].when_named or not tests[name].only_in_all}
    if not found:
        raise BookError(f"no test, file of tests or case is called {pattern!r}{_near(plain, tests)}"
                        "; ./book test --list shows all", 2)
    return found if everything else usual or found


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
        expected = [test for name, test in tests.items()
                    if (name in whole if whole else "USP_TEST_ALL" in env or not test.only_in_all)]
        with progress.Progress(folder, expected, note, jobs) as shown:
            code, _ = wait_for(command, {**env, **shown.environment}, shown.read_line)
        codes.append(code if code >= 0 else 128 - code)
    return next((code for code in codes if code), 0)


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
    env.setdefault("USP_TEST_TURN", str(turn() % 2**32))
    if everything:
        env["USP_TEST_ALL"] = "1"
    if full or os.environ.get("USP_TEST_EVERYTHING") == "1":
        env["USP_TEST_FULL"] = "1"
    elif everything:
        env["USP_TEST_FULL"] = "in_turns"  # a share of the long combinations, see case_cover.h
    return env


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
    """A number that another commit changes; 0 where there is no git."""
    commit = output_of(["git", "-C", str(ROOT), "rev-parse", "HEAD"])
    return int(commit, 16) if commit else 0


def in_turn(items, count=1):
    """So many of the items, in their order; with another commit others. For what costs minutes,
    so that one run tests a share of it and a few commits test all. Everything where
    USP_TEST_EVERYTHING=1 is in the environment; the first ones where there is no git."""
    items = list(items)
    if os.environ.get("USP_TEST_EVERYTHING") == "1" or count >= len(items):
        return items
    first = turn() % len(items)
    chosen = sorted((first + index) % len(items) for index in range(count))
    return [items[index] for index in chosen]
