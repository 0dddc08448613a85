"""The exercises of the chapters: finds them, lists them, shows hints and solutions, keeps what a
reader has reached. tools/exercise/check.py judges answers; docs/exercises.md says how one is written.
"""
import hashlib
import json
import re
import sys
import textwrap
from dataclasses import dataclass, replace
from pathlib import Path

from tools import chapters
from tools.base import ROOT, BookError, show_path, write_whole

KINDS = {"fill": "fill the hole", "predict": "predict the number",
         "break": "name the test that sees it", "decide": "measure and decide",
         "table": "write the table"}
FIELDS = ("kind", "size", "learn")  # which every exercise has
STATE = ROOT / "build" / "exercises" / "state.json"
UNANSWERED = "?"  # the line of an answer's file that nobody has answered; of a table, one line
HINTS = 3
TODO = "USP_TODO("
HOLE = re.compile(r"^( *)// SOLUTION BEGIN ([^\n]*)\n.*?^ *// SOLUTION END\n", re.S | re.M)
NAME = re.compile(r"(?:ch)?(\d{1,2})(?:_\w+)?[./](?:ex)?(\d{1,2})")


@dataclass(frozen=True)
class Exercise:
    """One exercise: exN_name.md in its chapter's exercises/, and the files beside it."""

    chapter: chapters.Chapter
    number: int
    page: Path
    title: str
    fields: dict
    text: str
    hints: tuple

    @property
    def name(self):
        """ch02.ex1"""
        return f"{self.chapter.short}.ex{self.number}"

    @property
    def kind(self):
        return self.fields["kind"]

    @property
    def answer_file(self):
        """What the reader edits: code, or a line of text."""
        return self.page.with_suffix(".cpp" if self.kind == "fill" else ".txt")

    def beside(self, suffix):
        """Another file of the exercise, such as its judge."""
        return self.page.with_suffix(suffix)

    def solution(self, suffix):
        """A file of its solution: the same name below solutions/."""
        root = self.chapter.folder.parent
        return root / "solutions" / self.chapter.name / (self.page.stem + suffix)

    def runs_on_emulator(self):
        """Is the answer a kernel, which its judge launches on the emulated GPU?"""
        judge = self.beside(".judge.cpp")
        return judge.is_file() and '#include "emulator/' in judge.read_text(encoding="utf-8")

    def second_part(self):
        """The table that an exercise in code asks for besides; None where it asks for code alone."""
        if self.kind == "fill" and self.beside(".judge.py").is_file():
            return replace(self, fields={**self.fields, "kind": "table"})
        return None

    def wrong_answers(self):
        """The file with the known wrong answers."""
        is_second_part = self.kind == "table" and self.beside(".judge.cpp").is_file()
        return self.solution(".table.wrong.md" if is_second_part else ".wrong.md")

    def functions(self):
        """The functions that an answer defines."""
        return self.fields.get("functions", "").split()

    def target(self, kind="judge"):
        """The executable that judges the reader's answer, or ("course") all that the course has."""
        return f"{kind}_{self.chapter.short}_ex{self.number}"

    def answer(self):
        """The reader's answer as it stands in its file. BookError if there is no such file."""
        try:
            return self.answer_file.read_text(encoding="utf-8")
        except OSError as error:
            raise BookError(f"{show_path(self.answer_file)}: {error.strerror}; `git checkout` "
                            "brings it back")

    def is_begun(self):
        """Has a reader changed the starter of a C++ exercise?"""
        return self.kind == "fill" and self.answer() != starter(
            self.solution(".cpp").read_text(encoding="utf-8"), self.name)

    def is_unsolved(self):
        """Is the answer still the one that a fresh clone has?"""
        answer = self.answer()
        if self.kind == "table":
            return UNANSWERED in (line.strip() for line in answer.splitlines())
        return TODO in answer if self.kind == "fill" else answer.strip() in ("", UNANSWERED)


def read_exercise(page, chapter):
    """The exercise of a page. BookError if the page lacks a part."""
    def wrong(what):
        return BookError(f"{page}: {what}; docs/exercises.md shows the form")

    number = re.match(r"ex(\d+)_", page.stem)
    head, *parts = re.split(r"^## Hint \d+\n", page.read_text(encoding="utf-8"), flags=re.M)
    title = re.match(r"# (.+)\n", head)
    if not number or not title:
        raise wrong("an exercise is called exN_name.md and begins with `# title`")
    fields = dict(re.findall(r"^- (\w+): (.+)$", head, re.M))
    missing = [field for field in FIELDS if field not in fields]
    if missing or fields["kind"] not in KINDS:
        raise wrong(f"a line `- {missing[0]}: ...` is missing" if missing else
                    f"kind {fields['kind']!r} is none of {', '.join(KINDS)}")
    if fields["kind"] == "fill" and "functions" not in fields:
        raise wrong("a line `- functions: ...` is missing")
    if len(parts) != HINTS or not all(part.strip() for part in parts):
        raise wrong(f"it has {len(parts)} hints and not {HINTS}")
    text = re.sub(r"^- \w+: .+\n", "", head[title.end():], flags=re.M).strip()
    return Exercise(chapter, int(number[1]), page, title[1], fields, text,
                    tuple(part.strip() for part in parts))


def find_exercises(root=ROOT, chapter=None):
    """All exercises in order, or those of one chapter."""
    chosen = [chapter] if chapter else chapters.find_chapters(root)
    return [exercise for one in chosen for exercise in sorted(
        (read_exercise(page, one) for page in (one.folder / "exercises").glob("ex*.md")),
        key=lambda exercise: exercise.number)]


