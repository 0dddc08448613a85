"""What differs between two chapters: lines aligned between snippets, and `./book diff`.

A snippet is what stands between two `// [name]` lines. Texts are aligned from marker to marker, so
that a function of one is never taken for another of the other; the markers themselves are left out.
"""
import difflib
import itertools
import os
import re
import sys
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from tools.base import ROOT, BookError

# May always differ.
# and a chapter's pages, *.md
FREE = ("chapter.json", "cards.json", "layouts.json", "exercises", "examples", "figures", "recipes",
        "clusters", "data", "kernels")
CMAKE = "CMakeLists.txt"  # the same bytes in every chapter
MARKER = re.compile(r"[ \t]*(?://|#) \[([\w-]+)\][ \t]*")
SHOWN = re.compile(r"<!-- (?:snippet|delta): (\S+)#(\S+)(?: lines: [^\n]*?)?(?: mark: [^\n]*?)? -->")
NOTHING_COUNTED = "#include lines, blank lines"  # what differs in a file where nothing counts
CONTEXT = 3  # unchanged lines around a hunk
RED, GREEN, BOLD, PLAIN = "\033[31m", "\033[32m", "\033[1m", "\033[0m"


class Row(NamedTuple):
    """One line of two aligned texts."""

    kind: str  # " " in both, "-" only in the old one, "+" only in the new one
    text: str
    line: int  # its number in the old text for "-", in the new text otherwise
    names: tuple  # the snippets it lies in, outermost first


class Source:
    """The lines of a file and the snippets in it."""

    def __init__(self, text):
        self.ends_well = not text or text.endswith("\n")
        self.lines = text.split("\n")[:-1] if self.ends_well else text.split("\n")
        self.problems = []  # (line number, what is wrong and what to do)
        found = {}
        for index, line in enumerate(self.lines):
            match = MARKER.fullmatch(line)
            if match:
                found.setdefault(match[1], []).append(index)
        self.snippets = {}  # {name: (index of the first marker, of the last)}, in order
        for name, places in found.items():
            if len(places) == 2:
                self.snippets[name] = tuple(places)
            elif len(places) == 1:
                self.problems.append((places[0] + 1, f"`// [{name}]` stands here only: a snippet "
                                      "has one before and one after it, add the other"))
            else:
                self.problems.append((places[2] + 1, f"`// [{name}]` stands {len(places)} times in "
                                      "this file: a name is for one snippet, rename the other"))
        for (a, outer), (b, inner) in itertools.permutations(self.snippets.items(), 2):
            if outer[0] < inner[0] < outer[1] < inner[1]:
                self.problems.append((inner[1] + 1, f"snippet [{b}] begins inside [{a}] and ends "
                                      f"outside of it: end it before [{a}] ends"))

    def around(self, before, after):
        """The snippets that reach into what lies between two line indices, outermost first."""
        return tuple(name for name, (first, last) in self.snippets.items()
                     if first < after and last > before)

    def code(self, start, stop):
        """The indices from start to stop that are not marker lines."""
        return [i for i in range(start, stop) if not MARKER.fullmatch(self.lines[i])]

    def marks(self, names):
        """The marker lines of these snippets in order: (index, name)."""
        return sorted((index, name) for name in names for index in self.snippets[name])


def read_source(path):
    """The file as a Source. BookError (2) if it cannot be read."""
    try:
        return Source(path.read_bytes().decode("utf-8", "backslashreplace"))
    except OSError as error:
        raise BookError(f"cannot read {path}: {error.strerror}", 2)


def align(old, new):
    """The rows of two Sources, aligned between the markers that both have."""
    shared = old.snippets.keys() & new.snippets.keys()
    old_marks, new_marks = old.marks(shared), new.marks(shared)
    if [name for _, name in old_marks] != [name for _, name in new_marks]:
        old_marks = new_marks = []
    old_cuts = [-1, *(index for index, _ in old_marks), len(old.lines)]
    new_cuts = [-1, *(index for index, _ in new_marks), len(new.lines)]
    parts = zip(zip(old_cuts, old_cuts[1:]), zip(new_cuts, new_cuts[1:]))
    return [row for old_cut, new_cut in parts for row in _align_part(old, new, old_cut, new_cut)]


