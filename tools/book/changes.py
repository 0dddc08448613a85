"""CHANGES.md of a chapter: every edit of its parent as a diff, every new function in a sentence.

`./book weave` writes it; the README, which links to it, shows only what its lesson needs.
"""
import json
import re
import textwrap

from tools.base import BookError
from tools.book import delta, diff

FILE = "CHANGES.md"
EDGES = "ch07_5d/figures/edges.json"  # what the types say of messages, by chapter
NO_DIFF = "None.\n"
SENTENCE = re.compile(r"(.*?(?<!\be\.g)(?<!\bi\.e)(?<!\bet al)\.)(?=\s+[A-Z`]|\s*$)", re.S)
CLASS = re.compile(r"(?:template\s*<.*?>\s*)?(class|struct|enum class|enum)\s+(\w+)[^;()]*\{")
FUNCTION = re.compile(r"[^(]*?(operator\W+?|~?\w+)\s*\(")
NO_FUNCTION = ("if", "for", "while", "switch", "return", "static_assert", "namespace", "decltype")


def first_sentence(comment):
    """The sentence that a comment begins with; its first paragraph where no sentence ends."""
    text = " ".join(re.split(r"\n\s*\n", comment.strip())[0].split())
    match = SENTENCE.match(text)
    return match[1] if match else text


def _statements(text):
    """(`///` comment before it, statement up to its `;` or `{`, depth of braces before it) of the
    declarations of a header, and (None, "}", depth) where a brace closes."""
    comment, statement, depth = [], "", 0
    for line in text.split("\n"):
        stripped = line.strip()
        if stripped.startswith("///") and not statement:
            comment.append(stripped[3:])
            continue
        if stripped.startswith(("//", "#")):
            continue
        if "///<" in line and not comment and not statement:
            comment = [line.split("///<")[1]]
        code = re.sub(r'"(?:\\.|[^"\\])*"', '""', line.split("//")[0])
        for piece in re.split(r"([;{}])", code):
            if piece not in (";", "{", "}"):
                statement = (statement + " " + piece.strip()).strip()
                continue
            if piece == "}":
                depth -= 1
                yield None, "}", depth
            elif statement:
                yield "\n".join(comment), statement + piece, depth
            depth += piece == "{"
            comment, statement = [], ""
        # A comment belongs to what comes right after it.
        statement = re.sub(r"^(?:public|private|protected)\s*:\s*", "", statement)


def declarations(text):
    """[(name, first sentence or "")] of the classes and functions that a header declares.

    Members are named with their class. Bodies are not looked into. Left out are destructors, what is
    defaulted or deleted, what overrides without a comment, and classes that are only announced.
    """
    found, scopes = [], []  # scopes: (depth, name); a name of None: a body, of whatever kind
    for comment, statement, depth in _statements(text):
        if comment is None:
            while scopes and scopes[-1][0] >= depth:
                scopes.pop()
            continue
        if scopes and scopes[-1][1] is None:
            continue
        opens = statement.endswith("{")
        kind, outer = CLASS.match(statement), [name for _, name in scopes if name]
        if kind:
            scopes.append((depth, kind[2] if "enum" not in kind[1] else None))
            found.append((f"{kind[1].split()[0]} " + "::".join([*outer, kind[2]]),
                          first_sentence(comment)))
        elif statement.startswith("namespace"):
            scopes.append((depth, ""))
        else:
            if opens:
                scopes.append((depth, None))
            name = _function(statement)
            if name and (comment or not re.search(r"\boverride\b", statement)):
                found.append(("::".join([*outer, name]), first_sentence(comment)))
    return found


def _function(statement):
    """The name of the function that a statement declares, or None."""
    if re.search(r"=\s*(?:default|delete)\s*;$", statement) or statement.startswith("using "):
        return None
    before = statement.split("=")[0] if "operator" not in statement else statement
    match = FUNCTION.match(before)
    if not match or match[1] in NO_FUNCTION or match[1].startswith("~"):
        return None
    return match[1]


def snippet_delta(reference, folder):
    """The snippet file#name as a diff between the parent and the chapter, markers left out."""
    file, _, name = reference.partition("#")
    versions = (manifest_of(folder).parent, folder.name)
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


