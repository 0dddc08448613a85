"""The reference of common/ and of each chapter, by Doxygen with doxygen-awesome: one run for each,
since chapters have classes of the same names; tag files connect a chapter with common/.

Every public class, enumeration and function has a comment. None is asked of what says it itself: a
constructor, an operator, an override, a function of one line that stands there, a field. Nor of the
names that mean the same everywhere: `bind` and `validate` of a configuration, `footprint` and
`Saved` of a layer, the form of an operation that ends in `_async`, `A` for the type of a kernel's
sums. Nor of a function whose first argument is a stream: it starts what tensor/ops.h tells of. A
field that is bound to a flag gets the flag's help.
"""
import html
import itertools
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from tools.base import ROOT, BookError
from tools.book import changes
from tools.site import check, theme
from tools.site.check import REFERENCE
from tools.site.layout import THEME_FIRST

TEMPLATE = ROOT / "docs" / "Doxyfile.in"
AWESOME = Path("/usr/share/doxygen-awesome-css")
STYLESHEETS = (AWESOME / "doxygen-awesome.css", theme.FOLDER / "reference.css")
COMMON = "common"
INCOMPLETE = "the reference is not complete"
UNDOCUMENTED = re.compile(r"(\S+?):(\d+): warning: Member (~?\w+).*? \((\w+)\) of "
                          r"(?:class|struct|namespace) (\S+) is not documented")
BOUND = re.compile(r'bind\(\s*"(\w+)",\s*[\w.>-]+,\s*(?:\{[^}]*\},\s*)?((?:"(?:[^"\\]|\\.)*"\s*)+)')
FIELD = re.compile(r"\s+(?:int64_t|double|bool|std::string) (\w+)(?: = [^;]*)?;$")
CONVENTIONS = ("bind", "validate", "footprint", "A")
# doxygen-awesome has its own names for what the reader has chosen.
THEME_TOO = THEME_FIRST + (";try{if(t)document.documentElement.classList.add(t+'-mode')}catch(e){}")


@dataclass(frozen=True)
class Entry:
    """A class or function of the reference: for the search."""

    part: str      # common or a chapter
    file: str      # the header
    address: str
    name: str
    sentence: str  # the first of its comment


def is_here():
    """Is there a Doxygen to run?"""
    return shutil.which("doxygen") is not None


def parts(root):
    """What has a reference: common/, then each chapter."""
    return [COMMON, *(path.name for path in sorted(root.glob("ch[0-9][0-9]_*"))
                      if (path / "chapter.json").is_file())]


def warnings(root, names=None):
    """What Doxygen has to say of the headers, undocumented members first of all; makes no page."""
    with tempfile.TemporaryDirectory(prefix="book_reference_") as scratch:
        found = []
        for name in names or parts(root):
            found += _run(root, name, Path(scratch), None)
        return found


def make(root, out, begin=lambda _part: None):
    """Writes the reference below `out`/reference; returns {name: address of its first page} and
    the Entries of all classes and functions that have a page. begin: called with each part."""
    with tempfile.TemporaryDirectory(prefix="book_reference_") as scratch:
        said = []
        for name in parts(root):
            begin(name)
            said += _run(root, name, Path(scratch), out)
        anchors = {path: check.read(path).anchors for path in (out / REFERENCE).rglob("*.html")}
        entries = [entry for name in parts(root)
                   for entry in _entries(root, name, Path(scratch), out, anchors)]
    for name in parts(root):
        _fill_front(root, name, [entry for entry in entries if entry.part == name], out)
    _mend(anchors)
    if said:
        raise BookError(f"{INCOMPLETE}:\n  " + "\n  ".join(said))
    return {name: f"{REFERENCE}{name}/index.html" for name in parts(root)}, entries


