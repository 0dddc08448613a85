"""`./book check` and `./book watch`: judge answers to exercises.

A C++ answer is compiled with its judge, a small program. A number, a setting or a table is judged
by exN_name.judge.py, which measures with tools/exercise/lab.py. A test that is named for a seeded fault is
run in a copy of the sources, with the fault and without.
"""
import contextlib
import io
import os
import re
import resource
import subprocess
import sys
import time

from tools import machine
from tools.base import ROOT, BookError, say, show_path, write_whole
from tools.exercise import answers, exercises, own_code, planted, quantity
from tools.exercise.lab import Lab, NotYet
from tools.process import signal_name
from tools.run import build, packages
from tools.test import testing

RIGHT, NOT_YET, UNSOLVED = 0, 1, 77  # exit codes of a judge
TIMEOUT = 60     # seconds, for a judge
MEMORY = 4 << 30  # bytes of address space, for a judge
POLL = 0.3       # seconds between looks at a file
WIDTH = 78       # where a verdict ends


def check_exercise(exercise, answer=None, install=True, skip_packages=False):
    """Judges the reader's answer, prints the verdict, and keeps what was right; returns the exit
    code: 0 for right and for unsolved, 1 for wrong."""
    if answer is not None and exercise.kind in ("fill", "table"):
        form = "code" if exercise.kind == "fill" else "a table"
        raise BookError(f"the answer to {exercise.name} is {form}: edit "
                        f"{show_path(exercise.answer_file)}", 2)
    if answer is None and exercise.is_unsolved():
        _head(exercise, "skipped: not solved yet")
        if exercise.is_begun():
            print(f"  {exercises.TODO}...) still stands in it: your lines take its place")
        print(f"  {exercises.how_to_answer(exercise)}")
        return 0
    if not skip_packages:
        needs_tests = exercise.kind == "break" or exercise.runs_on_emulator()
        packages.ensure(packages.TEST if needs_tests else packages.RUN, install)
    progress = exercises.Progress()
    try:
        lines = verdict(exercise, exercise.answer() if answer is None else answer)
    except NotYet as wrong:
        if answer is None:
            progress.note_verdict(exercise, False)
        _head(exercise, "not yet")
        _print_lines(wrong.lines)
        print(f"  {show_path(exercise.answer_file)}    hint: ./book hint {exercise.name}")
        return 1
    if answer is not None:
        write_whole(exercise.answer_file, f"{answer.strip()}\n")
    progress.note_verdict(exercise, True)
    _head(exercise, "right")
    _print_lines(lines)
    print(f"  why: ./book solution {exercise.name}{_next(exercise)}")
    return 0


def verdict(exercise, answer):
    """Judges an answer: returns lines that a right one deserves, NotYet for a wrong one."""
    judge = {"fill": _judge_code, "predict": _judge_number, "decide": _judge_setting,
             "table": _judge_setting, "break": _judge_test}[exercise.kind]
    return judge(exercise, answer)


def _head(exercise, what):
    print(f"{exercise.name}  {exercise.title}".ljust(WIDTH - len(what) - 1) + " " + what)


def _print_lines(lines):
    for line in lines:
        for part in str(line).splitlines():
            print(f"  {part}")


def _next(exercise):
    """Where to go on, if anything is left."""
    progress = exercises.Progress()
    left = [other for other in exercises.find_exercises(chapter=exercise.chapter)
            if progress.state(other) != "solved"]
    return f"    next: ./book exercise {left[0].name}" if left else ""


# --- code -----------------------------------------------------------------------------------------


def _judge_code(exercise, _answer):
    _compile(exercise)
    code, output = run_judge(build.binary(build.RELEASE, exercise.target()))
    if code != RIGHT:
        raise NotYet(*output.splitlines())
    return [*output.splitlines(), *_judge_second_part(exercise.second_part())]


def _judge_second_part(table):
    """What verdict() says of the table beside code that is right; nothing where none is asked for."""
    if table is None:
        return []
    if table.is_unsolved():
        raise NotYet("the code is right, and the table is missing", exercises.how_to_answer(table))
    try:
        return verdict(table, table.answer())
    except NotYet as wrong:
        raise NotYet(*wrong.lines, f"the code is right; this is about {show_path(table.answer_file)}") from None


