"""What leaves a node in each order of the mesh: a dry run of a large model, and in runs of a small one;
and who holds what, as the program prints it."""
import json
import re
import textwrap

from tools.base import say
from tools.book.short_runs import run, table
from tools.run import bridge, estimates, recipes

MIB, GIB = 2**20, 2**30
DIMENSIONS = ("tp", "cp", "dp", "pp")
# Llama 3's 8B on four nodes of eight.
LARGE = {"model": "8B", "dtype": "bf16", "micro_batch_size": 1, "seq_len": 4096, "grad_acc_steps": 4,
         "zero_stage": 1, "recompute": "full", "dp_size": 2, "pp_size": 2, "tp_size": 8,
         "sequence_parallel": None, "node_size": 8}
ORDERS = ("pp,dp,cp,tp", "dp,pp,cp,tp", "pp,tp,cp,dp", "tp,cp,dp,pp")
# The same in small, which runs.
SMALL = {"num_heads": 4, "num_kv_heads": 2, "hidden_size": 64, "ffn_hidden_size": 192,
         "num_layers": 2, "seq_len": 64, "micro_batch_size": 2, "grad_acc_steps": 2, "dp_size": 2,
         "pp_size": 2, "tp_size": 2, "sequence_parallel": None, "node_size": 2}
SMALL_RANKS, STEPS = 8, 2
LLAMA_3 = "dp,pp,cp,tp"
TYPED = "--dp_size 2 --tp_size 2 --sequence_parallel"
WHY = "linear_forward o_proj"
# Of these layouts a chapter's page of changes shows the types at its edges: the messages of a layer.
EDGES = {"ch03": ("--tp_size 2", "--tp_size 2 --sequence_parallel"),
         "ch04": ("--cp_size 2 --cp_method all_gather", "--cp_size 2 --cp_method ulysses"),
         "ch06": ("--dp_size 2 --num_experts 4 --ep_size 2",)}
PROVEN = "llama3_405b_long"  # a recipe
BRIDGED = "llama3_405b"  # the recipe that the page shows in other flags
# Every dimension at once, of which the page shows a layer.
MAPPED = {"num_experts": 8, "ep_size": 4, "dp_size": 2, "pp_size": 4, "cp_size": 2, "tp_size": 2,
          "sequence_parallel": None, "zero_stage": 3, "micro_batch_size": 2, "seq_len": 64, "grad_acc_steps": 4}
# The layout that the page shows.
SHOWN = {"num_experts": 4, "ep_size": 2, "dp_size": 2, "pp_size": 2, "cp_size": 2, "tp_size": 2,
         "sequence_parallel": None, "zero_stage": 1, "grad_acc_steps": 2, "node_size": 8}


def size_of(flags, axis):
    return flags.get(f"{axis}_size", 1)


def peers_outside(flags, order, axis):
    """(peers of rank 0 on another node, all of its peers) along an axis."""
    stride = 1
    for faster in reversed(order.split(",")):
        if faster == axis:
            break
        stride *= size_of(flags, faster)
    others = [place * stride for place in range(1, size_of(flags, axis))]
    return sum(rank >= flags["node_size"] for rank in others), len(others)


def by_dimension(ledger, steps):
    """{dimension: (bytes of rank 0, of these to other nodes)} of a step, of the mesh's own groups."""
    found = {}
    for axis in DIMENSIONS:
        entries = [entry for name, entry in ledger.items() if name.split(".")[0] == axis]
        found[axis] = [sum(entry[key] for entry in entries) / steps
                       for key in ("wire_bytes", "net_bytes")]
    return found


def estimate_all(program):
    say("book: what leaves a node, by dry runs")
    return {"large": [{"order": order, "sent": estimates.read(
        program, {**LARGE, "mesh_order": order},
        lambda found: by_dimension(found["sent"]["ledger"], found["sent"]["steps"]))}
        for order in ORDERS]}


def count(program):
    """Runs, and the last one's messages; what the layouts say of ranks and groups."""
    say("book: what leaves a node, in runs")
    found = []
    for order in ORDERS:
        _, ledger = run(program, SMALL_RANKS, **SMALL, dtype="f32", steps=STEPS, mesh_order=order,
                        check_copies=1)
        found.append({"order": order, "sent": by_dimension(ledger, STEPS)})
    return {"small": found, "ledger": ledger, "layout": groups(program, SHOWN),
            "small_layout": groups(program, {**SMALL, "mesh_order": LLAMA_3})}


def layout(program):
    """What --mesh_show table prints of SHOWN."""
    return estimates.output_of([str(program), *estimates.words_of({**SHOWN, "mesh_show": "table"})])


def proof(program, chapter):
    """What ./book prove prints of a recipe, without what is measured anew each time."""
    flags = recipes.load(chapter, PROVEN).words()
    text = estimates.output_of([str(program), "--prove", "16", "--mesh_show", "types", *flags])
    return re.sub(r"(, found)? (within [\d.e-]+, )?in [\d.]+ s$", "", text, flags=re.M)


def typed(program):
    """What ./book types prints of a small layout, with its command."""
    text = estimates.output_of([str(program), *TYPED.split(), "--mesh_show", "types"])
    return f"$ ./book types ch07 -- {TYPED}\n{text}"


def messages_back(program):
    """What it prints of the same layer's messages on the way back."""
    lines = estimates.output_of([str(program), *estimates.words_of({**MAPPED, "mesh_show": "shapes"})]).splitlines()
    sent = [line for line in lines[lines.index("backward"):-1] if " over " in line]
    rows = narrowed([lines[0], lines[1], *sent])[1:]
    weight, here = rows[0].index("weight"), rows[0].index("on this rank")  # messages have no weight
    return "".join(f"{row[:weight]}{row[here:]}\n" for row in rows)


