"""Proves that the tests can fail: plants one fault after the other in a copy of the sources.

  run.py --source . --work build/release/faults               all faults
  run.py --source . --work build/release/faults --only NAME   one of them, --list shows the names
  run.py --source . --work build/release/faults --chosen      those that have changed
  run.py ... --record                                         note those caught in caught.json

For each fault a copy is patched, the target it names rebuilt and the test it names run; that test
has to fail, with the message the fault announces. First it has to pass without the fault; where
./book test --all runs every test anyway, it is not run for that once more. Copies work side by side,
two of them even on one core: compiling a file and linking leave it idle at times. README.md says
how to write a fault. One that was caught is not tried again until a source or its patch changes,
unless --force is given.

Exit code: 0 all caught, 1 otherwise, 77 where nothing was missed but a test had to be skipped.
"""

import argparse
import collections
import contextlib
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from tools.base import write_whole  # noqa: E402
from tools.test import budget, testing, turns  # noqa: E402

RECORD = HERE / "caught.json"
SHARE = 12  # of the faults that have not changed, ./book test --all tries one in so many
KEYS = ("What", "Target", "Test", "Message")
NO_TARGET = "none"  # of a fault in what is not compiled
NEWEST = "newest"  # as a chapter in a path, or in test_newest: whichever comes last
SKIPPED = 77  # a test's exit code
CAUGHT, CANNOT_RUN, MISSED = "caught", "skipped", "MISSED"
TIMEOUT = 300  # seconds, for one test
# Where nothing has changed, these show that the machinery works: one in compiled code, one not.
SAMPLE = ("mask_off_by_one", "export_drops_master")


class FaultError(Exception):
    """A fault that cannot be tried: a stale patch, a test that does not pass without it, ..."""


class Fault:
    """ROOM/NAME.patch: lines `Key: value` for each of KEYS, then a unified diff."""

    def __init__(self, path):
        self.name = path.stem
        self.text = path.read_text(encoding="utf-8")
        header, separator, diff = self.text.partition("\n--- ")
        fields = dict(re.findall(r"^(\w+): +(.+)$", header, re.M))
        if sorted(fields) != sorted(KEYS) or not separator:
            raise FaultError(f"{self.name}: a fault has the lines {', '.join(KEYS)} and a diff, "
                             f"this one has {', '.join(fields) or 'none'}")
        self.what, self.target, self.test, self.message = (fields[key] for key in KEYS)
        self.hunks = parse_diff("--- " + diff, self.name)
        newest = max((file.parent.name for file in path.parents[3].glob("ch[0-9][0-9]_*/chapter.json")),
                     default="")
        self.target = re.sub(rf"^test_{NEWEST}$", f"test_{newest}", self.target)
        self.room = room_of(self.hunks[0][0])
        if path.parent.name != self.room:
            raise FaultError(f"{self.name}: patches {self.hunks[0][0]}, so it belongs in "
                             f"tests/faults/{self.room}/, not in {path.parent.name}/")
        for hunk in self.hunks:
            hunk[0] = re.sub(rf"^{NEWEST}/", f"{newest}/", hunk[0])

    def apply(self, root):
        """The patched text of every file, by path; nothing is written."""
        texts = {}
        for path, before, after in self.hunks:
            text = texts.get(path)
            if text is None:
                if not (root / path).is_file():
                    raise FaultError(f"{self.name}: stale, there is no {path}")
                text = (root / path).read_text(encoding="utf-8")
            count = ("\n" + text).count("\n" + before)
            if count != 1:
                raise FaultError(f"{self.name}: stale, {path} holds these lines {count} times "
                                 f"instead of once:\n{before}")
            start = ("\n" + text).index("\n" + before)
            texts[path] = text[:start] + after + text[start + len(before):]
        return texts