def _align_part(old, new, old_cut, new_cut):
    """The rows between two cuts of each text.

    A removed line lies in the snippets of the old text. Where only the new text has a snippet, the
    line lies in that too if that is where it was removed.
    """
    a, b = old.code(old_cut[0] + 1, old_cut[1]), new.code(new_cut[0] + 1, new_cut[1])
    rows = []
    for is_same, i1, i2, j1, j2 in _stretches([old.lines[i] for i in a], [new.lines[j] for j in b]):
        if is_same:
            for i, j in zip(a[i1:i2], b[j1:j2]):
                gone = [name for name in old.around(i, i) if name not in new.snippets]
                rows.append(Row(" ", new.lines[j], j + 1, (*new.around(j, j), *gone)))
            continue
        place = (b[j1 - 1] if j1 else new_cut[0], b[j2] if j2 < len(b) else new_cut[1])
        here = [name for name in new.around(*place) if name not in old.snippets]
        rows += [Row("-", old.lines[i], i + 1, (*old.around(i, i), *here)) for i in a[i1:i2]]
        rows += [Row("+", new.lines[j], j + 1, new.around(j, j)) for j in b[j1:j2]]
    return rows


def _stretches(a, b):
    """What two lists of lines have in common: [(is it the same?, bounds in a, bounds in b)].

    Equal lines at the end are taken off first; before them, a blank line alone makes no two places
    the same.
    """
    ends = zip(reversed(a), reversed(b))
    tail = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], ends))
    matcher = difflib.SequenceMatcher(lambda line: not line.strip(), a[:len(a) - tail],
                                      b[:len(b) - tail], False)
    return [*((tag == "equal", *bounds) for tag, *bounds in matcher.get_opcodes()),
            (True, len(a) - tail, len(a), len(b) - tail, len(b))]


def is_counted(row):
    """Does the row differ, and is it more than a blank line or an #include?"""
    return row.kind != " " and bool(row.text.strip()) and not row.text.startswith("#include")


def count(rows):
    """(added, removed) lines that count; a changed line is one of each."""
    kinds = Counter(row.kind for row in rows if is_counted(row))
    return kinds["+"], kinds["-"]


def changed_snippets(rows):
    """The innermost snippets of the lines that count, in the order of the text."""
    return list(dict.fromkeys(row.names[-1] for row in rows if is_counted(row) and row.names))


def is_carried(path):
    """Does the rule apply to this file, named relative to its chapter?"""
    parts = path.split("/")
    hidden = any(part.startswith(".") or part == "__pycache__" for part in parts)
    return parts[0] not in FREE and not hidden and not path.endswith((".md", "~", ".swp", ".orig"))


