"""Schedules of a pipeline that readers write as tables: what the chapter's program makes of one."""
import json
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from tools import machine
from tools.base import BookError
from tools.exercise.lab import NotYet

CHAPTER = "ch05"
FILE = "schedule.txt"
LAYERS = 256  # of the model, which nobody runs: more than a table has stages


@dataclass(frozen=True)
class Schedule:
    """A schedule laid out in time, F = B = W = 1."""

    length: float     # of a step
    in_flight: list   # of each rank, the most chunks of micro-batches
    actions: list     # of each rank: action, begin, end and more, as --pp_show json has them

    def gaps(self, rank):
        """[(begin, end, the action that ends it)]: when a rank waits between two of its actions."""
        own = self.actions[rank]
        return [(before["end"], after["begin"], after["action"])
                for before, after in zip(own, own[1:]) if after["begin"] > before["end"]]

    def order(self, rank):
        """The rank's actions as the table has them."""
        return [action["action"] for action in self.actions[rank]]


def named(lab, name, ranks, micro_batches, **flags):
    """The schedule that the chapter makes under this name."""
    code, output, errors = _show(lab, name, ranks, micro_batches, flags)
    if code != 0:
        raise BookError(f"pp_schedule={name}: {errors}")
    return _read(output)


def written(lab, table, ranks, micro_batches, chunks=1):
    """The schedule of a reader's table; NotYet, in the checker's words, if it refuses the table, or
    if this is a table of another pipeline."""
    with TemporaryDirectory(prefix="book_schedule_") as folder:
        path = Path(folder) / FILE
        path.write_text(table + "\n", encoding="utf-8")
        code, output, errors = _show(lab, path, ranks, micro_batches, {})
    if code == 2:
        raise NotYet(*_words(errors))
    if code != 0:
        raise BookError(f"{FILE}: exit code {code}: {errors}")
    schedule = _read(output)
    stages = {(rank, action["chunk"]): action["stage"]
              for rank, actions in enumerate(schedule.actions) for action in actions}
    if len(stages) != ranks * chunks:
        raise NotYet(f"the table has {len(stages)} stages and not {ranks * chunks}")
    if any(stage != chunk * ranks + rank for (rank, chunk), stage in stages.items()):
        raise NotYet("the table has another placement than loop: it lays stages on other ranks")
    return schedule


def _show(lab, schedule, ranks, micro_batches, flags):
    words = {"pp_size": ranks, "grad_acc_steps": micro_batches, "pp_schedule": schedule,
             "num_layers": LAYERS, "pp_show": "json", **flags}
    command = [str(lab.program(CHAPTER))]
    for flag, value in words.items():
        command += [f"--{flag}", str(value)]
    done = subprocess.run(command, env=machine.thread_environment(), stdin=subprocess.DEVNULL,
                          capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr.strip()


def _read(output):
    found = json.loads(output)
    return Schedule(found["makespan"], found["most_in_flight"], found["actions"])


def _words(errors):
    """A refusal, for a reader: without the file's name; of a deadlock first what it is."""
    reason = errors.rpartition(FILE)[2].removeprefix("error").lstrip(":, ")
    other = re.match(r"is for (\d+) (ranks|micro-batches), \w+ is (\d+)", reason)
    if other:
        return [f"the table has {other[1]} {other[2]} and not {other[3]}"]
    kind, _, who = reason.partition(": ")
    if kind == "deadlock":
        return ["the ranks wait for each other for ever", *who.split("; ")]
    return [f"no pipeline can run this table: {reason}"]
