"""The mesh as a page to click on: what each rank holds, from what `--mesh_show json` prints.

docs/interactive/mesh.html is the page. It holds the layout that it shows as JSON, here made smaller: a kind
of weight, such as q_proj of every layer, stands once, with the parts that ranks hold of it.
"""
import json
import re

from tools.base import ROOT

PAGE = ROOT / "docs" / "interactive" / "mesh.html"
BLOCK = re.compile(r'(<script type="application/json" id="layout">\n).*?(</script>)', re.S)


def kind_of(name):
    """As the program's table has it: `*` for the numbers of layers and experts."""
    words = ["*" if word.isdigit() else word for word in name.split(".")]
    return ".".join(words[words[0] == "model":len(words) - (words[-1] == "weight")])


def number_of(name, what):
    """The number behind `layers` or `experts` in a weight's name, None if there is none."""
    found = re.search(rf"\b{what}\.(\d+)\.", name)
    return int(found[1]) if found else None


def stretches(numbers):
    """[[begin, end]] of these numbers, ends exclusive."""
    found = []
    for number in sorted(numbers):
        if found and found[-1][1] == number:
            found[-1][1] += 1
        else:
            found.append([number, number + 1])
    return found


def weights_of(parameters):
    """Kinds of weights, each with its parts: a part of several layers or experts stands once, if the same
    ranks hold it."""
    kinds = {}
    for own in parameters:
        kind = kinds.setdefault((kind_of(own["name"]), tuple(own["shape"])), {})
        groups = {name: own[name] for name in ("sharded_over", "copied_over", "gradient_summed_over")}
        part = kind.setdefault(json.dumps([own["slices"], own["ranks"], groups]), {
            "slices": own["slices"], "ranks": own["ranks"], **groups, "layers": set(), "experts": set()})
        for what in ("layers", "experts"):
            if (number := number_of(own["name"], what)) is not None:
                part[what].add(number)
    return [{"name": name, "shape": list(shape), "parts": [
        {**part, "layers": stretches(part["layers"]), "experts": stretches(part["experts"])}
        for part in parts.values()]} for (name, shape), parts in kinds.items()]


def held_by(parameters, ranks):
    """[{"layers", "experts"}] of each rank: the numbers of which it holds anything, as stretches."""
    held = [{"layers": set(), "experts": set()} for _ in range(ranks)]
    for own in parameters:
        for what in ("layers", "experts"):
            if (number := number_of(own["name"], what)) is not None:
                for rank in own["ranks"]:
                    held[rank][what].add(number)
    return [{what: stretches(numbers) for what, numbers in of_rank.items()} for of_rank in held]


def layout_text(found, title):
    """The JSON of the page's block. found: what --mesh_show json prints, parsed."""
    held = held_by(found["parameters"], len(found["ranks"]))
    counts = {what: max((of_rank[what][-1][1] for of_rank in held if of_rank[what]), default=0)
              for what in ("layers", "experts")}
    layout = {"title": title, **{name: found[name] for name in ("order", "node_size", "ranks", "groups", "batch")},
              **counts, "held": held, "weights": weights_of(found["parameters"])}
    return json.dumps(layout, separators=(",", ":")).replace("<", "\\u003c") + "\n"


def page_of(found, title):
    """The page with this layout, one file that works anywhere."""
    text = layout_text(found, title)
    return BLOCK.sub(lambda block: block[1] + text + block[2], PAGE.read_text(encoding="utf-8"))