def parse_diff(diff, name):
    """[(path, lines before, lines after)] of each hunk. Line numbers are not read: the lines of a
    hunk have to occur exactly once in the file."""
    hunks, path = [], None
    for line in diff.splitlines():
        if line.startswith("+++ "):
            path = line[len("+++ b/"):].split("\t")[0]
        elif line.startswith("@@"):
            hunks.append([path, "", ""])
        elif hunks and not line.startswith("--- "):
            sign, rest = line[:1], line[1:] + "\n"
            if sign not in ("", " ", "-", "+"):
                raise FaultError(f"{name}: no line of a diff: {line}")
            hunks[-1][1] += rest if sign != "+" else ""
            hunks[-1][2] += rest if sign != "-" else ""
    if not hunks or any(before == after for _, before, after in hunks):
        raise FaultError(f"{name}: its diff changes nothing")
    return hunks


def room_of(path):
    """The room of faults in a file: the file's own in a chapter or in common/, `model` for the root
    of a chapter, `tests`, and `tools` for whatever else builds and runs the programs."""
    first, *rest = Path(path).parts
    if first == NEWEST or re.match(r"ch\d\d_", first):
        return rest[0] if len(rest) > 1 else "model"
    if first == "common" and len(rest) > 1:
        return rest[0]
    return "tests" if first == "tests" else "tools"


def read_faults():
    """Every fault, by its name, which is its own whatever the room."""
    paths = sorted(HERE.rglob("*.patch"), key=lambda path: path.stem)
    for path, following in zip(paths, paths[1:]):
        if path.stem == following.stem:
            raise FaultError(f"{path.stem}: two faults in {path.parent.name}/ and "
                             f"{following.parent.name}/ are called so; rename one")
    return [Fault(path) for path in paths]


