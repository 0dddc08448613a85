"""`./book new`: a reader's own chapter, which begins as a copy of another."""
import json
import re
import shutil

from tools import chapters
from tools.base import ROOT, BookError
from tools.book import changes, delta, diff

NAME = re.compile(r"[a-z][a-z0-9]*(?:_[a-z0-9]+)*")
LONGEST = 40
FIRST_OWN = 90  # the numbers below are for chapters to come
README = """\
# Chapter {number} · {title}

*A copy of [chapter {parent_number}](../{parent}/README.md), before anything is changed.*

## 1. The problem

What cannot be done yet, in numbers.

## 2. Run it

```
./book run {short}
./book test {short}
./book diff {short}
```

## 3. What changes

Mark what you edit between two `// [name]` lines, and declare it in `chapter.json` under `edits`. New files go under `adds`.
`./book weave` then lists every change in [CHANGES.md](CHANGES.md); show here what is the lesson, between `<!-- delta: FILE#name -->` and `<!-- /woven -->`.
`./book delta {short}` says what is missing. Terms are in the [glossary](../docs/glossary.md).
"""


def begin_chapter(name, parent=None, root=ROOT):
    """Writes the folder and says what comes next; returns 0. BookError (2) for a name that cannot be."""
    present = chapters.find_chapters(root)
    if not present:
        raise BookError(f"no chapter in {root} to begin from")
    begun = chapters.resolve(parent, root) if parent else present[-1]
    delta.ancestors(begun.name, root)
    number = max(FIRST_OWN, present[-1].number + 1)
    _check(name, number, present)
    folder = root / f"ch{number:02d}_{name}"
    folder.mkdir()
    try:
        _fill(folder, begun, number, name)
    except BaseException:  # also Ctrl-C: half a chapter would be in the way of the next try
        shutil.rmtree(folder, ignore_errors=True)
        raise
    print(f"{folder.name} is a copy of {begun.name}; now: ./book run {name}")
    return 0


def _fill(folder, begun, number, name):
    """The copy of the chapter that it begins from, and its own pages."""
    for file in [*diff.carried_files(begun.folder), diff.CMAKE]:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(begun.folder / file, folder / file)
    title = name.replace("_", " ").capitalize()
    manifest = {"title": title, "technique": chapters.NOTHING_YET, "parent": begun.name,
                "adds": [], "edits": {}}
    if begun.ranks:
        manifest["ranks"] = begun.ranks
    (folder / "chapter.json").write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    (folder / "README.md").write_text(README.format(
        number=number, title=title, parent=begun.name, parent_number=begun.number,
        short=folder.name[:4]), encoding="utf-8")
    (folder / changes.FILE).write_text(changes.page(folder), encoding="utf-8")


def _check(name, number, present):
    """BookError (2) unless a chapter can have this name."""
    if not NAME.fullmatch(name) or len(name) > LONGEST:
        raise BookError(f"a chapter cannot be called {name!r}: small letters and digits in words "
                        f"joined by _, beginning with a letter, {LONGEST} characters at most; try "
                        f"./book new {_proposal(name)}", 2)
    taken = [chapter.name for chapter in present if chapter.name[5:] == name]
    if taken:
        raise BookError(f"there is {taken[0]} already; take another name, such as my_{name}", 2)
    if re.match(r"ch\d\d(_|$)", name):
        raise BookError(f"the number comes by itself: ./book new {name[5:] or 'demo'}", 2)
    if number > 99:
        raise BookError(f"chapters of your own have the numbers {FIRST_OWN} to 99, and there is a "
                        f"{present[-1].name} already; remove it, or give it a free number", 2)


def _proposal(name):
    """A name that can be, as like the given one as possible."""
    words = re.findall(r"[a-z0-9]+", name.lower())
    return re.sub(r"^[^a-z]+", "", "_".join(words))[:LONGEST].strip("_") or "demo"
