"""`./book propagate`: merges what changed in a chapter into every chapter that descends from it.

Each descendant is merged three ways: its own text, its parent's text before the change, and after.
What the merge changes in it is then merged into its own children. Nothing is written unless
everything merges.
"""
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

from tools import chapters
from tools.base import ROOT, BookError, write_whole
from tools.book import delta, diff

CONTEXT = 3  # lines shown around a conflict
FAILED = 128  # git merge-file returns the number of conflicts, or at least this


class Change(NamedTuple):
    """A file's bytes before and after; None where it does not exist."""

    before: bytes
    after: bytes


def run_propagate(name, files=(), base="HEAD", root=ROOT):
    """What `./book propagate` does; returns the exit code, 1 if there are conflicts."""
    chapter = chapters.resolve(name, root).name
    changed = _chosen(changes_since(chapter, base, root), chapter, files, base, root)
    if not changed:
        print(f"nothing changed in {chapter} since {base}: nothing to propagate")
        return 0
    heirs = descendants(chapter, root)
    if not heirs:
        print(f"no chapter descends from {chapter}: nothing to propagate")
        return 0
    merged, notes, conflicts = merge_all(chapter, changed, heirs, root)
    if conflicts:
        print("\n".join(conflicts))
        print(f"conflicts in {diff.amount(len(conflicts), 'file')}, so nothing was written. Make "
              "the change there by hand,\nhand it on from there (./book propagate CHAPTER FILE), "
              "and name the other files:\n"
              f"./book propagate {chapter[:4]} FILE ...")
        return 1
    _write(merged, root)
    print("\n".join(notes))
    print(f"{diff.amount(len(merged), 'file')} written")
    return 0


def _git(root, *arguments):
    """Standard output of git, as bytes. BookError (2) with what git said if it fails."""
    try:
        result = subprocess.run(["git", "-C", str(root), *arguments], stdin=subprocess.DEVNULL,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE, check=False)
    except OSError as error:
        raise BookError(f"cannot start git: {error.strerror}", 2)
    if result.returncode != 0:
        said = result.stderr.decode(errors="replace").strip()
        raise BookError(f"git {' '.join(arguments)} failed: {said}", 2)
    return result.stdout


def _commit(base, root):
    """The hash of the commit that `base` names. BookError (2) outside of git or without one."""
    try:
        _git(root, "rev-parse", "--is-inside-work-tree")
    except BookError as error:
        raise BookError(f"propagate compares with a commit, but {root} is no git checkout ({error})"
                        ": clone the project, or run git init and commit", 2)
    try:
        return _git(root, "rev-parse", "--verify", "--quiet", base + "^{commit}").decode().strip()
    except BookError:
        raise BookError(f"there is no commit {base!r}; give --base one that `git log` shows, such "
                        "as HEAD~1", 2)


def changes_since(chapter, base, root=ROOT):
    """{file: Change} for the carried files of a chapter that differ from what they were at base.

    Equal ones are left out. BookError (2) if base is no commit.
    """
    commit = _commit(base, root)

    def names(*command):
        listed = _git(root, *command, "--", chapter + "/").decode(errors="surrogateescape")
        paths = (path[len(chapter) + 1:] for path in listed.split("\0") if path)
        return {path for path in paths if diff.is_carried(path)}

    was = names("ls-tree", "-r", "-z", "--name-only", commit)
    here = names("ls-files", "-z", "--cached", "--others", "--exclude-standard")
    changed = {}
    for file in sorted(was | here):
        before = _git(root, "show", f"{commit}:./{chapter}/{file}") if file in was else None
        change = Change(before, _read(root / chapter / file))
        if change.before != change.after:
            changed[file] = change
    return changed


def _read(path):
    """The file's bytes, or None if there is no such file."""
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None
    except OSError as error:
        raise BookError(f"cannot read {path}: {error.strerror}", 2)


def _chosen(changed, chapter, files, base, root):
    """The changes of these files, of all if none is named. BookError (2) for a wrong name."""
    if not files:
        return changed
    chosen = {}
    for given in files:
        file = given[len(chapter) + 1:] if given.startswith(chapter + "/") else given
        if not diff.is_carried(file):
            raise BookError(f"{chapter}/{file} belongs to its chapter alone; what propagates is "
                            "the code: " + ", ".join(diff.carried_files(root / chapter)), 2)
        if file in changed:
            chosen[file] = changed[file]
        elif not (root / chapter / file).is_file():
            raise BookError(f"{chapter} has no file {file!r}, and had none at {base}; it has: "
                            + ", ".join(diff.carried_files(root / chapter)), 2)
    return chosen


