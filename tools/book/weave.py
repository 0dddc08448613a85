"""Fills the blocks of the pages from the files they show, and checks that they still agree.

A block stands between two comments that no reader sees rendered:

    <!-- snippet: layers.cpp#linear -->     the lines between the two `// [linear]` markers
    <!-- snippet: layers.cpp#linear mark: keep(x); T w -->   an arrow behind those with such a text
    <!-- snippet: layers.cpp#linear lines: Tensor x .. T w; return -->   of them these alone, `..` for a
                                            stretch, and `...` for those in between
    <!-- output: figures/demo.txt -->       a file as the program printed it
    <!-- output: figures/demo.txt lines: MFU; HFU -->   of it the lines with such a text
    <!-- cluster: ch02_data_parallel 16 lines: srun -->   of what `./book run --print` prints for so
                                            many ranks elsewhere, the lines with such a text
    <!-- include: figures/costs.md -->      a generated piece of Markdown
    <!-- delta: layers.cpp#linear -->       the snippet as a diff against the parent chapter
    <!-- changes -->                        the table of all that differs from the parent
    <!-- card -->                           when to use the page's technique (tools/book/cards.py)
    <!-- cards -->                          the same of all techniques, on a page of docs/
    <!-- /woven -->                         ends each of them

Writes every chapter's CHANGES.md with them (tools/book/changes.py).
"""
import re
import textwrap

from tools import chapters
from tools.base import ROOT, BookError, write_whole
from tools.book import cards, changes, delta, diff
from tools.run import cluster

BLOCK = re.compile(r"(<!-- (?:(snippet|output|include|delta|cluster): (\S+(?: \d+)?)(?: lines: ([^\n]+?))?(?: mark: ([^\n]+?))?|changes|cards?)"
                   r" -->\n)(.*?)(<!-- /woven -->)", re.S)
ARROW = "  // ◀"  # behind a line that is the lesson
MARKER = re.compile(r"^[ \t]*(?://|#) \[[\w-]+\][ \t]*\n", re.M)


def snippet(reference, folder):
    """The code between the two marker lines of file#name, markers of other snippets left out."""
    file, _, name = reference.partition("#")
    text = _read(folder / file)
    parts = re.split(rf"^[ \t]*(?://|#) \[{re.escape(name)}\][ \t]*\n", text, flags=re.M)
    if len(parts) != 3:
        raise BookError(f"{folder / file}: the line `// [{name}]` must stand there exactly twice, "
                        f"found {len(parts) - 1}")
    return textwrap.dedent(MARKER.sub("", parts[1]))


def marked(code, marks, reference, language):
    """The code with an arrow behind each line that holds one of the texts, which `;` separates."""
    lines = code.splitlines()
    for mark in _texts(marks):
        found = [i for i, line in enumerate(lines) if mark in line]
        if len(found) != 1:
            raise BookError(f"{reference}: a mark's text must stand in one line, "
                            f"'{mark}' stands in {len(found)}")
        lines[found[0]] += ARROW if language == "cpp" else ARROW.replace("//", "#")
    return "\n".join(lines) + "\n"


def stretches(code, wanted, reference):
    """The lines of code from one with a text to one with another, which `..` separates; `...` for others."""
    lines, shown, at = code.splitlines(), [], 0
    for stretch in _texts(wanted):
        first, _, last = (text.strip() for text in stretch.partition(".."))
        begin = next((i for i in range(at, len(lines)) if first in lines[i]), None)
        end = begin if not last or begin is None else next(
            (i for i in range(begin, len(lines)) if last in lines[i]), None)
        if end is None:
            raise BookError(f"{reference}: no lines '{stretch}' behind line {at}")
        if begin > at:
            shown.append(re.match(r" *", lines[begin])[0] + "...")
        shown += lines[begin:end + 1]
        at = end + 1
    if at < len(lines) and wanted:
        shown.append("...")
    return "\n".join(shown if wanted else lines) + "\n"


def _texts(listed):
    """The texts that a block's `mark:` or `lines:` lists."""
    return [text.strip() for text in (listed or "").split(";") if text.strip()]


