"""What judges of exercises measure with: estimates and short runs of the chapters' programs."""
import json
import re
import shlex
import tempfile
from pathlib import Path

from tools import chapters, machine
from tools.base import BookError, say, write_whole
from tools.exercise import planted
from tools.lab import lab
from tools.process import wait_for
from tools.run import build, estimates, launch, plan


class NotYet(Exception):
    """An answer that is wrong. Its lines go to the reader: first the words, then the numbers."""

    def __init__(self, *lines):
        super().__init__(lines[0])
        self.lines = lines


class Run:
    """The files of a finished run."""

    def __init__(self, folder):
        self.folder = Path(folder)

    def steps(self):
        """The metrics of every step, as metrics.jsonl has them."""
        text = (self.folder / "metrics.jsonl").read_text(encoding="utf-8")
        return [json.loads(line) for line in text.splitlines()]

    def read(self, name):
        """A JSON file of the run, such as ledger.json."""
        return json.loads((self.folder / name).read_text(encoding="utf-8"))


class Lab:
    """Builds the chapters' programs as needed and runs them; `root` of the runs is temporary."""

    def __init__(self):
        self._scratch = tempfile.TemporaryDirectory(prefix="book_lab_")
        self._runs, self._programs = 0, {}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.cleanup()

    def cleanup(self):
        """The files of all runs go."""
        self._scratch.cleanup()

    def program(self, chapter):
        """The chapter's executable, up to date."""
        if chapter not in self._programs:
            name = chapters.resolve(chapter).name
            build.prepare(build.RELEASE, name)
            self._programs[chapter] = build.binary(build.RELEASE, name)
        return self._programs[chapter]

    def estimate(self, chapter, **flags):
        """What tools/run/estimates.py reads of --estimate with these flags; a flag that takes no value
        has None."""
        return estimates.estimate(self.program(chapter), flags)

    def kernels(self, name, *size):
        """{rung: what ./book lab counts of it} at these sizes."""
        return {record["name"]: record for record in lab.counted(name, size)}

    def plan(self, cluster, batch, words):
        """The fastest layout that ./book plan answers with, as its --json has it. `cluster` is a name or
        a file, `words` are flags of the search."""
        flags = plan.search_flags(str(cluster), batch, [*shlex.split(words), "--plan_best", "1", "--plan_json"])
        found = estimates.output_of([str(self.program(plan.find_chapter().short)), *flags])
        return json.loads(found)["best"][0]

    def changed(self, cluster, **values):
        """A file in the lab of this cluster's file with other numbers: tools/run/plan.py, changed()."""
        name = "_".join([cluster.stem, *(f"{key}_{value:g}" for key, value in values.items())])
        path = Path(self._scratch.name) / f"{name.replace('.', '-').replace('/', '-')}.json"
        write_whole(path, plan.changed(cluster, **values))
        return path

    def run(self, chapter, ranks=1, **flags):
        """Trains with these flags and returns the Run. A flag given as a list is repeated; a flag
        that takes no value has None."""
        self._runs += 1
        folder = Path(self._scratch.name) / str(self._runs)
        words = [word for name, values in flags.items()
                 for value in (values if isinstance(values, list) else [values])
                 for word in estimates.words_of({name: value})]
        program = [str(self.program(chapter)), "--run_dir", str(folder), *words]
        say(f"book: running {chapter} on {ranks} rank{'s' * (ranks > 1)}: {shlex.join(words)}")
        held = []
        code, signals = wait_for(launch.rank_command(program, ranks, None, None),
                                 machine.thread_environment(ranks=ranks), held.append)
        if signals:
            raise BookError("the measurement was interrupted", 128 + signals[0])
        if code != 0:
            raise BookError(f"the run ended with exit code {code}:\n{''.join(held[-20:])}")
        return Run(folder)

    def prove(self, chapter, mistake, words):
        """What ./book prove says of a layout, in the chapter with a fault of tests/faults in it: the
        lines about its first twin that differs, none where all are equal to one process. Builds the
        program in a copy of the sources."""
        say("book: building the program with the mistake; the first time takes minutes")
        with planted.Copy(chapters.resolve(chapter)).program(mistake) as program:
            return planted.proof(program, words)


def rows_of(page):
    """[(flags, seconds)] of a page's table of measured steps: | `flags` | 1.234 |"""
    found = re.findall(r"^\| `([^`]+)` \| ([\d.]+) \|$", page.read_text(encoding="utf-8"), re.M)
    return [(flags, float(seconds)) for flags, seconds in found]


class RecordedLab(Lab):
    """Hands out the runs of an exN_name.runs.json instead of running anything."""

    def __init__(self, path):
        super().__init__()
        self.runs = json.loads(path.read_text(encoding="utf-8"))["runs"]

    def run(self, chapter, **flags):
        """BookError if nobody has recorded this setting."""
        for run in self.runs:
            if run["chapter"] == chapter and run["flags"] == flags:
                return RecordedRun(run["steps"])
        raise BookError(f"no recorded run of {chapter} has {flags}; python3 -m tools.exercise.record records")

    def prove(self, chapter, mistake, words):
        """BookError if nobody has recorded this layout."""
        for run in self.runs:
            if run["chapter"] == chapter and run["flags"] == {"mistake": mistake, "flags": " ".join(words)}:
                return run["says"]
        raise BookError(f"no recorded proof of {chapter} has {' '.join(words)}; "
                        "python3 -m tools.exercise.record records")


class RecordedRun:
    """A Run of which only the times of its steps are known."""

    def __init__(self, steps):
        self._steps = steps

    def steps(self):
        return [{"step_ms": step_ms} for step_ms in self._steps]
