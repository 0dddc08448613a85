"""The delta rule: what a chapter changes is declared, small, and listed in its CHANGES.md.

A chapter is a copy of its parent. Every line that differs lies in a snippet, that is between two
`// [name]` lines; chapter.json declares the snippet. CHANGES.md, which `./book weave` writes and the
README links to, shows it as a diff:

    "parent": "ch01_a",                        null: it begins a chain
    "adds": ["zero.h"], "removes": [],         whole files
    "edits": {"main.cpp": ["run"]},            snippets of files that both chapters have
    "max_edited_lines": 60

Blank lines and #include lines may differ anywhere, and so may what diff.FREE names.
"""
import itertools
import json
import re
from collections import Counter
from dataclasses import dataclass, field

from tools import chapters
from tools.base import ROOT, BookError
from tools.book import diff

CODE = (".h", ".cpp", ".cuh", ".cu")
CHAPTER = re.compile(r"(?<![a-z0-9])(?:ch\d\d(?!\d)\w*|chapters?[ _-]?"
                     r"(?:\d+|one|two|three|four|five|six|seven|eight|nine|ten)\b)", re.I)
MONTH = r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*\.?"
DATE = re.compile(rf"__DATE__|__TIME(?:STAMP)?__|\b(?:19|20)\d\d([-/.])\d\d?\1\d\d?\b|"
                  rf"\b\d\d?([-/.])\d\d?\2(?:19|20)\d\d\b|\b{MONTH} (?:\d\d?,? )?(?:19|20)\d\d\b")
LISTED = re.compile(r"^### \[.*?\]\((\S+)\)#(\S+)$", re.M)  # edits, in CHANGES.md
BIGGEST = 5  # snippets that a message about an exceeded budget lists


@dataclass(frozen=True)
class Manifest:
    """What chapter.json says about a chapter and its parent."""

    name: str
    parent: str = None
    adds: list = field(default_factory=list)
    removes: list = field(default_factory=list)
    edits: dict = field(default_factory=dict)
    max_edited_lines: int = 60

    @property
    def file(self):
        """ch02_x/chapter.json"""
        return f"{self.name}/chapter.json"


def _is_list_of_names(value):
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _is_number(value):
    return type(value) is int and value >= 0


FIELDS = {  # name: (test, what it must be)
    "parent": (lambda value: value is None or isinstance(value, str), "a chapter's folder or null"),
    "adds": (_is_list_of_names, 'a list of files, such as ["zero.h"]'),
    "removes": (_is_list_of_names, 'a list of files, such as ["zero.h"]'),
    "edits": (lambda value: isinstance(value, dict) and all(map(_is_list_of_names, value.values())),
              'lists of snippets by file, such as {"main.cpp": ["run"]}'),
    "max_edited_lines": (_is_number, "a number, such as 60"),
}


