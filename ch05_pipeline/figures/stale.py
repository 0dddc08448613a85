"""PipeDream's weights: which version each pass reads, and what its stale gradients do to the loss."""
from tools.base import say
from tools.short_runs import run, table

from . import draw_schedules

# The demo's model and batch, without clipping, which PipeDream cannot have.
SHAPE = {"micro_batch_size": 1, "grad_acc_steps": 8, "dp_size": 1, "grad_clip": 0}
STEPS, EVAL_INTERVAL = 200, 20
RATES = (0.002, 0.0007)
# (name, stages, schedule): of one rank, PipeDream is training with one micro-batch after the other.
RUNS = (("1F1B, an update a step", 4, "1f1b"), ("an update a micro-batch, 1 rank", 1, "pipedream"),
        ("PipeDream, 4 ranks", 4, "pipedream"))


def measure(program):
    """{steps, micro_batches, runs: [losses of a run]}"""
    found = []
    for name, ranks, schedule in RUNS:
        for rate in RATES:
            say(f"book: training with {schedule} on {ranks} ranks, learning rate {rate:g}")
            records, _ = run(program, ranks, **SHAPE, pp_size=ranks, pp_schedule=schedule, lr=rate,
                             steps=STEPS, eval_interval=EVAL_INTERVAL)
            found.append({"name": name, "ranks": ranks, "schedule": schedule, "lr": rate,
                          "loss": [round(float(record["loss"]), 6) for record in records],
                          "val_loss": [[record["step"], round(float(record["val_loss"]), 6)]
                                       for record in records if "val_loss" in record]})
    return {"steps": STEPS, "micro_batches": SHAPE["grad_acc_steps"], "runs": found}


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
                 "micro-batches: the same samples in each row. The demo's model, no clipping.")


def versions(schedule):
    """Of each rank of a 1F1B schedule: [(action, begin, end, version that it reads, newest)]."""
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


def of_1f1b(simulated):
    """The drawn schedule that PipeDream has the order of."""
    return next(own for own in simulated["drawn"] if own["name"] == "1f1b")


def versions_table(simulated):
    """How old gradients are, and how many versions there are, by rank."""
    schedule = of_1f1b(simulated)
    rows = [[str(rank), str(max(newest - version for action, _, _, version, newest in found
                                if not action.startswith("F"))), str(at_once(found))]
            for rank, found in enumerate(versions(schedule))]
    return table(["rank", "a gradient is late by, updates", "versions at once"], rows,
                 f"`p` = {schedule['ranks']}, `m` = {schedule['micro_batches']}: the most of each, by "
                 "going through the order of 1F1B. The newest version is counted.")
