"""Records the runs that a judge of an exercise compares with, for the course's own test, which asserts
no times, and builds no program with a mistake.

    python3 -m tools.exercise.record ch02.ex6     writes solutions/.../ex6_name.runs.json: the runs of its
                                         judge's settings()
"""

import json
import sys
import time

from tools import machine
from tools.base import show_path, write_whole
from tools.exercise import check, exercises
from tools.exercise.lab import Lab
from tools.process import git_commit


def record(exercise):
    """Runs the settings of an exercise's judge and writes down how long their steps take."""
    settings, chapter = check.load_judge(exercise).settings(), exercise.chapter.short
    with Lab() as lab:
        runs = [{"chapter": chapter, "flags": flags, **_found(lab, chapter, flags)} for flags in settings]
    path = exercise.solution(".runs.json")
    write_whole(path, json.dumps({
        "commit": git_commit(), "cpu": machine.cpu_name(), "cores": machine.usable_cores(),
        "isa": machine.instruction_sets(), "date": time.strftime("%Y-%m-%d"), "runs": runs},
        indent=1) + "\n")
    print(f"{show_path(path)}: {len(runs)} runs")


def _found(lab, chapter, flags):
    """Times of the steps of a run; of a proof with a mistake, what it says."""
    if "mistake" in flags:
        return {"says": lab.prove(chapter, flags["mistake"], flags["flags"].split())}
    return {"steps": [step["step_ms"] for step in lab.run(chapter, **flags).steps()]}


if __name__ == "__main__":
    record(exercises.resolve(sys.argv[1]))