def carried_files(folder):
    """The names of a chapter's files, relative to it, without what is free."""
    names = (p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
    return sorted(name for name in names if is_carried(name))


@dataclass
class Comparison:
    """What differs between the carried files of two chapters."""

    edited: dict  # {file: rows}
    sources: dict  # {file: (old Source, new Source)} of the same files
    added: dict  # {file: number of lines}
    removed: dict

    def counts(self):
        """(added, removed) lines of all edited files."""
        return count(itertools.chain(*self.edited.values()))

    def edited_files(self):
        """The files with lines that count."""
        return [file for file, rows in self.edited.items() if any(count(rows))]


def compare(old, new, root=ROOT):
    """The Comparison of two chapters, given by the names of their folders."""
    a, b = (set(carried_files(root / name)) - {CMAKE} for name in (old, new))
    changes = Comparison({}, {}, {}, {})
    for file in sorted(a & b):
        if (root / old / file).read_bytes() != (root / new / file).read_bytes():
            changes.sources[file] = read_source(root / old / file), read_source(root / new / file)
            changes.edited[file] = align(*changes.sources[file])
    for name, files, lines in ((new, b - a, changes.added), (old, a - b, changes.removed)):
        lines.update((file, len(read_source(root / name / file).lines)) for file in sorted(files))
    return changes


def amount(number, noun):
    """1 file, 2 files"""
    return f"{number} {noun}" + ("" if number == 1 else "s")


def reading_order(readme):
    """The (file, snippet) pairs in the order in which the README shows them."""
    text = readme.read_text(encoding="utf-8") if readme.is_file() else ""
    return list(dict.fromkeys(SHOWN.findall(text)))


def hunks(file, rows, order):
    """The differing stretches of one file: [(snippet or "", rows with their context)].

    A row of several snippets goes to the one that the README shows first, else to the innermost.
    """
    def home(row):
        shown = [name for wanted, name in order if wanted == file and name in row.names]
        return (shown or [*reversed(row.names), ""])[0]

    stretches = []  # [snippet, index of the first row that differs, of the last]
    for index, row in enumerate(rows):
        if row.kind == " ":
            continue
        if stretches and stretches[-1][0] == home(row) and index - stretches[-1][2] <= 2 * CONTEXT:
            stretches[-1][2] = index
        else:
            stretches.append([home(row), index, index])
    found = []
    for name, first, last in stretches:
        if not any(row.text.strip() for row in rows[first:last + 1] if row.kind != " "):
            continue
        before = list(itertools.takewhile(lambda row: row.kind == " ", reversed(rows[:first])))
        after = list(itertools.takewhile(lambda row: row.kind == " ", rows[last + 1:]))
        found.append((name, [*reversed(before[:CONTEXT]), *rows[first:last + 1], *after[:CONTEXT]]))
    return found


def ordered_hunks(changes, order):
    """All hunks, [(file, snippet, rows)]: in reading order, then what the README does not show."""
    found = [(file, name, rows) for file, all_rows in changes.edited.items()
             for name, rows in hunks(file, all_rows, order)]
    return sorted(found, key=lambda hunk: order.index(hunk[:2]) if hunk[:2] in order
                  else len(order))


def totals(changes, budget=None):
    """63 of 120 edited lines in 4 files; without a budget only what is."""
    lines, files = sum(changes.counts()), len(changes.edited_files())
    edited = f"{lines} of {amount(budget, 'edited line')}" if budget is not None else amount(
        lines, "edited line")
    return f"{edited} in {amount(files, 'file')}"


def statistics(changes, budget):
    """How much differs, as lines of text; budget: lines, or None."""
    rows = []
    for file, aligned in changes.edited.items():
        plus, minus = count(aligned)
        what = ", ".join(changed_snippets(aligned)) if plus + minus else NOTHING_COUNTED
        rows.append((file, f"+{plus}", f"-{minus}", what))
    rows += [(file, f"+{lines}", "", "new file") for file, lines in changes.added.items()]
    rows += [(file, "", f"-{lines}", "removed file") for file, lines in changes.removed.items()]
    width = max((len(row[0]) for row in rows), default=0)
    lines = [f"  {row[0]:<{width}} {row[1]:>6} {row[2]:>6}  {row[3]}".rstrip() for row in rows]
    plus, minus = changes.counts()
    total = f"{totals(changes, budget)} (+{plus} -{minus})"
    for name, whole in (("new", changes.added), ("removed", changes.removed)):
        if whole:
            total += f"; {amount(len(whole), f'{name} file')}, {sum(whole.values())} lines"
    return [*lines, total, "A changed line counts twice, blank and #include lines not at all."]


def _wants_colour():
    """Colour is for terminals, unless NO_COLOR says otherwise."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get(
        "TERM") != "dumb"


def show_diff(old, new, budget=None, only_statistics=False, root=ROOT):
    """What `./book diff` prints about two chapters, given by their folders' names; returns 0."""
    def paint(colour, text):
        return f"{colour}{text}{PLAIN}" if colour and is_coloured else text

    is_coloured = _wants_colour()
    changes = compare(old, new, root)
    print(paint(BOLD, f"{old} -> {new}"))
    if not (changes.edited or changes.added or changes.removed):
        print("the same code")
        return 0
    print("\n".join(statistics(changes, budget)))
    if only_statistics:
        return 0
    for title, files in (("new", changes.added), ("removed", changes.removed)):
        if files:
            print("\n" + paint(BOLD, f"{title}: {', '.join(files)}"))
    colours = {"+": GREEN, "-": RED, " ": None}
    for file, name, rows in ordered_hunks(changes, reading_order(root / new / "README.md")):
        print("\n" + paint(BOLD, file + (f"  [{name}]" if name else "")))
        for row in rows:
            print(paint(colours[row.kind], (row.kind + row.text).rstrip()))
    return 0
