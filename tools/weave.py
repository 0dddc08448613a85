"""Fills the blocks of the READMEs from the files they show, and checks that they still agree.

A block stands between two comments that no reader sees rendered:

    <!-- snippet: layers.cpp#linear -->     the lines between the two `// [linear]` markers
    <!-- output: figures/demo.txt -->       a file as the program printed it
    <!-- include: figures/costs.md -->      a generated piece of Markdown
    <!-- /woven -->                         ends each of them
"""
import re
import textwrap

from tools.base import ROOT, BookError

BLOCK = re.compile(r"(<!-- (snippet|output|include): (\S+) -->\n)(.*?)(<!-- /woven -->)", re.S)
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
        else:
            body = _read(folder / reference).rstrip() + "\n"
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
