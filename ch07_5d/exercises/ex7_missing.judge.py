"""Judge of ch07.ex7: which message is missing, by what --mesh_show types says of a run without it."""
import re
import subprocess
from pathlib import Path

from tools import machine
from tools.base import BookError
from tools.exercise.lab import NotYet
from tools.run import estimates

PAGE = Path(__file__).with_name("ex7_missing.md")
FLAGS = {"tp_size": 2, "cp_size": 2, "cp_method": "all_gather", "mesh_show": "types"}
# (error, the message that is missing, words for another one)
ERRORS = (("a", 7, "a term meets the gradient that the norm's other input has, and the error says in which block"),
          ("b", 3, "the residual that is added already has a sum of this block in it"),
          ("c", 5, "backward of attention needs again what forward had gathered"),
          ("d", 6, "what is copied are the gradients of a rank's own keys and values, as a sum makes them"))


def without(lab, number):
    """What the program says of the layout without this message of the layer."""
    command = [str(lab.program("ch07")), *estimates.words_of({**FLAGS, "mesh_left_out": number})]
    said = subprocess.run(command, capture_output=True, text=True, check=False, env=machine.thread_environment())
    if said.returncode == 2:
        raise NotYet(said.stderr.strip())
    return said.stdout.strip()


def read(answer):
    """{error: number} of the reader's lines."""
    found, names = {}, [row[0] for row in ERRORS]
    for line in answer.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        match = re.fullmatch(r"(\w): (\d+)", line.strip())
        if not match or match[1] not in names:
            raise NotYet(f"this line names no message: '{line.strip()}'", "a line is such as: a: 2")
        found[match[1]] = int(match[2])
    return found


def judge(answer, lab):
    """Lines for right numbers; NotYet for the first that gives another error."""
    found, page = read(answer), " ".join(PAGE.read_text(encoding="utf-8").split())
    for name, number, words in ERRORS:
        if name not in found:
            raise NotYet(f"a line is missing: {name}")
        expected, said = without(lab, number), without(lab, found[name])
        if expected not in page:
            raise BookError(f"{PAGE.name} does not show what the program says without message {number}:\n{expected}")
        if said != expected:
            raise NotYet(words, f"{name}: without message {found[name]} the program says\n{said}")
    return [f"{name}: without message {found[name]} the program says just that" for name, *_ in ERRORS]
