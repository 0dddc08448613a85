"""A chapter's program with a seeded fault in it, built in a copy of the sources."""
import contextlib

from tools import machine
from tools.base import ROOT, BookError
from tools.exercise import own_code
from tools.process import run_step, wait_for
from tools.run import build
from tools.test import testing

DIFFERS = "  DIFFERS\n"  # below the flags of a twin


def fault_in(name, chapter):
    """The fault of tests/faults with this name, at the same lines of the chapter: it carries the code of
    those before it. BookError if there is none."""
    faults, patch = own_code.fault_runner(), testing.find_fault(name)
    if patch is None:
        raise BookError(f"no fault of tests/faults is called {name}")
    try:
        fault = faults.Fault(patch)
        for hunk in fault.hunks:
            first, rest = hunk[0].split("/", 1)
            if first[:2] == "ch":
                hunk[0] = f"{chapter.name}/{rest}"
        fault.apply(ROOT)
    except faults.FaultError as error:
        raise BookError(str(error))
    return fault


def build_copy(tree, target):
    """Builds a target in a copy of the sources; says how far it is."""
    *configuring, building = tree.commands([target])
    for command in configuring:
        run_step("configuring the copy", [str(word) for word in command], live=False)
    build.run_build(tree.build_dir, [target], [str(word) for word in building], tree.jobs)
    tree.build([target])


class Copy:
    """A copy of the sources, and the chapter's program there."""

    def __init__(self, chapter, folder=own_code.COPY):
        self.chapter = chapter
        self._faults = own_code.fault_runner()
        self._tree = self._faults.Tree(ROOT, folder.parent, folder.name, machine.usable_cores())

    @contextlib.contextmanager
    def program(self, fault=None):
        """The program, as long as the fault with this name stands in its sources. BookError where it
        cannot be built."""
        planted = self._tree.patched(fault_in(fault, self.chapter)) if fault else contextlib.nullcontext()
        with planted:
            try:
                build_copy(self._tree, self.chapter.name)
            except self._faults.FaultError as error:
                raise BookError(str(error))
            yield self._tree.build_dir / "bin" / self.chapter.name


def proof(program, words):
    """What ./book prove says of the layout's first twin that differs, line by line; nothing where all are
    equal to one process. BookError where the program refuses the layout."""
    held = []
    code, _ = wait_for([str(program), "--prove", "16", *words], machine.thread_environment(), held.append)
    if code not in (0, 1) or (code == 1) != (DIFFERS in held):
        raise BookError("".join(held).strip().removeprefix("error: "), 2 if code == 2 else 1)
    found = held[held.index(DIFFERS) + 1:] if code == 1 else []
    return [line.strip() for line in found[:found.index("\n")]] if found else []