def _compile(exercise):
    """Builds the judge; what the compiler says of the answer is NotYet."""
    library, target = ("tests/lab", "lab_launching") if exercise.runs_on_emulator() else ("common", "usp_judge")
    if not (build.build_dir(build.RELEASE) / library / f"lib{target}.a").is_file():
        build.prepare(build.RELEASE, ["usp_judge", target])  # takes a minute, once, and shows how far it is
    held = []
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            build.prepare(build.RELEASE, exercise.target(), held.append, live=False)
    except BookError as error:
        if error.code != 1:
            raise  # interrupted
        raise NotYet("it does not compile", *compiler_messages(held, exercise))


def compiler_messages(lines, exercise):
    """Of a compiler's output what is about the answer; all of it where nothing is."""
    own = re.compile(rf"{re.escape(exercise.answer_file.name)}:\d+|undefined reference|^error: ")
    kept = [line.rstrip() for line in lines if own.search(line) and "note:" not in line]
    if any(re.match(rf"{answers.TABLE}:\d+:\d+: error", line) for line in lines):
        kept.append("what the starter declares is declared otherwise: keep names, parameters and "
                    f"results of {', '.join(exercise.functions())}")
    return kept or [line.rstrip() for line in lines]


def run_judge(program, *arguments, timeout=TIMEOUT):
    """(exit code, what it printed) of a judge. What ends it otherwise than by its verdict becomes
    words, and NOT_YET."""
    env = {**machine.thread_environment(), "OMP_WAIT_POLICY": "passive"}
    try:
        done = subprocess.run([str(program), *map(str, arguments)], env=env, timeout=timeout,
                              stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True, errors="replace", check=False,
                              preexec_fn=_limit_memory)
    except subprocess.TimeoutExpired:
        return NOT_YET, f"it has not ended after {timeout} s: is there a loop without an end?\n"
    except OSError as error:
        raise BookError(f"cannot start {program}: {error.strerror}")
    if done.returncode < 0:
        return NOT_YET, (f"it was ended by {signal_name(-done.returncode)}: does it read or write "
                         f"beyond the end of something?\n{done.stdout}")
    return done.returncode, done.stdout