def descendants(chapter, root=ROOT):
    """[(descendant, its parent)] of a chapter, parents before their children."""
    parents = {}
    for other in chapters.find_chapters(root):
        line = delta.ancestors(other.name, root)
        if chapter in line:
            parents[other.name] = (len(line), line[0])
    return [(name, parents[name][1]) for name in sorted(parents, key=lambda n: (parents[n][0], n))]


def merge_all(chapter, changed, heirs, root=ROOT):
    """Merges in memory: ({(chapter, file): bytes or None}, what was done, conflicts to show)."""
    merged, notes, conflicts = {}, [], []
    passed_on = {chapter: changed}  # by chapter: the changes that its children get
    for name, parent in heirs:
        passed_on[name] = {}
        for file, change in passed_on[parent].items():
            own = _read(root / name / file)
            try:
                result = merge(own, change, (f"{name}/{file}", f"{parent}/{file}"))
            except Conflict as conflict:
                conflicts.append(str(conflict))
                continue
            notes.append(f"{name}/{file}: {_what_happened(own, change, result)}")
            if result != own:
                merged[name, file] = result
                passed_on[name][file] = Change(own, result)
            elif own is not None:  # made here by hand, its children may still lack it
                passed_on[name][file] = change
    return merged, notes, conflicts


def _what_happened(own, change, result):
    """One word or two for the list of what was merged."""
    if result == own:
        left_out = own is None and change.after is not None
        return "not there, left out" if left_out else "has the change already"
    if own is None or result is None:
        return "new" if own is None else "deleted"
    return "replaced" if own == change.before else "merged"


class Conflict(Exception):
    """Two changes of the same place; the message shows it."""


def merge(own, change, names):
    """The child's bytes after its parent's change; raises Conflict.

    names: how the child's file and the parent's are called in what is shown.
    """
    if own == change.before:
        return change.after
    if own == change.after or own is None:
        return own
    if change.after is None:
        raise Conflict(f"{names[0]}: {names[1]} was deleted, but this file differs from it: delete "
                       "it too, or name it in \"adds\" of chapter.json\n")
    labels = (names[0], f"{names[1]} before", f"{names[1]} after")
    before = change.before or b""
    conflicts, text = _merge_file(own, before, change.after, labels)
    if not conflicts:
        return text
    # Next to an edit of the child's own, even the same change is a conflict. Is it there already,
    # so that it can be taken out and put in again?
    conflicts, without = _merge_file(own, change.after, before, labels)
    if not conflicts and _merge_file(without, before, change.after, labels) == (0, own):
        return own
    raise Conflict(_shown(text.decode(errors="backslashreplace"), labels))


def _merge_file(own, before, after, labels):
    """(number of conflicts, merged bytes) of git merge-file; raises Conflict if it cannot merge."""
    with tempfile.TemporaryDirectory(prefix="book_merge_") as scratch:
        paths = []
        for index, text in enumerate((own, before, after)):
            paths.append(Path(scratch) / str(index))
            paths[-1].write_bytes(text)
        words = [word for label in labels for word in ("-L", label)]
        result = subprocess.run(["git", "merge-file", "-p", "--diff3", *words, *map(str, paths)],
                                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                stderr=subprocess.PIPE, check=False)
    if not 0 <= result.returncode < FAILED:
        raise Conflict(f"{labels[0]}: " + result.stderr.decode(errors="replace"))
    return result.returncode, result.stdout


def _shown(text, labels):
    """The conflicts in the output of git merge-file, each with some lines around it."""
    lines, shown, begin = text.split("\n"), [], 0
    for index, line in enumerate(lines):
        if line == f"<<<<<<< {labels[0]}":
            begin = index
        elif line == f">>>>>>> {labels[2]}":
            around = lines[max(0, begin - CONTEXT):index + 1 + CONTEXT]
            shown.append("\n".join([f"{labels[0]}: conflict", *around, ""]))
    return "\n".join(shown)


def _write(merged, root):
    """Writes all results, children before their parents.

    If it fails half-way, the parents still hold what a second try hands on to their children.
    """
    for (name, file), content in reversed(merged.items()):
        path = root / name / file
        try:
            if content is None:
                path.unlink()
            else:
                path.parent.mkdir(parents=True, exist_ok=True)
                write_whole(path, content)
        except OSError as error:
            raise BookError(f"cannot write {path}: {error.strerror}; solve that and run the "
                            "command again")