def read_manifest(name, root=ROOT):
    """The chapter's Manifest. BookError (2) says which field is wrong."""
    try:
        fields = json.loads((root / name / "chapter.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BookError(f"{name}/chapter.json: cannot be read: {error}", 2)
    if not isinstance(fields, dict):
        raise BookError(f"{name}/chapter.json: must hold one JSON object", 2)
    for key, (is_right, wanted) in FIELDS.items():
        if key in fields and not is_right(fields[key]):
            raise BookError(f'{name}/chapter.json: "{key}" must be {wanted}', 2)
    return Manifest(name, **{key: fields[key] for key in FIELDS if key in fields})


def ancestors(name, root=ROOT):
    """The chapter's parent, the parent's parent and so on. BookError (2) if that leads nowhere."""
    names, chain = [chapter.name for chapter in chapters.find_chapters(root)], [name]
    while True:
        parent = read_manifest(chain[-1], root).parent
        if parent is None:
            return chain[1:]
        if parent not in names:
            raise BookError(f'{chain[-1]}/chapter.json: "parent" is "{parent}", which does not '
                            f"exist: name one of {', '.join(names)}, or null", 2)
        if parent in chain:
            circle = " -> ".join([*chain[chain.index(parent):], parent])
            raise BookError(f'{chain[-1]}/chapter.json: "parent" leads in a circle, {circle}: the '
                            "chapter that begins the chain has the parent null", 2)
        chain.append(parent)


def pair(name, other=None, root=ROOT):
    """What `./book diff` compares: (old chapter, new chapter, budget if one is the other's parent).

    One name alone is compared with its parent.
    """
    first = chapters.resolve(name, root).name
    if other is None:
        manifest = read_manifest(first, root)
        if manifest.parent is None:
            raise BookError(f"{first} has no parent; name two chapters: "
                            f"./book diff {first[:4]} OTHER", 2)
        ancestors(first, root)
        return manifest.parent, first, manifest.max_edited_lines
    second = chapters.resolve(other, root).name
    manifest = read_manifest(second, root)
    return first, second, manifest.max_edited_lines if manifest.parent == first else None


def check(child, root=ROOT):
    """What is wrong with a chapter, given by its folder's name, as a list of messages."""
    return examine(child, root)[1]


def examine(child, root=ROOT):
    """(one line that says how much the chapter changes, the messages of check())."""
    errors = _code_errors(child, root) + _cmake_errors(child, root)
    try:
        manifest = read_manifest(child, root)
        ancestors(child, root)
    except BookError as error:
        return child, [*errors, str(error)]
    if manifest.parent is None:
        errors += [f'{manifest.file}: "{key}" needs a "parent": name it, or take "{key}" out'
                   for key in ("adds", "removes", "edits") if getattr(manifest, key)]
        return f"{child}: no parent", errors
    changes = diff.compare(manifest.parent, child, root)
    errors += _file_errors(manifest, changes, root)
    for file, rows in changes.edited.items():
        errors += _marker_errors(manifest, file, *changes.sources[file])
        errors += _line_errors(manifest, file, rows)
    for file in manifest.edits:
        errors += _edits_errors(manifest, file, changes, root)
    errors += _budget_errors(manifest, changes) + _page_errors(manifest, root)
    parts = [diff.amount(len(changes.edited_files()), "edited file"),
             f"{sum(changes.counts())} of {manifest.max_edited_lines} edited lines",
             diff.amount(len(changes.added), "new file")]
    parts += [diff.amount(len(changes.removed), "removed file")] if changes.removed else []
    return f"{child}: {', '.join(parts)}", errors


def _code_errors(name, root):
    """Markers without a partner, and code that says which chapter it belongs to."""
    errors = []
    for file in diff.carried_files(root / name):
        if not file.endswith(CODE):
            continue
        source = diff.read_source(root / name / file)
        problems = list(source.problems)
        if not source.ends_well:
            problems.append((len(source.lines), "the last line does not end: add a newline"))
        for number, line in enumerate(source.lines, 1):
            problems += [(number, f'names a chapter ("{match[0]}"), but the chapters share this '
                          "code: leave it out, or use USP_CHAPTER")
                         for match in CHAPTER.finditer(line)]
            problems += [(number, f'holds a date ("{match[0]}"): leave it out, git knows it')
                         for match in DATE.finditer(line)]
        errors += [f"{name}/{file}:{number}: {what}" for number, what in sorted(problems)]
    return errors


def _cmake_errors(name, root):
    """A CMakeLists.txt unlike that of the first chapter that has one."""
    first = min(root.glob(f"ch[0-9][0-9]_*/{diff.CMAKE}"), default=None)
    path = root / name / diff.CMAKE
    if first is None or (path.is_file() and path.read_bytes() == first.read_bytes()):
        return []
    what = "differs from" if path.is_file() else "is missing, unlike"
    return [f"{name}/{diff.CMAKE}: {what} {first.parent.name}/{diff.CMAKE}: copy that, it is the "
            "same in every chapter"]


def _file_errors(manifest, changes, root):
    """New and missing files against "adds" and "removes"."""
    child, parent, where = manifest.name, manifest.parent, manifest.file
    errors = [f'{child}/{file}: is not in {parent}: add it to "adds" in {where}, or delete it'
              for file in changes.added if file not in manifest.adds]
    errors += [f'{child}/{file}: is in {parent} but not here: copy it from there, or add it to '
               f'"removes" in {where}' for file in changes.removed if file not in manifest.removes]
    for file in manifest.adds:
        if file in changes.added:
            continue
        if not (root / child / file).is_file():
            what = "does not exist: write the file, or take it out"
        elif (root / parent / file).is_file() and diff.is_carried(file):
            what = f'{parent} has too: declare what differs in "edits"'
        else:
            what = "needs no declaration: take it out"
        errors.append(f'{where}: "adds" names {file}, which {what}')
    for file in manifest.removes:
        if file in changes.removed:
            continue
        what = ("is still there: delete the file, or take it out"
                if (root / child / file).is_file() else f"{parent} does not have: take it out")
        errors.append(f'{where}: "removes" names {file}, which {what}')
    return errors


def _line_errors(manifest, file, rows):
    """Differing lines outside the declared snippets; neighbours share a message."""
    child, parent = manifest.name, manifest.parent
    declared = set(manifest.edits.get(file, ()))
    wrong = [diff.is_counted(row) and not declared & set(row.names) for row in rows]
    errors = []
    for (is_wrong, kind, names), group in itertools.groupby(
            zip(wrong, rows), lambda item: (item[0], item[1].kind, item[1].names)):
        if not is_wrong:
            continue
        group = [row for _, row in group]
        where = f"{child if kind == '+' else parent}/{file}:{group[0].line}"
        more = f" and {diff.amount(len(group) - 1, 'line')} after it" if len(group) > 1 else ""
        what = f"not in {parent}" if kind == "+" else f"not in {child}"
        advice = f'declare "{names[-1]}"' if names else "put it between `// [name]` lines, declared"
        errors.append(f"{where}: undeclared change: `{group[0].text.strip()}`{more}, {what}: take "
                      f'the change back, or {advice} in "edits" of {manifest.file}')
    return errors


def _marker_errors(manifest, file, old, new):
    """Markers that only one of the two has without declaring it, or in another order."""
    child, parent = manifest.name, manifest.parent
    declared = set(manifest.edits.get(file, ()))
    errors = [f"{parent}/{file}:{number}: {what}" for number, what in old.problems]
    for here, source, lacking, other in ((child, new, parent, old), (parent, old, child, new)):
        errors += [f"{here}/{file}:{first + 1}: {lacking} has no `// [{name}]` lines: put them "
                   f'there too, or declare "{name}" in "edits" of {manifest.file}'
                   for name, (first, _) in source.snippets.items()
                   if name not in other.snippets and name not in declared]
    shared = old.snippets.keys() & new.snippets.keys()
    for (_, wanted), (index, name) in zip(old.marks(shared), new.marks(shared)):
        if name != wanted:
            errors.append(f"{child}/{file}:{index + 1}: `// [{name}]` stands where {parent} has "
                          f"`// [{wanted}]`: keep the order of the parent")
            break
    return errors


def _edits_errors(manifest, file, changes, root):
    """Declarations in "edits" of one file that nothing stands behind."""
    child, parent = manifest.name, manifest.parent
    where = f'{manifest.file}: "edits" names {file}'
    if file in changes.edited:
        if not manifest.edits[file]:
            return [f"{where} without a snippet: name those that differ, or take it out"]
        return [error for name in manifest.edits[file]
                for error in _snippet_errors(f"{where}#{name}", name, file, parent, changes)]
    here, there = ((root / name / file).is_file() for name in (child, parent))
    if file == diff.CMAKE:
        what = "must not differ: take it out"
    elif not diff.is_carried(file):
        what = "needs no declaration: take it out"
    elif here and there:
        what = f"is the same in {parent}: take it out"
    elif here or there:
        what = (f'{parent} does not have: name it in "adds"' if here else
                f'{child} does not have: name it in "removes"')
    else:
        what = "does not exist: take it out"
    return [f"{where}, which {what}"]


def _snippet_errors(where, name, file, parent, changes):
    """The errors of one declared snippet of a file that differs."""
    known = sorted(set().union(*(source.snippets for source in changes.sources[file])))
    if name not in known:
        return [f"{where}, which does not exist: put `// [{name}]` lines around the code, or name "
                f"one of {', '.join(known) or '(none)'}"]
    if any(row.kind != " " and name in row.names for row in changes.edited[file]):
        return []
    return [f"{where}, which is the same in {parent}: take it out"]


def _budget_errors(manifest, changes):
    """More edited lines than chapter.json allows."""
    errors = []
    added, removed = changes.counts()
    if added + removed > manifest.max_edited_lines:
        sizes = Counter(file + (f"#{row.names[-1]}" if row.names else "")
                        for file, rows in changes.edited.items() for row in rows
                        if diff.is_counted(row))
        biggest = ", ".join(f"{name} {size}" for name, size in sizes.most_common(BIGGEST))
        errors.append(f"{manifest.file}: {added + removed} edited lines, {added} added and "
                      f"{removed} removed (a changed line counts as both), exceed "
                      f'"max_edited_lines" {manifest.max_edited_lines}; biggest: {biggest}: move '
                      "code into a new file, or split the chapter")
    return errors


def _page_errors(manifest, root):
    """Declared edits that CHANGES.md does not list, and a README that does not lead to it."""
    def read(name):
        path = root / manifest.name / name
        return path.read_text(encoding="utf-8") if path.is_file() else ""

    listed = LISTED.findall(read("CHANGES.md"))
    errors = [f"{manifest.name}/CHANGES.md: does not list {file}#{name}, which this chapter edits: "
              "run ./book weave"
              for file, names in manifest.edits.items() for name in names
              if (file, name) not in listed]
    if "](CHANGES.md)" not in read("README.md"):
        errors.append(f"{manifest.name}/README.md: does not lead to CHANGES.md: add a link, such as "
                      "[every change](CHANGES.md)")
    return errors


def run_delta(name=None, root=ROOT):
    """What `./book delta` does, for one chapter or all; returns the exit code."""
    chosen = [chapters.resolve(name, root)] if name else chapters.find_chapters(root)
    if not chosen:
        raise BookError(f"no chapter in {root}: a chapter is a folder chNN_* with a chapter.json")
    code = 0
    for chapter in chosen:
        summary, errors = examine(chapter.name, root)
        for error in errors:
            print(error)
        print(f"{summary}: {diff.amount(len(errors), 'error') if errors else 'in order'}")
        code = 1 if errors else code
    return code
