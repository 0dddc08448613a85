"""Fills the blocks of the READMEs from the files they show, and checks that they still agree.

A block stands between two comments that no reader sees rendered:

    <!-- snippet: layers.cpp#linear -->     the lines between the two `// [linear]` markers
    <!-- output: figures/demo.txt -->       a file as the program printed it
    <!-- include: figures/costs.md -->      a generated piece of Markdown
    <!-- delta: layers.cpp#linear -->       the snippet as a diff against the parent chapter
    <!-- changes -->                        the table of all that differs from the parent
    <!-- /woven -->                         ends each of them
"""
import re
import textwrap

from tools import delta, diff
from tools.base import ROOT, BookError

BLOCK = re.compile(r"(<!-- (?:(snippet|output|include|delta): (\S+)|changes) -->\n)(.*?)"
                   r"(<!-- /woven -->)", re.S)
MARKER = re.compile(r"^[ \t]*// \[[\w-]+\][ \t]*\n", re.M)


def snippet(reference, folder):
    """The code between the two marker lines of file#name, markers of other snippets left out."""
    file, _, name = reference.partition("#")
    text = _read(folder / file)
    parts = re.split(rf"^[ \t]*// \[{re.escape(name)}\][ \t]*\n", text, flags=re.M)
    if len(parts) != 3:
        raise BookError(f"{folder / file}: the line `// [{name}]` must stand there exactly twice, "
                        f"found {len(parts) - 1}")
    return textwrap.dedent(MARKER.sub("", parts[1]))


def _manifest(folder):
    """The Manifest of a chapter that has a parent."""
    manifest = delta.read_manifest(folder.name, folder.parent)
    if manifest.parent is None:
        raise BookError(f"{folder / 'README.md'}: a chapter without a parent has no changes to "
                        "show")
    return manifest


def snippet_delta(reference, folder):
    """The snippet file#name as a diff between the parent and the chapter, markers left out."""
    file, _, name = reference.partition("#")
    versions = (_manifest(folder).parent, folder.name)
    sources = [diff.read_source(folder.parent / version / file) for version in versions]
    rows = [row for row in diff.align(*sources) if name in row.names]
    changed = [i for i, row in enumerate(rows) if row.kind != " "]
    if not changed:
        raise BookError(f"{folder / file}: no line of a snippet [{name}] differs from the parent")
    near = {i + k for i in changed for k in range(-diff.CONTEXT, diff.CONTEXT + 1)}
    near |= {-1, 0, len(rows)}  # both ends, and the first line, which names the function
    kept = [i for i in range(len(rows)) if i in near or {i - 1, i + 1} <= near]
    code = textwrap.dedent("\n".join(rows[i].text for i in kept)).split("\n")
    lines, after = [], 0
    for i, text in [*zip(kept, code), (len(rows), None)]:
        if i > after:
            lines.append(f"@@ {i - after} unchanged lines @@")
        if text is not None:
            lines.append((rows[i].kind + text).rstrip())
        after = i + 1
    return "\n".join(lines) + "\n"


def changes_table(folder):
    """What differs from the parent: every edited file, then the new and the removed ones."""
    manifest = _manifest(folder)
    changes = diff.compare(manifest.parent, folder.name, folder.parent)
    lines = ["| file | + | - | snippets |", "|---|---:|---:|---|"]
    for file, rows in changes.edited.items():
        plus, minus = diff.count(rows)
        names = ", ".join(f"`{name}`" for name in diff.changed_snippets(rows))
        what = names if plus + minus else diff.NOTHING_COUNTED
        lines.append(f"| [`{file}`]({file}) | {plus} | {minus} | {what} |")
    lines += [f"| [`{file}`]({file}) | {count} | | new file |"
              for file, count in changes.added.items()]
    lines += [f"| `{file}` | | {count} | removed file |" for file, count in changes.removed.items()]
    plus, minus = changes.counts()
    total = diff.totals(changes, manifest.budget)
    lines.append(f"| edited, together | {plus} | {minus} | {total} |")
    return "\n".join(lines) + "\n"


def _read(path):
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise BookError(f"cannot read {path}: {error.strerror}")


def woven(text, folder):
    """The README text with every block filled anew; `folder` is what its paths are relative to."""
    def fill(match):
        opening, kind, reference, _, closing = match.groups()
        if kind == "snippet":
            body = f"```cpp\n{snippet(reference, folder)}```\n"
        elif kind == "output":
            body = f"~~~~text\n{_read(folder / reference).rstrip()}\n~~~~\n"
        elif kind == "delta":
            body = f"```diff\n{snippet_delta(reference, folder)}```\n"
        elif kind == "include":
            body = _read(folder / reference).rstrip() + "\n"
        else:
            body = changes_table(folder)
        return opening + body + closing
    return BLOCK.sub(fill, text)


def readmes(root=ROOT):
    """The READMEs that may hold blocks: the front page and the chapters'."""
    return [root / "README.md", *sorted(root.glob("ch[0-9][0-9]_*/README.md"))]


def weave(check, root=ROOT):
    """Rewrites the READMEs, or with `check` only names those that no longer agree. Returns them."""
    stale = []
    for readme in readmes(root):
        old = _read(readme)
        new = woven(old, readme.parent)
        if new == old:
            continue
        stale.append(readme)
        if not check:
            readme.write_text(new, encoding="utf-8")
    return stale
