"""`--recipe NAME`: flags of a published run, from a chapter's recipes/NAME.json or any such file.

  title      what it is
  source     where its numbers come from, an address; empty where there is none
  note       where it is unlike the source
  flags      {flag: value}; true: a switch, false: one that is off
  reported   [{what, value, source}]: what the source says of the run
"""
import difflib
import json
from dataclasses import dataclass
from pathlib import Path

from tools.base import BookError, show_path

KEYS = ("title", "source", "note", "flags", "reported")
ROW = ("what", "value", "source")
EXAMPLE = "ch07_5d/recipes/laptop.json shows the form"


@dataclass(frozen=True)
class Recipe:
    """A recipe as its file has it."""

    path: Path
    title: str
    source: str
    note: str
    flags: dict
    reported: list

    def words(self):
        """Its flags as words of a command line."""
        return [word for flag, value in self.flags.items() if value is not False
                for word in ([f"--{flag}"] if value is True else [f"--{flag}", str(value)])]

    def lines(self):
        """What a reader should know besides the program's own numbers."""
        rows = [(row["what"], row["value"], row["source"]) for row in self.reported]
        widths = [max((len(row[i]) for row in rows), default=0) for i in range(2)]
        said = [f"  {what:<{widths[0]}}  {value:<{widths[1]}}  {source}"
                for what, value, source in rows]
        return [f"{self.title}: the source says", *said] * bool(rows) + [self.note] * bool(self.note)


def names(chapter):
    """The recipes of a chapter."""
    return sorted(path.stem for path in (chapter.folder / "recipes").glob("*.json"))


def load(chapter, name):
    """The recipe of this name, or in this file. BookError (2) with what would do."""
    path = Path(name) if name.endswith(".json") else chapter.folder / "recipes" / f"{name}.json"
    known = names(chapter)
    if not path.is_file():
        close = difflib.get_close_matches(name, known, 1, 0.5)
        hint = f"did you mean --recipe {close[0]}?" if close else \
            f"there are: {', '.join(known)}" if known else \
            "this chapter has none; try one of ch07"
        raise BookError(f"--recipe {name}: there is no {show_path(path)}; {hint}", 2)
    def once(pairs):
        for key, _ in pairs:
            if [key for key, _ in pairs].count(key) > 1:
                raise BookError(f"{show_path(path)} has {key!r} twice; keep one of them", 2)
        return dict(pairs)

    try:
        fields = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=once)
    except ValueError as error:
        raise BookError(f"{show_path(path)} is no JSON: {error}", 2)
    if not isinstance(fields, dict) or not isinstance(fields.get("flags"), dict):
        raise BookError(f"{show_path(path)} needs an object with \"flags\"; {EXAMPLE}", 2)
    refuse_unknown(path, fields, KEYS)
    check_types(path, fields)
    return Recipe(path, **{key: fields.get(key, [] if key == "reported" else "") for key in KEYS})


def check_types(path, fields):
    """BookError (2) for the first value whose kind is not its key's."""
    def hold(is_right, key, value, wanted):
        if not is_right:
            raise BookError(f"{show_path(path)}: {key} is {json.dumps(value)}; {wanted}", 2)

    for key in ("title", "source", "note"):
        hold(isinstance(fields.get(key, ""), str), key, fields.get(key), "give it as \"text\"")
    for flag, value in fields["flags"].items():
        hold(isinstance(value, (str, int, float)), f"flags.{flag}", value,
             "give a number, \"text\", true or false")
    reported = fields.get("reported", [])
    hold(isinstance(reported, list), "reported", reported, f"give a list; {EXAMPLE}")
    for number, row in enumerate(reported):
        hold(isinstance(row, dict), f"reported[{number}]", row, f"give an object; {EXAMPLE}")
        refuse_unknown(path, row, ROW)
        for key in ROW:
            hold(isinstance(row.get(key), str), f"reported[{number}].{key}", row.get(key),
                 "give it as \"text\"")


def refuse_unknown(path, found, known):
    """BookError (2) for the first key that is not among those known."""
    for key in found:
        if key not in known:
            close = difflib.get_close_matches(key, known, 1, 0.5)
            hint = f"did you mean {close[0]!r}?" if close else f"keys are {', '.join(known)}"
            raise BookError(f"{show_path(path)}: there is no key {key!r}; {hint}", 2)


def expand(flags, recipe):
    """The command line with the recipe's flags in the place of --recipe NAME; flags that are given
    besides win."""
    kept = [word for before, word in zip([None, *flags], flags)
            if before != "--recipe" and word.partition("=")[0] != "--recipe"]
    given = {word.partition("=")[0][2:] for word in kept if word.startswith("--")}
    rest = {flag: value for flag, value in recipe.flags.items() if flag not in given}
    return [*Recipe(recipe.path, "", "", "", rest, []).words(), *kept]


def check_flags(recipe, known):
    """BookError (2) for the first flag of the recipe that the program does not know, or whose value
    is true or false where it takes another, or another where it is a switch.

    known: {flag: the kind of its value, "" for a switch}
    """
    kinds = {flag[2:]: kind for flag, kind in known.items()}
    refuse_unknown(recipe.path, recipe.flags, list(kinds))
    for flag, value in recipe.flags.items():
        if isinstance(value, bool) == bool(kinds[flag]):
            wanted = {"": "is a switch: give true or false", "TEXT": 'takes "text"'}.get(
                kinds[flag], "takes a number, such as 2")
            raise BookError(f"{show_path(recipe.path)}: flags.{flag} is {json.dumps(value)}; --{flag} {wanted}", 2)
