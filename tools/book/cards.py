"""Cards: of each technique, when to use it, when not, what it costs and what it goes with.

A chapter's cards.json has one for each of its pages that teach a technique:

    {"README.md": {"technique": ..., FIELD: ..., ...}, "zero.md": {...}}

A page shows its own between `<!-- card -->` and `<!-- /woven -->`, a page of docs/ all of them with `<!-- cards -->`.
"""
import json

from tools import chapters
from tools.base import ROOT, BookError

FILE = "cards.json"
# {field: what a page calls it}, in the order of a card's rows.
FIELDS = {"allowed_by": "the arithmetic that allows it", "use_when": "use it when", "not_when": "not when",
          "costs": "costs", "combines_with": "combines with", "cheatsheet": "the book's cheatsheet",
          "corrected": "corrected"}


def of_chapter(folder):
    """{page: card} of a chapter; {} where it has none. BookError if a card lacks a field or has another."""
    path = folder / FILE
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BookError(f"cannot read {path}: {error}")
    for page, card in found.items():
        wrong = set(card) ^ {"technique", *FIELDS}
        empty = [name for name, text in card.items() if not str(text).strip()]
        if wrong or empty:
            raise BookError(f"{path}: the card of {page} needs the fields technique, {', '.join(FIELDS)}; "
                            f"look at {', '.join(sorted([*wrong, *empty]))}")
        if not (folder / page).exists():
            raise BookError(f"{path}: there is no page {page}")
    return found


def read(root=ROOT):
    """[(chapter, page, card)] of all chapters, in their order."""
    return [(chapter, page, card) for chapter in chapters.find_chapters(root)
            for page, card in of_chapter(chapter.folder).items()]


def side_by_side(root=ROOT):
    """All cards for a page of docs/, as Markdown: a row for each technique."""
    columns = ("use_when", "not_when", "costs", "combines_with")
    rows = [f"| [{card['technique']}](../{chapter.name}/{page}#6-where-it-stops-helping) | "
            + " | ".join(card[name] for name in columns) + " |" for chapter, page, card in read(root)]
    return "\n".join([f"| technique | {' | '.join(FIELDS[name] for name in columns)} |",
                      "|---" * (1 + len(columns)) + "|", *rows]) + "\n"


def table(page):
    """The card of a page, as Markdown."""
    found = of_chapter(page.parent)
    if page.name not in found:
        raise BookError(f"{page}: {FILE} has no card of this page")
    card = found[page.name]
    rows = [f"| {name} | {card[field]} |" for field, name in FIELDS.items()]
    return "\n".join([f"| card | {card['technique']} |", "|---|---|", *rows]) + "\n"
