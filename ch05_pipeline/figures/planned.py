"""Schedules as the simulator lays them out: what --pp_show json says, and what follows from it.

Times are in units of a stage's forward pass, F = B = W = 1, where a rank's layers are one stage. A rank
that has several stages has them for the same layers, so each takes its part of the unit.
Activations are in units of what the whole model keeps of one micro-batch.
"""
import json

from tools.book.short_runs import table
from tools.book.showcase import output_of
from tools.run import estimates

LAYERS = 64   # enough for every case; a layer of the meta device costs nothing
# {case: (flags, parts that a rank's layers are cut into, stages of the whole model)} by p.
DRAWN = {"naive": {}, "afab": {}, "1f1b": {}, "interleaved": {"pp_chunks": 2},
         "llama3": {"pp_chunks": 2, "pp_run_length": 8}, "zb_h1": {}, "zb_h2": {}, "zb_v": {}}
DRAWN_RANKS, DRAWN_MICRO_BATCHES = 4, 8
TWO_WAYS = {"dualpipe": {}}
TWO_WAYS_RANKS, TWO_WAYS_MICRO_BATCHES = 8, 20      # the book's figure of it
# Of the book's figure of bubbles: its columns and rows.
BOOK_RANKS, BOOK_CHUNKS, BOOK_MICRO_BATCHES = 8, (1, 2, 4, 8), (1, 2, 4, 8, 16, 32)
# Of the plane, and of activations by rank.
PLANE_RANKS, PLANE_MICRO_BATCHES = 8, 16
PLANE = {"naive": ("naive", {}), "afab": ("afab", {}), "1f1b": ("1f1b", {}),
         "interleaved, v = 2": ("interleaved", {"pp_chunks": 2}),
         "interleaved, v = 4": ("interleaved", {"pp_chunks": 4}),
         "breadth_first, v = 2": ("breadth_first", {"pp_chunks": 2}),
         "zb_h1": ("zb_h1", {}), "zb_h2": ("zb_h2", {}), "auto": ("auto", {}),
         "zb_v": ("zb_v", {}), "dualpipe": ("dualpipe", {}), "dualpipe_v": ("dualpipe_v", {})}
FOLDED = ("zb_v", "dualpipe_v")
ZB_RANKS, ZB_MICRO_BATCHES = (2, 4, 8, 16), 32
# Of runs of micro-batches as in Llama 3, v = 2: lengths, and times of a message.
RUN_RANKS, RUN_MICRO_BATCHES, RUN_LENGTHS, MESSAGES = 4, 24, (4, 6, 8, 12, 24), (0, 0.25, 0.5)

# Of passes in turns.
TURNS_RANKS, TURNS_MICRO_BATCHES = 4, 8
TURNS = {name: PLANE[name] for name in ("1f1b", "zb_h1", "zb_v", "interleaved, v = 2", "dualpipe",
                                        "dualpipe_v")}

LISTS = ("bubbles", "plane", "formulas", "runs", "turns")  # of schedules.json, with a line for each entry


def parts_of(schedule, flags):
    """Stages that a rank's layers are cut into."""
    return 2 if schedule in FOLDED else flags.get("pp_chunks", 1)


def ask(program, schedule, ranks, micro_batches, message=0, times=None, **flags):
    """What --pp_show json says; times: of F, B, W and a message, in place of units."""
    part = 1 / parts_of(schedule, flags)
    flags = {"pp_size": ranks, "num_layers": LAYERS, "grad_acc_steps": micro_batches,
             "pp_schedule": schedule, **flags, "pp_times": times or f"{part:g},{part:g},{part:g},{message:g}",
             "pp_show": "json"}
    return json.loads(output_of(program, estimates.words_of(flags)))


def table_of(program, schedule, ranks, micro_batches, **flags):
    """The schedule as --pp_schedule reads it from a file."""
    return output_of(program, estimates.words_of(
        {"pp_size": ranks, "num_layers": LAYERS, "grad_acc_steps": micro_batches,
         "pp_schedule": schedule, **flags, "pp_show": "table"}))


def held(found):
    """Of each rank, the most activations, in units of a micro-batch's in the whole model."""
    return [most / found["stages"] for most in found["most_in_flight"]]