def excerpt(output, wanted, reference):
    """The lines that hold one of the texts, which `;` separates, and "..." for those in between.
    All lines where none is asked for."""
    texts, lines = _texts(wanted), output.rstrip().splitlines()
    for text in texts:
        if not any(text in line for line in lines):
            raise BookError(f"{reference}: no line holds '{text}'")
    kept = []
    for line in lines:
        if not texts or any(text in line for text in texts):
            kept.append(line)
        elif kept and kept[-1] != "...":
            kept.append("...")
    return "\n".join(kept[:-1] if texts and kept[-1] == "..." else kept) + "\n"


def _broken(command):
    """A command as lines that a page has room for, which a shell reads as one."""
    if command.startswith("#"):
        return command
    lines = textwrap.wrap(command, 100, subsequent_indent="    ", break_long_words=False,
                          break_on_hyphens=False)
    return " \\\n".join(lines)


def changes_table(folder):
    """What differs from the parent: every edited file, then the new and the removed ones."""
    manifest = changes.manifest_of(folder)
    differing = diff.compare(manifest.parent, folder.name, folder.parent)
    lines = ["| file | + | - | snippets |", "|---|---:|---:|---|"]
    for file, rows in differing.edited.items():
        plus, minus = diff.count(rows)
        names = ", ".join(f"`{name}`" for name in diff.changed_snippets(rows))
        what = names if plus + minus else diff.NOTHING_COUNTED
        lines.append(f"| [`{file}`]({file}) | {plus} | {minus} | {what} |")
    lines += [f"| [`{file}`]({file}) | {count} | | new file |"
              for file, count in differing.added.items()]
    lines += [f"| `{file}` | | {count} | removed file |" for file, count in differing.removed.items()]
    plus, minus = differing.counts()
    total = diff.totals(differing, manifest.max_edited_lines)
    lines.append(f"| edited, together | {plus} | {minus} | {total} |")
    return "\n".join(lines) + "\n"


def _read(path):
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise BookError(f"cannot read {path}: {error.strerror}")


def woven(text, folder, page="README.md"):
    """The page's text with every block filled anew; `folder` is what its paths are relative to."""
    def fill(match):
        opening, kind, reference, wanted, marks, _, closing = match.groups()
        if kind == "snippet":
            code = stretches(snippet(reference, folder), wanted, reference)
            language = "python" if ".py#" in reference else "cpp"
            body = f"```{language}\n{marked(code, marks, reference, language)}```\n"
        elif kind == "output":
            shown = excerpt(_read(folder / reference), wanted, reference)
            body = f"~~~~text\n{shown}~~~~\n"
        elif kind == "cluster":
            chapter, _, ranks = reference.partition(" ")
            printed = "\n".join(cluster.shown(chapter, int(ranks)))
            found = [_broken(line) for line in excerpt(printed, wanted, reference).splitlines()
                     if line != "..."]
            body = "```sh\n" + "\n".join(found) + "\n```\n"
        elif kind == "delta":
            body = f"```diff\n{changes.snippet_delta(reference, folder)}```\n"
        elif kind == "include":
            body = _read(folder / reference).rstrip() + "\n"
        elif opening.startswith("<!-- cards "):
            body = cards.side_by_side()
        elif opening.startswith("<!-- card "):
            body = cards.table(folder / page)
        else:
            body = changes_table(folder)
        return opening + body + closing
    return BLOCK.sub(fill, text)


def readmes(root=ROOT):
    """The pages that may hold blocks: the front page, the chapters' own, those of docs/."""
    of_chapters = [page for page in sorted(root.glob("ch[0-9][0-9]_*/*.md"))
                   if page.name != changes.FILE]
    return [root / "README.md", *of_chapters, *sorted(root.glob("docs/*.md"))]


def pages(root=ROOT):
    """What weaving writes: (path, its text now or None, its text as the sources have it)."""
    for readme in readmes(root):
        old = _read(readme)
        yield readme, old, woven(old, readme.parent, readme.name)
    for chapter in chapters.find_chapters(root):
        if delta.read_manifest(chapter.name, root).parent is not None:
            path = chapter.folder / changes.FILE
            yield path, _read(path) if path.exists() else None, changes.page(chapter.folder)


def weave(check, root=ROOT):
    """Rewrites the pages and every CHANGES.md, or with `check` only names those that no longer
    agree with the sources. Returns them."""
    stale = []
    for path, old, new in pages(root):
        if new == old:
            continue
        stale.append(path)
        if not check:
            write_whole(path, new)
    return stale