def _entries(root, part, scratch, out, anchors):
    """The Entries of common/ or of a chapter, in the order of its headers."""
    places, seen = _places(scratch / f"{part}.tag"), set()
    for path in sorted((root / part).rglob("*.h")) + sorted((root / part).rglob("*.cuh")):
        for name, sentence in changes.declarations(path.read_text(encoding="utf-8")):
            page, anchor = places.get(name.split()[-1], ("", ""))
            here = out / REFERENCE / part / page
            if here not in anchors or (page, anchor) in seen:
                continue
            seen.add((page, anchor))
            mark = f"#{anchor}" if anchor in anchors[here] else ""
            yield Entry(part, path.relative_to(root).as_posix(),
                        f"{REFERENCE}{part}/{page}{mark}", name, sentence)


def _fill_front(root, part, entries, out):
    """Doxygen's first page is empty: it gets the headers, each with its classes and functions."""
    path = out / REFERENCE / part / "index.html"
    lines = [f"<p>{len(entries)} classes and functions, by the headers that declare them.</p>"]
    for file, group in itertools.groupby(entries, lambda entry: entry.file):
        lines.append(f"<h3>{html.escape(Path(file).relative_to(part).as_posix())}</h3><ul>")
        for entry in group:
            address = Path(entry.address).relative_to(f"{REFERENCE}{part}")
            said = re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(entry.sentence))
            lines.append(f'<li><a href="{html.escape(str(address))}">{html.escape(entry.name)}</a>'
                         f"{said and '&ensp;'}{said}</li>")
        lines.append("</ul>")
    text = path.read_text(encoding="utf-8").replace(f"{part}: reference Documentation",
                                                    f"The reference of {part}")
    text, count = re.subn(r'(<div class="contents">)\s*(</div>)',
                          lambda match: f"{match[1]}\n" + "\n".join(lines) + f"\n{match[2]}", text)
    if not count:
        raise BookError(f"doxygen's first page of {part} is not the empty one that is known")
    path.write_text(text, encoding="utf-8")


def _places(tags):
    """{name without its namespace: (page, anchor)} of what a tag file lists; of functions of one
    name the first."""
    compounds = ElementTree.parse(tags).getroot().findall("compound")
    spaces = sorted((each.findtext("name") for each in compounds
                     if each.get("kind") == "namespace"), key=len, reverse=True)
    inside = re.compile("(?:%s)::" % "|".join(map(re.escape, spaces)) if spaces else "(?!)")
    found = {}
    for compound in compounds:
        outer = f'{compound.findtext("name")}::'
        if compound.get("kind") != "namespace":
            found[inside.sub("", outer[:-2], count=1)] = compound.findtext("filename"), ""
        for member in compound.findall("member"):
            name = inside.sub("", outer + member.findtext("name"), count=1)
            found.setdefault(name, (member.findtext("anchorfile"), member.findtext("anchor")))
    return found


def _mend(anchors):
    """Doxygen names some anchors that it does not write, of private classes for example: such a
    link leads to the page instead. anchors: {page: those that it has}"""
    for path in anchors:
        def mended(match, path=path):
            name, anchor = match.groups()
            target = (path.parent / name).resolve() if name else path
            known = target not in anchors or anchor in anchors[target]
            return match[0] if known else f'href="{name or path.name}"'
        text = path.read_text(encoding="utf-8", errors="replace")
        path.write_text(re.sub(r'href="([^"#:?]*)#([^"]+)"', mended, text), encoding="utf-8")


def flags(root):
    """{field: help of the flag that is bound to it}"""
    found = {}
    for path in [*root.glob("common/**/*.cpp"), *root.glob("ch[0-9][0-9]_*/**/*.cpp"),
                 *root.glob("ch[0-9][0-9]_*/**/*.h")]:
        for name, text in BOUND.findall(path.read_text(encoding="utf-8")):
            found[name] = "".join(re.findall(r'"((?:[^"\\]|\\.)*)"', text))
    return found


