"""Writes the program that judges answers to a C++ exercise: the answers, each in a namespace of its
own, and the judge.

    python3 -m tools.exercise.answers judge ch02.ex1 FILE     the reader's answer
    python3 -m tools.exercise.answers course ch02.ex1 FILE    starter, solution, wrong answers, mutants

Run by CMake; tools/cmake/exercises.cmake says when.
"""
import hashlib
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from tools.base import ROOT, BookError, show_path
from tools.exercise import exercises, mutants

INCLUDE = re.compile(r"^[ \t]*#[ \t]*(?:include|pragma)[^\n]*", re.M)
NAMESPACE = "namespace usp {"
MUTANTS = 16  # of every solution
TABLE = "declarations"  # where a compiler finds that an answer's declaration is another one


def cut(text, where):
    """(the include lines of an answer, the rest with its lines where they were)."""
    if text.count(NAMESPACE) != 1:
        raise BookError(f"{where}: an answer stands in one `{NAMESPACE}`")
    return INCLUDE.findall(text), INCLUDE.sub("", text)


@dataclass(frozen=True)
class Mistake:
    """A wrong answer that is known: a section `## name` of exN_name.wrong.md."""

    name: str
    says: str      # how the verdict on it begins
    # Of its code: diff, to the solution; cpp, in place of the hole; text, all of it; "" if none.
    language: str
    code: str

    def text(self, solution, where):
        """The solution with this mistake. BookError if it does not fit."""
        if self.language == "text":
            return self.code
        if self.language == "cpp":
            return exercises.HOLE.sub(lambda _: self.code, solution, count=1)
        for hunk in re.split(r"^@@.*\n", self.code, flags=re.M):
            lines = hunk.splitlines(keepends=True)
            old = "".join(line[1:] for line in lines if not line.startswith("+"))
            new = "".join(line[1:] for line in lines if not line.startswith("-"))
            if solution.count(old) != 1 or old == new:
                raise BookError(f"{where}: {self.name}: these lines stand {solution.count(old)} "
                                f"times in the solution, instead of once:\n{old}")
            solution = solution.replace(old, new)
        return solution


def mistakes(exercise):
    """The known wrong answers of an exercise. BookError if one says nothing."""
    path = exercise.wrong_answers()
    try:
        _, *sections = re.split(r"^## ", path.read_text(encoding="utf-8"), flags=re.M)
    except OSError as error:
        raise BookError(f"{show_path(path)}: {error.strerror}")
    found = []
    for section in sections:
        name, _, rest = section.partition("\n")
        says, fence, code = rest.partition("```")
        language, _, code = code.partition("\n")
        if not says.strip():
            raise BookError(f"{path}: {name} has no words for the reader")
        found.append(Mistake(name.strip(), " ".join(says.split()), language if fence else "",
                             code.rpartition("```")[0]))
    return found


def course_answers(exercise, left_out=()):
    """[(name, text, is it one of ours)]: what the course knows of an exercise."""
    solution = exercise.solution(".cpp").read_text(encoding="utf-8")
    found = [("solution", solution, True),
             ("starter", exercises.starter(solution, exercise.name), True)]
    found += [(mistake.name, mistake.text(solution, exercise.name), False)
              for mistake in mistakes(exercise)]
    found += [(name, text, False) for name, text in mutants.of(solution, exercise.name, MUTANTS)
              if name not in left_out]
    return found


class Spaces:
    """Answers, each in a namespace of its own."""

    def __init__(self, exercise):
        self.functions, self.includes, self.entries = exercise.functions(), [], []

    def add(self, name, text, file):
        """The answer's code; `file`: what messages of the compiler call it."""
        includes, body = cut(text, file)
        self.includes += [line for line in includes if line not in self.includes]
        space = f"answer_{len(self.entries)}"
        fields = ", ".join(f".{function} = usp::{space}::{function}" for function in self.functions)
        self.entries.append(f'      {{"{name}", {{{fields}}}}},')
        return f'#line 1 "{file}"\n{body.replace(NAMESPACE, f"namespace usp::{space} {{")}'


def program(exercise, spaces, bodies):
    """The source of a program that judges the answers in `spaces`, whose code is `bodies`."""
    return "\n".join([
        "// Written by tools/exercise/answers.py.", *spaces.includes, *bodies,
        f'#include "{exercise.beside(".judge.cpp").name}"', f'#line 1 "{TABLE}"',
        "int main(int argc, char** argv) {",
        "  const std::vector<usp::judging::Named<usp::judging::Answer>> answers = {",
        *spaces.entries,
        "  };",
        "  return usp::judging::judge_main(argc, argv, answers, usp::judging::judge,",
        "                                  usp::judging::observe);", "}", ""])


def write(kind, exercise, path):
    """Writes the program. Its text names no folder of this checkout, so that copies share what is
    compiled of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    spaces = Spaces(exercise)
    if kind == "judge":
        file = exercise.answer_file.relative_to(ROOT)
        bodies = [spaces.add("yours", exercise.answer(), file)]
    else:
        bodies, others = [], path.with_suffix(".others.h")
        foreign = ["#pragma GCC system_header  // wrong answers may be odd: no warnings"]
        for name, text, is_ours in course_answers(exercise, refused(exercise, path)):
            (bodies if is_ours else foreign).append(spaces.add(name, text, f"{name}.cpp"))
        others.write_text("\n".join(foreign), encoding="utf-8")
        bodies.append(f'#include "{others.name}"')
    path.write_text(program(exercise, spaces, bodies), encoding="utf-8")


def refused(exercise, path):
    """The mutants that a compiler has refused, which the program leaves out. They stand in a file
    beside it, which counts for one text of the solution."""
    try:
        known, *names = path.with_suffix(".refused").read_text(encoding="utf-8").split()
    except (OSError, ValueError):
        return []
    return names if known == solution_digest(exercise) else []


def refuse(exercise, path, names):
    """From now on the program leaves these mutants out, too."""
    names = sorted({*refused(exercise, path), *names})
    path.with_suffix(".refused").write_text(" ".join([solution_digest(exercise), *names]) + "\n",
                                            encoding="utf-8")


def solution_digest(exercise):
    return hashlib.sha256(exercise.solution(".cpp").read_bytes()).hexdigest()[:16]


def main(kind, name, path):
    try:
        write(kind, exercises.resolve(name), Path(path))
    except BookError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main(*sys.argv[1:])
