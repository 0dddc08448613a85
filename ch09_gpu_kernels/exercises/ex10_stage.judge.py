"""Judge of ch09.ex10: the wait that the fault takes out, beside those that the kernel has."""
import re
from pathlib import Path

from tools.exercise.lab import NotYet

ROOT = Path(__file__).resolve().parents[2]
FAULT = ROOT / "tests" / "faults" / "kernels" / "attention_values_filled_too_early.patch"
WAIT = re.compile(r"(?:place\.)?(\w+)\((.*)\)\.wait\((.*)\);?")
THERE = {"keys_empty": "this wait is there: it keeps the keys until both groups have read them",
         "keys_full": "the groups do wait for the keys, before they multiply by them",
         "values_full": "the groups do wait for the values, before they multiply by them",
         "loaded": "the groups wait for the queries before their first step, which is outside of these loops"}


def missing():
    """(barrier, stage, parity) of the wait that the fault takes out."""
    text = FAULT.read_text(encoding="utf-8")
    [line] = re.findall(r"^-(?!--)\s*(.+)$", text, re.M)
    return WAIT.fullmatch(line).groups()


def judge(answer):
    """The words of a test's name, behind the right wait; NotYet for a wrong one."""
    wait, colon, words = answer.partition(":")
    if not colon:
        raise NotYet("the wait is missing: it stands before the name, with a colon behind it")
    found = WAIT.fullmatch(re.sub(r"\s*([().;])\s*", r"\1", wait.strip()))
    if not found:
        raise NotYet("to give a stage back is what the groups do: who waits for it?" if "arrive" in wait else
                     "this is no wait as it stands in these loops", "a wait is such as: place.keys_full(stage).wait(parity)")
    barrier, stage, parity = found.groups()
    wanted = missing()
    if barrier != wanted[0]:
        raise NotYet(THERE.get(barrier, f"there is no barrier that is called {barrier}"))
    if stage != wanted[1]:
        raise NotYet("this is the right barrier of another stage: the tile goes to place.values(stage)")
    if re.sub(r"\s", "", parity) not in ("parity", "(step/2&1)^1", "(step/kStages&1)^1"):
        raise NotYet("with this parity the first wait for each stage never ends: in the first round nobody has given "
                     "anything back yet, so it has to pass")
    return words.strip()