def manifest_of(folder):
    """The Manifest of a chapter that has a parent."""
    manifest = delta.read_manifest(folder.name, folder.parent)
    if manifest.parent is None:
        raise BookError(f"{folder / 'README.md'}: a chapter without a parent has no changes to "
                        "show")
    return manifest


def page(folder):
    """The text of CHANGES.md of a chapter that has a parent."""
    manifest = manifest_of(folder)
    changes = diff.compare(manifest.parent, folder.name, folder.parent)
    parts = [f"# What this chapter changes\n\nWritten by `./book weave` from the sources, beside "
             f"[the parent's](../{manifest.parent}/README.md). What it is for, the "
             "[README](README.md) says.\n", _rooms(changes, folder), "## Edits\n"]
    for file, names in manifest.edits.items():
        for name in names:
            plus, minus = diff.count(row for row in changes.edited.get(file, ())
                                     if name in row.names)
            parts.append(f"### [{file}]({file})#{name}\n\n+{plus} -{minus}\n\n```diff\n"
                         f"{snippet_delta(f'{file}#{name}', folder)}```\n")
    parts += [] if manifest.edits else [NO_DIFF]
    parts.append("## New files\n")
    for file, lines in changes.added.items():
        parts.append(f"### [{file}]({file})\n\n{diff.amount(lines, 'line')}."
                     + _listed(folder / file) + "\n")
    parts += [] if changes.added else [NO_DIFF]
    parts += ["## Removed files\n\n" + "".join(f"- `{file}`\n" for file in changes.removed)
              ] if changes.removed else []
    parts += _edges(folder)
    return "\n".join(parts)


def _edges(folder):
    """A part about the types of what a layer's messages take and make, where the chapter has some."""
    path = folder.parent / EDGES
    layouts = json.loads(path.read_text(encoding="utf-8")).get(folder.name[:4], []) if path.exists() else []
    if not layouts:
        return []
    shown = ["## Types at its edges\n\nThe messages of a layer, as `./book types ch07` shows them, with the type "
             "that each takes and the type that it makes. [The page on types](../ch07_5d/types.md) says what the "
             "letters mean.\n"]
    for layout in layouts:
        keys = ("phase", "after", "message", "of", "makes", "before")
        rows = [f"| {' | '.join(row[key] for key in keys)} |" for row in layout["rows"]]
        shown.append("\n".join([f"`{layout['flags']}`:\n", "| phase | after | message | takes | makes | before |",
                                "|---|---|---|---|---|---|", *rows, ""]))
    return shown


def _rooms(changes, folder):
    """A table of the chapter's folders: what is new in each, edited, and as the parent has it."""
    edited = set(changes.edited_files())
    rooms = {}
    for file in sorted(set(diff.carried_files(folder)) - {diff.CMAKE}):
        rooms.setdefault(file.rpartition("/")[0], []).append(file)
    lines = ["| room | new | edited | as in the parent |", "|---|---|---|---|"]
    for room, files in sorted(rooms.items()):
        new = [file for file in files if file in changes.added]
        own = [file for file in files if file in edited]
        kept = len(files) - len(new) - len(own)
        cells = [diff.amount(len(new), "file")
                 + f", {diff.amount(sum(changes.added[file] for file in new), 'line')}" if new else "",
                 "{}, +{} -{}".format(diff.amount(len(own), "file"), *diff.count(
                     row for file in own for row in changes.edited[file])) if own else "",
                 diff.amount(kept, "file") if kept else ""]
        lines.append(f"| {f'`{room}`' if room else 'the root'} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _listed(path):
    """What a header declares, as a list; nothing for other files."""
    if path.suffix not in (".h", ".cuh"):
        return ""
    found = dict.fromkeys(declarations("\n".join(diff.read_source(path).lines)))
    said = [f"\n- `{name}`: {sentence}" for name, sentence in found if sentence]
    bare = [f"`{name}`" for name, sentence in found if not sentence]
    if bare:
        said.append(f"\n- without a comment: {', '.join(dict.fromkeys(bare))}")
    return "\n" + "".join(said) if said else ""