def why(program):
    """What ./book types --why prints of a row of that layout, with its command."""
    text = estimates.output_of([str(program), *TYPED.split(), "--mesh_show", "types", "--mesh_why", WHY])
    return f'$ ./book types ch07 --why "{WHY}" -- {TYPED}\n{text}'


def edges(program):
    """{chapter: [{flags, rows}]}: a layer's messages in order, with the operations around them."""
    found = {}
    for chapter, layouts in EDGES.items():
        found[chapter] = []
        for flags in layouts:
            text = estimates.output_of([str(program), *flags.split(), "--mesh_show", "types"])
            found[chapter].append({"flags": flags, "rows": edges_in(text)})
    return found


def rows_in(text):
    """The cells of a layer's rows: phase, operation, weight, what it makes, of what."""
    head, *lines = text.split("\n\n")[0].splitlines()
    at = [0, *(head.index(word) for word in ("operation", "weight", "makes")), head.rindex("of"), None]
    return [[line[begin:end].strip() for begin, end in zip(at, at[1:])] for line in lines]


def edges_in(text):
    """The messages among the rows of a layer's types, each with the row before and the row after it."""
    rows, found = rows_in(text), []
    for i, (phase, name, _, makes, of) in enumerate(rows):
        if " over " not in name:
            continue
        around = [next((" ".join(row[1:3]).strip() for row in others
                        if " over " not in row[1] and row[0] == phase), "")
                  for others in (rows[i::-1], rows[i:])]
        found.append({"phase": phase, "message": name, "after": around[0], "of": of, "makes": makes,
                      "before": around[1]})
    return found


def mapped(program):
    """What --mesh_show shapes prints of MAPPED, forward, with the command."""
    flags = estimates.words_of({**MAPPED, "mesh_show": "shapes"})
    command = textwrap.fill(f"$ ./book run ch07 --ranks 1 -- {' '.join(flags)}", 110, subsequent_indent="    ",
                            break_long_words=False, break_on_hyphens=False).replace("\n", " \\\n")
    lines = estimates.output_of([str(program), *flags]).splitlines()
    shown = narrowed(lines[:lines.index("backward")])
    return "\n".join([command, *shown, *lines[-1:]]) + "\n"


def narrowed(lines):
    """Without columns of blanks but for two between cells."""
    width = max(map(len, lines))
    blank = [all(line.ljust(width)[at] == " " for line in lines[1:]) for at in range(width)]
    kept = [at for at in range(width) if not (blank[at] and at > 1 and blank[at - 1] and blank[at - 2])]
    return lines[:1] + ["".join(line.ljust(width)[at] for at in kept).rstrip() for line in lines[1:]]


def shapes_in(text, operation, weight=""):
    """All shapes in the first row of mapped() with this operation and weight, from left to right."""
    row = next(line for line in text.splitlines() if re.match(rf"{operation} +{weight}", line))
    return [[int(size) for size in shape.split(", ")] for shape in re.findall(r"\[([\d, ]+)\]", row)]


def bridged(program, chapter):
    """A recipe as --as prints it."""
    recipe = recipes.load(chapter, BRIDGED)
    _, found = bridge.ask(program, recipe.words())
    return "\n".join(bridge.translate(bridge.FRAMEWORKS["megatron"], found, recipe.title)) + "\n"


def groups(program, flags):
    """What --mesh_show json says of ranks and groups."""
    found = json.loads(estimates.output_of(
        [str(program), *estimates.words_of({**flags, "mesh_show": "json"})]))
    return {name: found[name] for name in ("ranks", "groups")}


def expected(flags, order, axis, wire):
    """Bytes to other nodes by formula: those of the peers that lie there."""
    outside, peers = peers_outside(flags, order, axis)
    return wire * outside / peers if peers else 0


def large_table(found):
    """What a rank sends, and what of it leaves its node."""
    used = [axis for axis in DIMENSIONS if size_of(LARGE, axis) > 1]
    rows = []
    for own in found:
        net = {axis: own["sent"][axis][1] for axis in used}
        rows.append([f"`{own['order']}`", *(f"{net[axis] / GIB:.2f}" for axis in used),
                     f"{sum(net.values()) / GIB:.2f}"])
    wire = " + ".join(f"{found[0]['sent'][axis][0] / GIB:.2f} over `{axis}`" for axis in used)
    return table(["`--mesh_order`", *(f"`{axis}`, GiB" for axis in used), "together"], rows,
                 f"What leaves rank 0's node in a step. The rank sends {wire} in every order. Llama 3's 8B on 32 ranks, "
                 "`dp` 2 `pp` 2 `tp` 8, nodes of 8, by a dry run.")


def small_table(found):
    """Bytes to other nodes by formula, and by the ledger."""
    used = [axis for axis in DIMENSIONS if size_of(SMALL, axis) > 1]
    rows = []
    for own in found:
        cells, total, formula = [], 0, 0
        for axis in used:
            wire, net = own["sent"][axis]
            cells.append(f"{net:,.0f}")
            total, formula = total + net, formula + expected(SMALL, own["order"], axis, wire)
        rows.append([f"`{own['order']}`", *cells, f"{total:,.0f}", f"{formula:,.0f}",
                     f"{total / formula:.4f}"])
    return table(["`--mesh_order`", *(f"`{axis}`" for axis in used), "together", "by formula", "ratio"], rows,
                 "Bytes that rank 0 sends to other nodes in a step, by the ledger. 8 ranks on nodes of 2, `dp` 2 `pp` 2 "
                 "`tp` 2, a small model in f32.")
