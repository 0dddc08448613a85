"""Finds the chapters of this checkout: folders chNN_* that hold a chapter.json."""
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from tools.base import ROOT, BookError


NOTHING_YET = "nothing yet"  # the technique of a chapter that ./book new has made


@dataclass(frozen=True)
class Chapter:
    """One chapter: its folder is also the name of its executable."""

    number: int
    folder: Path
    title: str
    technique: str
    ranks: Optional[int] = None  # it runs on by default; None: it knows of no ranks

    @property
    def name(self):
        """ch01_single_gpu"""
        return self.folder.name

    @property
    def short(self):
        """ch01"""
        return self.name[:4]

    @property
    def is_begun(self):
        """Whether it is still the copy that ./book new has made, with no lesson of its own."""
        return self.technique == NOTHING_YET

    def examples(self):
        """The names of its small programs beside the trainer: examples/NAME.cpp."""
        return sorted(source.stem for source in (self.folder / "examples").glob("*.cpp"))


def find_chapters(root=ROOT):
    """All chapters in order. BookError if a chapter.json cannot be read."""
    chapters = []
    for manifest in sorted(root.glob("ch[0-9][0-9]_*/chapter.json")):
        try:
            fields = json.loads(manifest.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise BookError(f"cannot read {manifest}: {error}")
        if not isinstance(fields, dict):
            raise BookError(f"cannot read {manifest}: it must hold one JSON object")
        folder = manifest.parent
        ranks = fields.get("ranks")
        if ranks is not None and (type(ranks) is not int or ranks < 1):
            raise BookError(f"cannot read {manifest}: \"ranks\" must be a positive integer, "
                            f"not {json.dumps(ranks)}")
        chapters.append(Chapter(int(folder.name[2:4]), folder,
                                str(fields.get("title", folder.name)),
                                str(fields.get("technique", "")), ranks))
    return chapters


def resolve(name, root=ROOT):
    """The chapter called 1, ch01, single_gpu or ch01_single_gpu. BookError (2) names those that exist."""
    chapters = find_chapters(root)
    wanted = name.rstrip("/")
    number = re.fullmatch(r"(?:ch)?(\d{1,2})", wanted)
    found = [c for c in chapters
             if wanted in (c.name, c.name[5:]) or (number and c.number == int(number.group(1)))]
    if len(found) == 1:
        return found[0]
    names = ", ".join(c.name for c in found or chapters) or "none"
    if found:
        raise BookError(f"chapter {name!r} is ambiguous; use one of: {names}", 2)
    raise BookError(f"there is no chapter {name!r}; chapters here: {names}", 2)


def list_chapters(root=ROOT):
    """Prints what `./book list` shows."""
    chapters = find_chapters(root)
    if not chapters:
        raise BookError(f"no chapter in {root}: a chapter is a folder chNN_* with a chapter.json")
    for chapter in chapters:
        print(f"{chapter.short}  {chapter.title}")
        if chapter.technique:
            print(f"      adds      {chapter.technique}")
        print(f"      run it    ./book run {chapter.short}")
        for example in chapter.examples():
            print(f"                ./book run {chapter.short}/{example}")
        print(f"      read it   {chapter.name}/README.md")