def _copy_headers(source, target, helps):
    """The headers with the help of flags behind fields that have no comment, line for line."""
    for path in sorted(source.rglob("*.h")) + sorted(source.rglob("*.cuh")):
        copy = target / path.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        lines = path.read_text(encoding="utf-8").split("\n")
        for number, line in enumerate(lines):
            field = FIELD.match(line)
            before = lines[number - 1].strip() if number else ""
            if field and field[1] in helps and not before.startswith("///"):
                lines[number] += f"  ///< `--{field[1]}`: {helps[field[1]]}"
        copy.write_text("\n".join(lines), encoding="utf-8")
    # Doxygen shows the functions of a namespace only if that has a comment.
    (target / "namespace.h").write_text(f"/// All of {target.name}.\nnamespace usp {{}}\n",
                                        encoding="utf-8")


def speaks_for_itself(warning, root):
    """Is it a warning about a member of which no comment is asked?"""
    match = UNDOCUMENTED.match(warning)
    if not match:
        return bool(re.search(r"Compound \S+::Saved is not documented", warning))
    file, line, name, kind, owner = match.groups()
    if kind == "variable":
        return True
    if kind not in ("function", "typedef"):
        return False
    if name in (*CONVENTIONS, "operator", owner.rpartition("::")[2]) or name.endswith("_async"):
        return True
    text = " ".join((root / file).read_text(encoding="utf-8").split("\n")[int(line) - 1:][:4])
    declared = re.match(r"[^;{]*(?:\{.*?\}|;)", text)
    return bool(declared and re.search(r"\boverride\b|= default|\}$|^[^(]*\(cudaStream_t ",
                                       declared[0]))


def _run(root, name, scratch, out):
    """One run of Doxygen: the lines of its warnings. out: the site, None: look only."""
    folder = scratch / name if out is None else out / REFERENCE / name
    folder.mkdir(parents=True)
    source = scratch / "headers" / name
    _copy_headers(root / name, source, flags(root))
    log, tags = scratch / f"{name}.log", scratch / f"{COMMON}.tag"
    fields = {
        "title": f"{name}: reference", "output": folder, "input": source, "strip": source,
        "warnings": log,
        "tagfile": scratch / f"{name}.tag",
        "tagfiles": f"{tags}=../{COMMON}" if name != COMMON and tags.exists() else "",
        "html": "NO" if out is None else "YES",
        "header": _header(scratch) if out is not None else "",
        "stylesheets": " ".join(str(sheet) for sheet in STYLESHEETS if sheet.is_file()),
    }
    text = re.sub(r"@(\w+)@", lambda match: str(fields[match[1]]),
                  TEMPLATE.read_text(encoding="utf-8"))
    result = subprocess.run(["doxygen", "-"], input=text, stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT, text=True, check=False, cwd=root)
    if result.returncode:
        raise BookError(f"doxygen fails on {name}: {result.stdout.strip()}")
    said = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
    said = [line.replace(f"{scratch / 'headers'}/", "") for line in said if line.strip()]
    return [line for line in dict.fromkeys(said) if not speaks_for_itself(line, root)]


def _header(scratch):
    """Doxygen's own header, of whichever version, with the way back and the reader's choice of
    light or dark."""
    path = scratch / "header.html"
    if path.exists():
        return path
    subprocess.run(["doxygen", "-w", "html", str(path), str(scratch / "footer.html"),
                    str(scratch / "style.css")], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                   check=True, cwd=scratch)
    text = path.read_text(encoding="utf-8")
    text = text.replace("</head>", f"<script>{THEME_TOO}</script>\n</head>", 1)
    back = ('<p style="margin:0.6em 1em"><a href="$relpath^../../index.html">← the tutorial</a>'
            "</p>")
    text, count = re.subn(r"(<body[^>]*>)", lambda match: f"{match[1]}\n{back}", text, count=1)
    if not count:
        raise BookError(f"doxygen's header has no {html.escape('<body>')}")
    path.write_text(text, encoding="utf-8")
    return path
