"""PipeDream's weights: which version each pass reads, and what its stale gradients do to the loss."""
import json

from tools.base import say
from tools.book.short_runs import run, table
from tools.run import estimates

from . import draw_schedules, memory, planned

# The demo's model and batch, without clipping, which PipeDream cannot have.
SHAPE = {"micro_batch_size": 1, "grad_acc_steps": 8, "dp_size": 1, "grad_clip": 0}
STEPS, EVAL_INTERVAL = 200, 20
RATES = (0.002, 0.0007)
# (name, stages, what trains): on one rank, PipeDream is training with one micro-batch after the other.
RUNS = (("1F1B, an update a step", 4, "1f1b"), ("an update a micro-batch, 1 rank", 1, "pipedream"),
        ("PipeDream, 4 ranks", 4, "pipedream"))
# What is drawn; steps of so many micro-batches; pipelines of a small model.
DRAWN_RANKS, DRAWN_MICRO_BATCHES = 4, 8
LENGTHS = (8, 80, 800)
WEIGHTS_RANKS = (1, 2, 4, 8)


def _program(program, schedule):
    """What trains so: the chapter's program, or its example."""
    return program.with_name(f"{program.name}_pipedream") if schedule == "pipedream" else program


def measure(program):
    """{steps, micro_batches, runs: [losses of a run]}"""
    found = []
    for name, ranks, schedule in RUNS:
        for rate in RATES:
            say(f"book: training with {schedule} on {ranks} ranks, learning rate {rate:g}")
            records, _ = run(_program(program, schedule), ranks, **SHAPE, pp_size=ranks, lr=rate,
                             steps=STEPS, eval_interval=EVAL_INTERVAL)
            found.append({"name": name, "ranks": ranks, "schedule": schedule, "lr": rate,
                          "loss": [round(float(record["loss"]), 6) for record in records],
                          "val_loss": [[record["step"], round(float(record["val_loss"]), 6)]
                                       for record in records if "val_loss" in record]})
    return {"steps": STEPS, "micro_batches": SHAPE["grad_acc_steps"], "runs": found}


def simulate(program):
    """A step laid out in time, bubbles, and the weights of rank 0 by a dry run."""
    found = planned.ask(program, "1f1b", DRAWN_RANKS, DRAWN_MICRO_BATCHES)
    actions = [[[own["action"], own["begin"], own["end"]] for own in of_rank]
               for of_rank in found["actions"]]
    bubbles = [[m, round(planned.ask(program, "1f1b", DRAWN_RANKS, m)["bubble"], 6)]
               for m in LENGTHS]
    weights = [{"p": p, **{name: _weights(program, p, name) for name in ("1f1b", "pipedream")}}
               for p in WEIGHTS_RANKS]
    return {"drawn": {"ranks": DRAWN_RANKS, "micro_batches": DRAWN_MICRO_BATCHES,
                      "makespan": found["makespan"], "actions": actions},
            "bubbles": bubbles, "weights": weights}


def _weights(program, p, schedule):
    """[bytes that a dry run asked for, bytes by formula] of rank 0."""
    return estimates.read(
        _program(program, schedule),
        {**memory.SMALL, "pp_size": p, "grad_acc_steps": 2 * p,
         "pp_layers": ",".join([str(memory.SMALL["num_layers"] // p)] * p), "grad_clip": 0},
        lambda found: [found["simulated"]["weights"], found["predicted"]["weights"]])


def text(record):
    """stale.json: a line for each run, rank and case."""
    def lines(key, entries):
        return f' "{key}": [\n  ' + ",\n  ".join(json.dumps(entry) for entry in entries) + "\n ]"

    lists = ("runs", "bubbles", "weights")
    head = json.dumps({key: value for key, value in record.items() if key not in (*lists, "drawn")},
                      indent=1).rstrip()[:-1].rstrip()
    drawn = record["drawn"]
    facts = json.dumps({key: value for key, value in drawn.items() if key != "actions"})
    ranks = ",\n   ".join(json.dumps(of_rank) for of_rank in drawn["actions"])
    parts = [head, *(lines(key, record[key]) for key in lists),
             f' "drawn": {facts[:-1]}, "actions": [\n   {ranks}]}}']
    return ",\n".join(parts) + "\n}\n"


def bubbles_table(found):
    """Idle time by the number of micro-batches after which the pipeline empties."""
    rows = [[f"{m:,}", f"{bubble:.3f}"] for m, bubble in found["bubbles"]]
    return table(["micro-batches before the pipeline empties", "bubble"], rows,
                 f"`p` = {found['drawn']['ranks']}, the order of 1F1B, simulated with F = B = W.")


def weights_table(found):
    """What rank 0 keeps of weights, beside the whole model's."""
    whole = found["weights"][0]["1f1b"][0]
    rows = [[str(own["p"]), f"{own['1f1b'][0]:,}", f"{own['pipedream'][0]:,} ({own['pipedream'][1]:,})",
             f"{own['pipedream'][0] / whole:.2f}"] for own in found["weights"]]
    return table(["`p`", "1F1B", "PipeDream", "over the whole model's"], rows,
                 "Bytes of weights on rank 0, `m` = `2p`, by a dry run; in brackets by formula.")


def losses_table(found):
    """The last validation loss of each way, with each rate."""
    rows = []
    for name, ranks, schedule in RUNS:
        own = {one["lr"]: one["val_loss"][-1][1] for one in found["runs"]
               if (one["ranks"], one["schedule"]) == (ranks, schedule)}
        updates = found["steps"] * (found["micro_batches"] if schedule == "pipedream" else 1)
        rows.append([name, f"{updates:,}", *(f"{own[rate]:.3f}" for rate in RATES)])
    return table(["", "updates", *(f"rate {rate:g}" for rate in RATES)], rows,
                 f"Validation loss after {found['steps']} steps of {found['micro_batches']} "
                 "micro-batches of the demo's model without clipping: the same samples in each row.")


def versions(schedule):
    """Of each rank of a schedule of F and BW: [(action, begin, end, version that it reads, newest)]."""
    ranks = []
    for actions in schedule["actions"]:
        newest, read, found = 0, {}, []
        for action, begin, end in actions:
            micro_batch = draw_schedules.micro_batch_of(action)
            if action.startswith("F"):
                read[micro_batch] = newest
            found.append((action, begin, end, read[micro_batch], newest))
            if not action.startswith("F"):
                del read[micro_batch]
                newest += 1
        ranks.append(found)
    return ranks


def at_once(found):
    """The most versions that a rank has to have at a time, the newest among them."""
    most, in_flight = 1, {}
    for action, _, _, version, newest in found:
        in_flight[draw_schedules.micro_batch_of(action)] = version
        most = max(most, len({*in_flight.values(), newest}))
        if not action.startswith("F"):
            del in_flight[draw_schedules.micro_batch_of(action)]
            most = max(most, len({*in_flight.values(), newest + 1}))
    return most


def versions_table(schedule):
    """How late gradients are, and how many versions there are, by rank."""
    rows = [[str(rank), str(max(newest - version for action, _, _, version, newest in found
                                if not action.startswith("F"))), str(at_once(found))]
            for rank, found in enumerate(versions(schedule))]
    return table(["rank", "a gradient is late by, updates", "versions at once"], rows,
                 f"`p` = {schedule['ranks']}, `m` = {schedule['micro_batches']}: the most of each, by "
                 "going through the drawn step; the newest version counts as one.")