def summary(found):
    """What the tables and plots read of a schedule."""
    return {"bubble": round(found["bubble"], 6), "inner_bubble": round(found["inner_bubble"], 6),
            "makespan": found["makespan"], "messages": found["messages"],
            "held": [round(most, 6) for most in held(found)]}


def simulate(program):
    """All that is simulated, for schedules.json."""
    drawn = [_drawn(program, name, DRAWN_RANKS, DRAWN_MICRO_BATCHES, flags)
             for name, flags in DRAWN.items()]
    drawn += [_drawn(program, name, TWO_WAYS_RANKS, TWO_WAYS_MICRO_BATCHES, flags)
              for name, flags in TWO_WAYS.items()]
    bubbles = [{"m": m, "v": v, **summary(ask(program, "interleaved", BOOK_RANKS, m, pp_chunks=v))}
               for v in BOOK_CHUNKS for m in BOOK_MICRO_BATCHES]
    plane = [{"name": label, **summary(ask(program, name, PLANE_RANKS, PLANE_MICRO_BATCHES, **flags))}
             for label, (name, flags) in PLANE.items()]
    formulas = [{"schedule": name, "p": p, **summary(ask(program, name, p, ZB_MICRO_BATCHES))}
                for name in BUBBLES for p in ZB_RANKS]
    runs = [{"length": length, "message": message, **summary(ask(
        program, "llama3", RUN_RANKS, RUN_MICRO_BATCHES, message, pp_chunks=2,
        pp_run_length=length))} for length in RUN_LENGTHS for message in MESSAGES]
    turns = [{"name": label, **_turns(program, name, flags)} for label, (name, flags) in TURNS.items()]
    return {"bubbles": bubbles, "plane": plane, "formulas": formulas, "runs": runs, "turns": turns,
            "drawn": drawn}


def _turns(program, name, flags):
    """A schedule whose passes run one after the other, and in turns where both can begin."""
    alone, paired = (ask(program, name, TURNS_RANKS, TURNS_MICRO_BATCHES, **flags, **more)
                     for more in ({}, {"overlap_dispatch": None}))
    passes = sum(own["action"][0] != "W" for of_rank in alone["actions"] for own in of_rank)
    return {"passes": passes, "in_turns": paired["in_turns"],
            "step": [alone["makespan"], paired["makespan"]],
            "held": [max(held(found)) for found in (alone, paired)]}


def _drawn(program, name, ranks, micro_batches, flags):
    found = ask(program, name, ranks, micro_batches, **flags)
    return {"name": name, "ranks": ranks, "micro_batches": micro_batches, **flags, **summary(found),
            "actions": [[[own["action"], own["begin"], own["end"]] for own in of_rank]
                        for of_rank in found["actions"]]}


def text(record):
    """schedules.json: a line for each entry, and of what is drawn a line for each rank."""
    head = json.dumps({key: value for key, value in record.items()
                       if key not in (*LISTS, "drawn")}, indent=1)
    lists = [f' "{key}": [\n  ' + ",\n  ".join(json.dumps(entry) for entry in record[key]) + "\n ]"
             for key in LISTS]
    schedules = []
    for entry in record["drawn"]:
        facts = json.dumps({key: value for key, value in entry.items() if key != "actions"})
        ranks = ",\n    ".join(json.dumps(of_rank, separators=(",", ":"))
                               for of_rank in entry["actions"])
        schedules.append(f'{facts[:-1]}, "actions": [\n    {ranks}]}}')
    lists.append(' "drawn": [\n  ' + ",\n  ".join(schedules) + "\n ]")
    return f"{head.rstrip()[:-1].rstrip()},\n" + ",\n".join(lists) + "\n}\n"


# --- formulas -------------------------------------------------------------------------------------

# {schedule: idle time of a rank, in units of F = B = W = 1, which takes 3 m}
BUBBLES = {"1f1b": lambda p: 3 * (p - 1), "zb_h1": lambda p: p - 1, "zb_h2": lambda p: p - 1,
           "dualpipe": lambda p: p / 2 - 1}
FORMULAS = {"1f1b": "(p-1)(F+B+W)", "zb_h1": "(p-1)(F+B-W)", "zb_h2": "(p-1) F", "dualpipe": "(p/2-1) F"}
INNER = {"zb_h2": "(p-1)(F+B-2W)"}