def list_files(source):
    """Paths of the files that make up the source tree, relative to it."""
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        git = subprocess.run(["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=source,
                             stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True)
        paths = [Path(os.fsdecode(path)) for path in git.stdout.split(b"\0") if path]
        if paths:
            return sorted(path for path in paths if (source / path).is_file())
    return sorted(list_tree(source))  # an unpacked archive, or no git


def list_tree(root):
    """Relative paths of the files below, without what is built or run there."""
    for folder, folders, names in os.walk(root):
        if Path(folder) == root:
            folders[:] = [name for name in folders if name not in ("build", "runs", ".git")]
        folders[:] = [name for name in folders if name != "__pycache__"]
        for name in names:
            yield (Path(folder) / name).relative_to(root)


def read_tests(source):
    """{a test, as faults name it: its text}; what it calls in its file is not looked at."""
    texts = {}
    for path in sorted((source / "tests").rglob("*.cpp")):
        text = path.read_text(encoding="utf-8", errors="replace")
        begins = [match.start() for match in testing.CATCH_CASE.finditer(text)] + [len(text)]
        texts.update(zip(testing.read_cases(path),
                         (text[begin:end] for begin, end in zip(begins, begins[1:]))))
    for path in sorted((source / "tests").rglob("test_*.py")):
        text = path.read_text(encoding="utf-8")
        script = path.relative_to(source).as_posix()
        begins = [match.start() for match in testing.PYTHON_CASE.finditer(text) if match[2]]
        for name, begin in zip(testing.read_cases(path), begins):
            end = re.compile(r"^(?:    def |\S)", re.M).search(text, begin + 8)
            texts[f"{script} {name}"] = text[begin:end.start() if end else len(text)]
        texts[script] = text
    return texts


def digests(faults, source):
    """{name of a fault: digest of what it consists of}: the patch, the files that it patches, and
    its test."""
    tests = read_tests(source)
    result = {}
    for fault in faults:
        own = hashlib.sha256()
        # A script may make its tests from a table.
        test = tests.get(fault.test) or tests.get(fault.test.split()[0], "")
        for part in (fault.text.encode(), test.encode(),
                     *(read_if_there(source / path) or b""
                       for path in sorted({path for path, _, _ in fault.hunks}))):
            own.update(hashlib.sha256(part).digest())
        result[fault.name] = own.hexdigest()[:16]
    return result


def read_record():
    """{name of a fault: its digest when it was last caught}, as committed."""
    return json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.is_file() else {}


def write_record(faults, source, names):
    """Adds to what is committed that these were caught as they are; drops those that are gone."""
    own = digests(faults, source)
    known = {**read_record(), **{name: own[name] for name in names}}
    kept = {name: digest for name, digest in sorted(known.items()) if name in own}
    write_whole(RECORD, json.dumps(kept, indent=0) + "\n")


def choose(faults, source):
    """Those that have changed since they were last caught: their own file, one that they patch, or
    their test; where there are none, a sample. First those that have waited longest. Where the
    environment asks for all of the tests, a share of the others, too, one target after the other, for
    each has to be built. With USP_TEST_EVERYTHING all; where ./book test names some, these."""
    named = os.environ.get("USP_FAULTS", "").split()
    if named:
        return [fault for fault in faults if fault.name in named]
    if os.environ.get("USP_TEST_EVERYTHING") == "1":
        return faults
    record, own = read_record(), digests(faults, source)
    ran = turns.Record().ran

    def last(fault):
        return ran.get(f"{turns.FAULTS}:{fault.name}", 0)

    chosen = sorted((fault for fault in faults if record.get(fault.name) != own[fault.name]),
                    key=lambda fault: (last(fault), fault.target))
    print(f"{len(chosen)} of {len(faults)} faults have changed since they were caught", flush=True)
    if "USP_TEST_ALL" in os.environ:
        others = sorted((fault for fault in faults if fault not in chosen),
                        key=lambda fault: (last(fault), fault.target, fault.name))
        size = -(-len(others) // SHARE)
        print(f"and {size} of the others, those that have waited longest", flush=True)
        return others[:size] + chosen
    return chosen or [fault for fault in faults if fault.name in SAMPLE]


def note_progress(text):
    """For the ./book test that waits for this: how far it is."""
    folder = os.environ.get("USP_PROGRESS")
    if folder:
        with contextlib.suppress(OSError):
            (Path(folder) / "faults").write_text(text + "\n", encoding="utf-8")


def is_input(path):
    """Whether a build or a test depends on the file."""
    if path.suffix == ".py":
        return (path.parts[0] == "tools" or path.parts[1:2] == ("figures",)
                or path.parts[:2] in (("tests", "parity"), ("tests", "course")))
    return path.suffix in (".cpp", ".h", ".cu", ".txt", ".cmake")


def read_if_there(path):
    return path.read_bytes() if path.is_file() else None


class Tree:
    """A copy of the sources and its build folder, laid out as the original: an object cache that
    knows the one knows the other. A file is written only where its content differs, so that a
    build redoes no more than it must."""

    def __init__(self, source, work, name, jobs):
        self.root, self.jobs, self.built = work / name, jobs, set()
        self.build_dir = self.root / "build" / "release"
        self.log = work / f"{name}.log"
        files = list_files(source)
        digest = hashlib.sha256()
        for path in files:
            content = (source / path).read_bytes()
            if read_if_there(self.root / path) != content:
                (self.root / path).parent.mkdir(parents=True, exist_ok=True)
                (self.root / path).write_bytes(content)
                shutil.copymode(source / path, self.root / path)
            if is_input(path):
                digest.update(repr((str(path), content)).encode())
        self.digest = digest.hexdigest()
        for path in set(list_tree(self.root)) - set(files):
            (self.root / path).unlink()

    def commands(self, targets):
        """What builds targets; the build system configures itself again as needed."""
        commands = [["ninja", "-C", self.build_dir, f"-j{self.jobs}", *targets]]
        if not (self.build_dir / "build.ninja").is_file():
            commands.insert(0, ["cmake", "-S", self.root, "-B", self.build_dir, "-G", "Ninja",
                                "-DCMAKE_BUILD_TYPE=Release", "-DUSP_CUDA=OFF"])
        return commands

    def build(self, targets):
        """Throws FaultError if it fails."""
        targets = [target for target in targets if target != NO_TARGET]
        self.built.update(targets)
        if not targets:
            return
        with open(self.log, "w", encoding="utf-8") as log:
            for command in self.commands(targets):
                if subprocess.run(command, stdout=log, stderr=log).returncode != 0:
                    raise FaultError(f"building {' '.join(targets)} failed:\n{tail(self.log)}")
        if " warning: " in self.log.read_text(encoding="utf-8", errors="replace"):
            raise FaultError("it compiles with a warning, which is an error where USP_WERROR is "
                             f"on:\n{tail(self.log)}")

    @contextlib.contextmanager
    def patched(self, fault):
        """The tree with the fault in it. Writing gives a file a new time, so the next build
        compiles it again: with the fault, and once more without."""
        changed = fault.apply(self.root)
        before = {path: (self.root / path).read_bytes() for path in changed}
        try:
            for path, text in changed.items():
                (self.root / path).write_text(text, encoding="utf-8")
            yield
        finally:
            for path, content in before.items():
                (self.root / path).write_bytes(content)

    def run(self, target, test):
        """(exit code, output) of a test: `tests/....py NAME`, or the name of a Catch2 test case."""
        binary = self.build_dir / "bin" / target
        if test.startswith("tests/"):
            script, name = test.split()
            own = [] if target == NO_TARGET else ["--binary", binary]
            command = [python_for(script), self.root / script, *own, name]
        else:
            command = [binary, re.sub(r"([\\,\[])", r"\\\1", test)]
        env = dict(os.environ, OMP_NUM_THREADS=str(self.jobs), OMP_WAIT_POLICY="passive",
                   PYTHONPATH=os.pathsep.join(filter(None, (  # of sitecustomize.py, as ctest has it
                       str(self.root / "tests"), os.environ.get("PYTHONPATH")))))
        try:
            done = subprocess.run(command, env=env, stdin=subprocess.DEVNULL, timeout=TIMEOUT,
                                  stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        except subprocess.TimeoutExpired:
            raise FaultError(f"{test}: still running after {TIMEOUT} s") from None
        output = done.stdout.decode(errors="replace")
        if "No test cases matched" in output or "No tests ran" in output:
            raise FaultError(f"{target} has no test '{test}'")
        if done.returncode == 0 and is_skipped(output):
            return SKIPPED, output
        return done.returncode, output


def is_skipped(output):
    """Whether unittest ran nothing of what it was asked for: that, too, ends with 0. A class that is
    skipped as a whole does not count as a test that ran."""
    ran = re.search(r"^Ran (\d+) tests? in .*\n\nOK \(skipped=(\d+)\)", output, re.M)
    return ran is not None and int(ran[1]) <= int(ran[2])


def python_for(script):
    """A Python for the test: one with NumPy, where there is one and the test compares with it."""
    if script.endswith(("test_reference.py", "test_experts.py")):
        for python in (sys.executable, "python3", "/usr/bin/python3"):
            with contextlib.suppress(OSError):
                if subprocess.run([python, "-c", "import numpy"], stdout=subprocess.DEVNULL,
                                  stderr=subprocess.DEVNULL).returncode == 0:
                    return python
    return sys.executable


def says(output, message):
    """Whether a program's output holds the message, wherever its lines were broken."""
    return any(re.search(message, text) for text in (output, " ".join(output.split())))


def tail(text, lines=25):
    text = text.read_text(encoding="utf-8", errors="replace") if isinstance(text, Path) else text
    return "\n".join(text.rstrip().splitlines()[-lines:])


def check_unpatched(trees, faults):
    """Every test has to pass without the fault, and must not print the fault's message anyway.
    Returns {fault: (outcome, what to show)} of those faults that there is no use in planting."""
    def run(tree, fault):
        tree.build([fault.target])
        return tree.run(fault.target, fault.test)

    tests = {(fault.target, fault.test): fault for fault in faults}
    outcomes = share_out(trees, run, tests.values())
    useless = {}
    for fault in faults:
        code, output = outcomes[tests[fault.target, fault.test]]
        if code == SKIPPED:
            useless[fault] = CANNOT_RUN, ""
        elif code != 0:
            useless[fault] = MISSED, f"the test does not pass without the fault:\n{tail(output)}"
        elif says(output, fault.message):
            useless[fault] = MISSED, (f"the message '{fault.message}' stands in the output of the "
                                      f"test that passes:\n{tail(output)}")
    return useless


def share_out(trees, work, faults):
    """{fault: work(tree, fault)}, one at a time in each tree; the first exception ends it. A tree
    stays with its target, then takes one that it has built or that no other tree works on: so most
    targets are built in one tree alone."""
    left, at, results, lock = list(faults), {}, {}, threading.Lock()

    def take(tree):
        with lock:
            elsewhere = {target for other, target in at.items() if other is not tree}
            waiting = collections.Counter(fault.target for fault in left)
            best = max(left, default=None, key=lambda fault: (
                fault.target == at.get(tree), fault.target in tree.built,
                fault.target not in elsewhere, waiting[fault.target]))
            if best is not None:
                left.remove(best)
                at[tree] = best.target
            return best

    def work_through(tree):
        fault = take(tree)
        while fault is not None:
            try:
                results[fault] = work(tree, fault)
            except BaseException:
                with lock:
                    left.clear()
                raise
            fault = take(tree)

    with ThreadPoolExecutor(len(trees)) as pool:
        for done in [pool.submit(work_through, tree) for tree in trees]:
            done.result()
    return results


def try_fault(tree, fault):
    """(CAUGHT, CANNOT_RUN or MISSED, what to show)."""
    try:
        with tree.patched(fault):
            tree.build([fault.target])
            code, output = tree.run(fault.target, fault.test)
    except FaultError as error:
        return MISSED, str(error)
    if code == SKIPPED:
        return CANNOT_RUN, tail(output)
    if code == 0:
        return MISSED, "the test passes"
    if not says(output, fault.message):
        return MISSED, f"the test fails without the message '{fault.message}':\n{tail(output)}"
    return CAUGHT, ""


class Report:
    """A line per fault as it comes in; what was caught is kept in a file for the next time."""

    def __init__(self, count, cache, cache_path):
        self.count, self.cache, self.cache_path = count, cache, cache_path
        self.outcomes, self.begin = {}, time.monotonic()
        self.lock = threading.Lock()

    def add(self, fault, digest, seconds, outcome, why):
        with self.lock:
            self.outcomes[fault.name] = outcome
            tried = len(self.outcomes)
            each = (time.monotonic() - self.begin) / tried
            note_progress(f"{tried} of {self.count}, {each * (self.count - tried):.0f} s left")
            print(f"{outcome:8} {fault.name}  by {fault.target}: {fault.test}  in {seconds:.0f} s",
                  flush=True)
            if outcome == CAUGHT:
                self.cache[fault.name] = digest
                write_whole(self.cache_path, json.dumps(self.cache, indent=1) + "\n")
            else:
                print(f"{fault.what}\n{why}", flush=True)

    def names(self, outcome):
        return sorted(name for name, own in self.outcomes.items() if own == outcome)


def run_faults(trees, faults, cache_path, force, are_tests_run, seconds=None):
    """Prints a line per fault; returns the exit code and the names of those caught. are_tests_run:
    who started this runs the tests without the faults, too. seconds: after so many no other fault
    is begun, and how many remain is said."""
    cache = {}
    if cache_path.is_file() and not force:
        cache = json.loads(cache_path.read_text(encoding="utf-8"))
    digest = {fault.name: hashlib.sha256((trees[0].digest + fault.text).encode()).hexdigest()
              for fault in faults}
    fresh = [fault for fault in faults if cache.get(fault.name) != digest[fault.name]]
    for fault in fresh:
        fault.apply(trees[0].root)  # a stale patch is found before anything is built
    for fault in faults:
        if fault not in fresh:
            print(f"caught   {fault.name}  before, and nothing has changed", flush=True)
    report = Report(len(fresh), cache, cache_path)
    trees = trees[:max(1, len(fresh))]

    def judge(tree, fault):
        begin = time.monotonic()
        outcome, why = try_fault(tree, fault)
        report.add(fault, digest[fault.name], time.monotonic() - begin, outcome, why)

    left = list(fresh)
    together = len(left) if seconds is None else turns.FAULTS_TOGETHER
    while left and (seconds is None or time.monotonic() - report.begin < seconds):
        some, left = left[:together], left[together:]
        useless = {}
        if not are_tests_run:
            note_progress(f"{len(some)} faults: first their tests without them")
            useless = check_unpatched(trees, some)
            print("their tests ran without the faults, after "
                  f"{time.monotonic() - report.begin:.0f} s", flush=True)
        for fault, (outcome, why) in useless.items():
            report.add(fault, "", 0, outcome, why)
        share_out(trees, judge, [fault for fault in some if fault not in useless])
    if left:
        print(f"the {seconds:.0f} seconds for faults are used: {len(left)} of {len(faults)} remain, "
              "and wait for their turn", flush=True)
        faults = [fault for fault in faults if fault not in left]
    skipped, missed = report.names(CANNOT_RUN), report.names(MISSED)
    print(f"{len(faults)} faults: {len(faults) - len(missed) - len(skipped)} caught, "
          f"{len(skipped)} skipped, {len(missed)} missed {' '.join(missed)}".rstrip())
    write_whole(cache_path.parent / budget.TRIED, json.dumps([fault.name for fault in faults]))
    caught = {fault.name for fault in faults} - set(missed) - set(skipped)
    return 1 if missed else SKIPPED if skipped and not caught else 0, caught


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, default=HERE.parent.parent, help="the checkout")
    parser.add_argument("--work", type=Path, help="folder for the copy and its build")
    parser.add_argument("--only", action="append", metavar="NAME", help="this fault; repeatable")
    parser.add_argument("--chosen", action="store_true",
                        help="those changed since they were caught, or a few if none has")
    parser.add_argument("--record", action="store_true",
                        help="note those that are caught as they are now in caught.json")
    parser.add_argument("--list", action="store_true", help="name the faults and their tests")
    parser.add_argument("--jobs", type=int, default=2, help="compilers and threads of each copy")
    parser.add_argument("--copies", type=int, default=min(4, max(2, len(os.sched_getaffinity(0)))),
                        help="faults at a time, each in a copy")
    parser.add_argument("--force", action="store_true", help="also those that were caught before")
    args = parser.parse_args()
    try:
        faults = read_faults()
        unknown = set(args.only or ()) - {fault.name for fault in faults}
        if unknown:
            parser.error(f"no fault {', '.join(sorted(unknown))}; --list names them")
        all_faults = faults
        faults = [fault for fault in faults if not args.only or fault.name in args.only]
        if args.list:
            for fault in faults:
                print(f"{fault.name}: {fault.what}\n    {fault.target}: {fault.test}")
            return 0
        if args.work is None:
            parser.error("--work FOLDER is needed")
        if args.chosen:
            faults = choose(faults, args.source)
        args.work.mkdir(parents=True, exist_ok=True)
        trees = [Tree(args.source.resolve(), args.work.resolve(), f"source{i + 1}", args.jobs)
                 for i in range(max(1, args.copies))]
        code, caught = run_faults(trees, faults, args.work.resolve() / "caught.json", args.force,
                                  "USP_EVERY_TEST_RUNS" in os.environ,
                                  float(os.environ.get("USP_FAULT_SECONDS", 0)) or None)
        if args.record:
            write_record(all_faults, args.source.resolve(), caught)
        return code
    except FaultError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