def _limit_memory():
    """In a child: a loop that pushes into a vector without an end fails before the machine does."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))


# --- a number, a setting, a table -----------------------------------------------------------------


def load_judge(exercise):
    """The Python module that judges the exercise."""
    path = exercise.beside(".judge.py")
    if not path.is_file():
        raise BookError(f"{exercise.name} has no judge: {show_path(path)} is missing")
    return own_code.load_module(f"judge_{exercise.name}", path)


def _judge_number(exercise, answer):
    kind = exercise.fields["unit"]
    tolerance = quantity.parse(exercise.fields["tolerance"], "percent") / 100
    given = quantity.parse(answer.strip(), kind)
    judge = load_judge(exercise)
    with Lab() as lab:
        measured = judge.measure(lab)
    compare_number(given, measured, kind, tolerance, judge.suspects(measured))
    return [f"measured {quantity.show(measured, kind)}, predicted {quantity.show(given, kind)}"]


def compare_number(given, measured, kind, tolerance, suspects):
    """NotYet unless the number is right within the tolerance; with the words of the first suspect
    (value, words) that it agrees with, within the same."""
    def near(value):
        return abs(given - value) <= tolerance * abs(value)

    if near(measured):
        return
    words = next((words for value, words in suspects if near(value)), _how_far(given, measured))
    raise NotYet(words, f"your answer was {quantity.show(given, kind)}; what is measured is in the "
                        "solution")


def _how_far(given, measured):
    """In words. The factor itself would be the answer."""
    if not min(given, measured) > 0:
        return "that is not what is measured"
    factor = max(given, measured) / min(given, measured)
    bound = next((bound for bound in (1.1, 2, 10, 100) if factor <= bound), None)
    return (f"too {'much' if given > measured else 'little'}, by "
            + (f"a factor of {bound} at most" if bound else "more than a factor of 100"))


def _judge_setting(exercise, answer):
    judge = load_judge(exercise)
    with Lab() as lab:
        return judge.judge(answer.strip(), lab)


# --- a test ---------------------------------------------------------------------------------------


def words_of_test(exercise, answer):
    """What of an answer names a test: all of it, or what the exercise's judge leaves where it has one.
    NotYet if the rest is wrong."""
    if not exercise.beside(".judge.py").is_file():
        return answer.strip()
    return load_judge(exercise).judge(answer.strip())


def _judge_test(exercise, answer):
    [found] = judge_tests(exercise, [words_of_test(exercise, answer)])
    if isinstance(found, NotYet):
        raise found
    return found


def judge_tests(exercise, answers_given):
    """What verdict() says of each of these names of tests, whose copy of the sources is built once:
    lines, or a NotYet."""
    faults = own_code.fault_runner()
    try:
        fault = faults.Fault(testing.find_fault(exercise.fields["fault"]))
        _check_mended(fault, faults)
        tree = faults.Tree(ROOT, own_code.COPY.parent, own_code.COPY.name, machine.usable_cores())
        say(f"book: building {fault.target} in a copy of the sources, without and with the mistake; "
            "the first time takes minutes")
        planted.build_copy(tree, fault.target)
        names = [_find_case(fault.target, answer.strip()) for answer in answers_given]
        for name in names:
            code, output = tree.run(fault.target, name)
            if code != 0:
                raise BookError(f"{name}: fails without the mistake:\n{faults.tail(output)}")
        with tree.patched(fault):
            say("book: building it with the mistake")
            planted.build_copy(tree, fault.target)
            return [_verdict_on_test(name, fault.message, *tree.run(fault.target, name))
                    for name in names]
    except faults.FaultError as error:
        raise BookError(str(error))


def _verdict_on_test(name, message, code, output):
    """How the test ended with the mistake; `message` is what the fault announces of it."""
    if code == 0:
        return NotYet(f"the test passes with the mistake, too: \"{name}\" does not see it")
    return [f"with the mistake, \"{name}\" fails:", *_first_failure(output, message)]


def _check_mended(fault, faults):
    """BookError if the reader has broken the line, as the exercise says, and not mended it."""
    try:
        fault.apply(ROOT)
    except faults.FaultError:
        files = " ".join(sorted({path for path, _, _ in fault.hunks}))
        raise BookError("the judge breaks the line by itself, and finds it changed; first mend it: "
                        f"git checkout {files}")


def _first_failure(output, message, lines=6):
    """The part of a failing test's output that says what differs, and the line that the fault
    announces if it comes later."""
    kept = [line.rstrip() for line in output.splitlines()
            if line.strip() and not set(line.strip()) <= set("-.=~")]
    start = next((i for i, line in enumerate(kept) if "FAILED" in line), 0)
    shown = kept[start:start + lines]
    announced = next((line for line in kept if re.search(message, line)), None)
    if announced and announced not in shown:
        shown.append(announced)
    return [f"  {line}" for line in shown]


def _find_case(target, wanted):
    """The one test case of an executable whose name holds the words. BookError (2) otherwise."""
    build.configure(build.RELEASE, with_tests=True)
    tests = testing.read_tests(build.build_dir(build.RELEASE)).values()
    names = sorted({name for test in tests if target in test.targets
                    for cases in test.cases().values() for name in cases})
    found = [name for name in names if wanted.lower() in name.lower()]
    found = [name for name in names if name.lower() == wanted.lower()] or found
    if len(found) == 1:
        return found[0]
    if not found:
        raise BookError(f"{target} has no test case with {wanted!r} in its name; "
                        "./book test --list WORD shows those with a word in their names", 2)
    raise BookError(f"{wanted!r} stands in the names of {len(found)} test cases; which one? "
                    + "; ".join(f'"{name}"' for name in found[:5]), 2)


# --- a chapter, and watching ----------------------------------------------------------------------


def check_chapter(chapter, install=True, skip_packages=False):
    """Judges all exercises of a chapter that are not unsolved; returns the exit code."""
    found = exercises.find_exercises(chapter=chapter)
    if not found:
        raise BookError(f"{chapter.short} has no exercises")
    return max(check_exercise(exercise, None, install, skip_packages) for exercise in found)


def watch(exercise, install=True, skip_packages=False):
    """Checks again whenever the answer is saved, until Ctrl-C. Returns 0 when it is right."""
    say(f"book: watching {show_path(exercise.answer_file)}; Ctrl-C ends")
    seen = None
    while True:
        stamp = _stamp(exercise)
        if stamp is not None and stamp != seen:
            seen = stamp
            if sys.stdout.isatty():
                print("\033[2J\033[H", end="")
            code = check_exercise(exercise, None, install, skip_packages)
            if code == 0 and not exercise.is_unsolved():
                return 0
            sys.stdout.flush()
        time.sleep(POLL)


def _stamp(exercise):
    """Changes when an answer is saved; None while an editor replaces its file."""
    parts = [exercise, exercise.second_part()]
    try:
        found = [os.stat(part.answer_file) for part in parts if part]
    except OSError:
        return None
    return [(each.st_mtime_ns, each.st_size) for each in found]