def resolve(name, root=ROOT):
    """The exercise called ch02.ex1, or 2.1. BookError (2) names those that exist."""
    match = NAME.fullmatch(name)
    if not match:
        raise BookError(f"an exercise is called like ch02.ex1, not {name!r}; ./book exercise lists "
                        "them", 2)
    chapter = chapters.resolve(match[1], root)
    found = find_exercises(root, chapter)
    for exercise in found:
        if exercise.number == int(match[2]):
            return exercise
    names = ", ".join(exercise.name for exercise in found) or "none"
    raise BookError(f"{chapter.short} has no exercise {int(match[2])}; exercises there: {names}", 2)


def starter(solution, name):
    """A solution with its hole as a reader gets it."""
    return HOLE.sub(rf'\1// TODO \2\n\1{TODO}"{name}");\n', solution)


def write_starters(root=ROOT, chapter=None):
    """Writes the starters anew from the solutions, except where a reader has begun."""
    for exercise in find_exercises(root, chapter):
        path = exercise.answer_file
        if path.exists() and (exercise.kind == "table" or not exercise.is_unsolved()):
            continue  # the table that a reader begins with follows from nothing
        text = f"{UNANSWERED}\n"
        if exercise.kind == "fill":
            text = starter(exercise.solution(".cpp").read_text(encoding="utf-8"), exercise.name)
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            write_whole(path, text)
            print(f"{show_path(path)}: written")


class Progress:
    """What the reader has reached, by exercise: the answer that was found right, hints shown."""

    def __init__(self, path=STATE):
        self.path = path
        try:
            self.entries = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            self.entries = {}

    def of(self, exercise):
        return self.entries.setdefault(exercise.name, {})

    def save(self):
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self.path, json.dumps(self.entries, indent=1) + "\n")

    def state(self, exercise):
        """unsolved, begun or solved: by the answer as it stands now."""
        if exercise.is_unsolved():
            return "unsolved"
        return "solved" if self.of(exercise).get("right") == digest(exercise) else "begun"

    def note_verdict(self, exercise, is_right):
        if is_right:
            self.of(exercise)["right"] = digest(exercise)
        else:
            self.of(exercise).pop("right", None)
        self.save()


def digest(exercise):
    table = exercise.second_part()
    answer = exercise.answer() + (table.answer() if table else "")
    return hashlib.sha256(answer.encode()).hexdigest()[:16]


def list_exercises(chapter=None, root=ROOT):
    """Prints the exercises of a chapter, or of all: state, size, what one learns."""
    found = find_exercises(root, chapter)
    if not found:
        raise BookError(f"{chapter.short if chapter else 'this checkout'} has no exercises")
    progress = Progress()
    for exercise in found:
        print(f"{exercise.name}  {progress.state(exercise):<8}  {exercise.title}")
        print(f"          {KINDS[exercise.kind]}, {exercise.fields['size']}")
        for line in textwrap.wrap("you learn " + exercise.fields["learn"], 88):
            print(f"          {line}")
    solved = sum(progress.state(exercise) == "solved" for exercise in found)
    print(f"{solved} of {len(found)} solved; ./book exercise {found[0].name} shows one")


def show_exercise(exercise):
    """Prints the task and how to answer it."""
    print(f"{exercise.name}  {exercise.title}  ({KINDS[exercise.kind]}, "
          f"{exercise.fields['size']})\n\n{exercise.text}\n")
    print(f"answer  {how_to_answer(exercise)}")
    print(f"stuck   ./book hint {exercise.name}")


def how_to_answer(exercise):
    """The commands that answer and check."""
    if exercise.kind == "fill":
        return (f"edit {show_path(exercise.answer_file)}, then ./book check {exercise.name}, or "
                f"./book watch {exercise.name} meanwhile")
    if exercise.kind == "table":
        return (f"edit {show_path(exercise.answer_file)}, take out its line {UNANSWERED}, then "
                f"./book check {exercise.name}")
    return f"./book check {exercise.name} \"{exercise.fields.get('example', 'ANSWER')}\""


def show_hint(exercise, number=None):
    """Prints one hint more than the last time, or those up to `number`."""
    progress = Progress()
    entry = progress.of(exercise)
    shown = min(number or entry.get("hints", 0) + 1, HINTS)
    for index, hint in enumerate(exercise.hints[:shown], 1):
        print(f"hint {index} of {HINTS}\n{textwrap.indent(hint, '  ')}\n")
    after = (f"more: ./book hint {exercise.name}" if shown < HINTS
             else f"that was the last one; ./book solution {exercise.name}")
    print(after)
    entry["hints"] = max(shown, entry.get("hints", 0))
    progress.save()


def show_solution(exercise, sure=False):
    """Prints the solution; asks once where the exercise is unsolved. Returns the exit code."""
    progress = Progress()
    entry = progress.of(exercise)
    if not (sure or entry.get("shown") or progress.state(exercise) == "solved"):
        question = f"{exercise.name} is not solved yet. Show its solution? [y/N] "
        if not sys.stdin.isatty():
            raise BookError(f"{exercise.name} is not solved yet; --yes shows its solution all the "
                            "same", 2)
        if input(question).strip().lower() not in ("y", "yes"):
            print(f"./book hint {exercise.name} says more, step by step")
            return 1
    entry["shown"] = True
    progress.save()
    for suffix in (".cpp", ".txt", ".md"):
        path = exercise.solution(suffix)
        if path.is_file():
            print(f"{show_path(path)}\n\n{path.read_text(encoding='utf-8').rstrip()}\n")
    return 0