def book_bubble(p, m, v):
    """The book's (p-1)/(v m)."""
    return (p - 1) / (v * m)


def bubble(p, m, v):
    """That, where there are micro-batches for all ranks; with fewer a rank waits for the first one
    to come round."""
    return (v * max(m, p) + min(m, p) - 1) / (v * m) - 1


def bubbles_table(found):
    """The book's 24 values, simulated."""
    rows = []
    for m in BOOK_MICRO_BATCHES:
        row = [str(m)]
        for v in BOOK_CHUNKS:
            own = next(case["bubble"] for case in found if (case["m"], case["v"]) == (m, v))
            expected = book_bubble(BOOK_RANKS, m, v)
            same = abs(own - expected) < 1e-5
            row.append(f"{own:.3f}" if same else f"**{own:.3f}** ({expected:.3f})")
        rows.append(row)
    return table(["`m`", *(f"`v` = {v}" for v in BOOK_CHUNKS)], rows,
                 f"Idle time over work, simulated, `p` = {BOOK_RANKS}. Where it is not the book's "
                 "`(p-1)/(v m)`, in brackets what that says.")


def formulas_table(found):
    """Bubbles of zero-bubble schedules: simulated, and a formula's."""
    rows = []
    for name in BUBBLES:
        row = [f"`{name}`", f"`{FORMULAS[name]}`"]
        for p in ZB_RANKS:
            own = next(case for case in found if (case["schedule"], case["p"]) == (name, p))
            idle = 3 * ZB_MICRO_BATCHES * own["bubble"]
            row.append(f"{idle:.3g} ({BUBBLES[name](p):g})")
        rows.append(row)
    return table(["", "idle time of a rank", *(f"`p` = {p}" for p in ZB_RANKS)], rows,
                 f"Simulated with F = B = W = 1 and `m` = {ZB_MICRO_BATCHES}; in brackets the formula.")


def plane_table(found):
    """Bubble and activations of every schedule."""
    rows = [[f"`{own['name'].split(',')[0]}`" + "".join(own["name"].partition(",")[1:]).replace(
        "v = ", "`v` = "), f"{own['bubble']:.3f}", f"{own['inner_bubble']:.3f}",
             f"{max(own['held']):.2f}", f"{min(own['held']):.2f}", str(own["messages"])]
            for own in found]
    return table(["schedule", "bubble", "within a rank's own step", "most activations of a rank",
                  "least", "messages"], rows,
                 f"`p` = {PLANE_RANKS}, `m` = {PLANE_MICRO_BATCHES}, F = B = W. Activations in units "
                 "of what the whole model keeps of one micro-batch.")


def turns_table(found):
    """What it costs a schedule to run two passes in turns."""
    rows = [[f"`{own['name'].split(',')[0]}`" + "".join(own["name"].partition(",")[1:]).replace(
        "v = ", "`v` = "), f"{own['in_turns']} of {own['passes']}", f"{own['step'][0]:g}",
             f"{own['step'][1]:g}", f"{own['step'][1] / own['step'][0]:.3f}",
             f"{own['held'][0]:.2f}", f"{own['held'][1]:.2f}"] for own in found]
    return table(["schedule", "passes in turns", "step, one by one", "in turns", "ratio",
                  "activations, one by one", "in turns"], rows,
                 f"`--overlap_dispatch`, `p` = {TURNS_RANKS}, `m` = {TURNS_MICRO_BATCHES}, F = B = W, no "
                 "time for messages. Activations of the fullest rank, in units of what the whole model "
                 "keeps of one micro-batch.")


def runs_table(found):
    """Llama 3's runs: what longer ones hide, and what they hold."""
    rows = []
    for length in RUN_LENGTHS:
        own = [next(case for case in found if (case["length"], case["message"]) == (length, message))
               for message in MESSAGES]
        rows.append([str(length), *(f"{case['bubble']:.3f}" for case in own),
                     f"{own[0]['held'][0]:.2f}"])
    return table(["micro-batches in a run", *(f"bubble, message {message:g}" for message in MESSAGES),
                  "activations of rank 0"], rows,
                 f"`--pp_schedule llama3`, simulated with `p` = {RUN_RANKS}, `v` = 2 and `m` = {RUN_MICRO_BATCHES}; a message "
                 "takes so many units, and a chunk's forward pass 0.5.")
