"""ZeRO-3 against a pipeline: the same model and ranks, over links, batches and lengths of samples."""
import json
import tempfile
from pathlib import Path

from tools.base import say, write_whole
from tools.book.short_runs import table
from tools.run import estimates, plan

CLUSTER = Path(__file__).parents[1] / "clusters" / "h100_nvl8.json"
NODES, NICS, RANKS, STAGES, LENGTH = 4, 8, 32, 4, 4096
BASE = {"model": "8B", "dtype": "bf16", "nodes": NODES, "micro_batch_size": 1, "tp_size": 1, "cp_size": 1,
        "recompute": "none", "plan_best": 1, "plan_json": None}
ZERO_3 = {"dp_size": RANKS, "pp_size": 1, "zero_stage": 3}
PIPELINE = {"dp_size": RANKS // STAGES, "pp_size": STAGES, "zero_stage": 1}
BOTH = {"dp_size": RANKS // STAGES, "pp_size": STAGES, "zero_stage": 3}
GBS, MICRO_BATCHES = (50, 25, 12, 6, 3), (4, 8, 16, 32)
LENGTHS = (2048, 4096, 8192)
FREED = ("block", "chunk")
ORDERS = {"in a node": "tp,cp,pp,dp", "across nodes": "tp,cp,dp,pp"}  # ranks of dp; the last axis is the fastest
SHIPPED = 45  # GB/s, as the cluster's file has it
LAST = 16  # micro-batches of the tables by length and by when weights are freed
SHARDED = 8.03e9  # parameters of 8B
MOST = 45.0       # GB/s: with more, links inside of a node are slower than eight NICs
NEAR = 0.01       # of a crossing
FAST = 1e6        # GB/s with which nothing is exposed


class Steps:
    """Steps of layouts on the cluster with a NIC of so many GB/s."""

    def __init__(self, program, folder):
        self._program, self._folder = program, Path(folder)

    def of(self, layout, gbs, micro_batches, length=LENGTH, **flags):
        """Seconds. A pipeline has so many micro-batches of one sample; ZeRO-3 takes the same batch."""
        path = self._folder / f"{gbs:g}.json"
        if not path.exists():
            write_whole(path, plan.changed(CLUSTER, **{"net.gbs": gbs}))
        asked = {**BASE, **layout, **flags, "cluster": path, "seq_len": length,
                 "plan": RANKS // STAGES * micro_batches * length}
        return json.loads(estimates.output_of([str(self._program), *estimates.words_of(asked)]))["best"][0]

    def crossing(self, micro_batches, length):
        """GB/s of a NIC at which both take the same, within NEAR; None where ZeRO-3 is slower up to MOST."""
        def slower(gbs):
            zero_3, pipeline = (self.of(layout, gbs, micro_batches, length)["step_s"] for layout in (ZERO_3, PIPELINE))
            return zero_3 > pipeline
        low, high = GBS[-1], MOST
        if slower(high):
            return None
        while high - low > NEAR * high:
            middle = (low + high) / 2
            low, high = (middle, high) if slower(middle) else (low, middle)
        return high

    def micro_batch(self, length):
        """Seconds that a rank computes for a micro-batch of the whole model."""
        return self.of(ZERO_3, FAST, STAGES, length)["step_s"]


# [formula]
def formula(computed_s, micro_batches):
    """GB/s of a NIC at which ZeRO-3 and a pipeline take the same. Where ZeRO-3's
    exchanges take longer than computing, they are the step; a pipeline computes, and has a bubble."""
    sent = 2 * 2 * SHARDED + 4 * SHARDED  # two gathers in bf16, one reduce-scatter in f32
    bubble = (micro_batches + STAGES - 1) / micro_batches
    return sent * (RANKS - 1) / RANKS / (NICS * computed_s * bubble) / 1e9
# [formula]


def compare_all(program):
    """Steps of both over links and batches; crossings; ZeRO-3 with a pipeline."""
    say("book: ZeRO-3 against a pipeline")
    with tempfile.TemporaryDirectory(prefix="book_against_") as scratch:
        steps = Steps(program, scratch)
        return {
            "map": [{"gbs": gbs, "micro_batches": count, **{
                name: steps.of(layout, gbs, count)["step_s"] for name, layout in (("zero_3", ZERO_3), ("pipeline", PIPELINE))}}
                for gbs in GBS for count in MICRO_BATCHES],
            "crossings": [{"micro_batches": count, "length": length, "formula": formula(steps.micro_batch(length), count),
                           "replayed": steps.crossing(count, length)}
                          for count, length in [*((count, LENGTH) for count in MICRO_BATCHES),
                                                *((LAST, length) for length in LENGTHS if length != LENGTH)]],
            "freed": [{"where": where, "reshard_after": when, **{
                key: steps.of(BOTH, SHIPPED, LAST, mesh_order=order, reshard_after=when)[key]
                for key in ("step_s", "exposed", "gib")}} for where, order in ORDERS.items() for when in FREED]}


def texts(found):
    ratio = {(row["gbs"], row["micro_batches"]): row["zero_3"] / row["pipeline"] for row in found["map"]}
    return {
        "against.md": table(("GB/s of a NIC", *(f"{count} micro-batches" for count in MICRO_BATCHES)), [
            (str(gbs), *(_bold(ratio[gbs, count]) for count in MICRO_BATCHES)) for gbs in GBS],
            f"ZeRO-3's step over the pipeline's, replayed: 8B on {NODES} nodes of eight H100s, `dp` {RANKS} with ZeRO-3 "
            f"against `dp` {RANKS // STAGES} `pp` {STAGES} with ZeRO-1, samples of {LENGTH:,} tokens, no recomputation. Bold: "
            "ZeRO-3 is faster."),
        "crossings.md": table(("micro-batches", "tokens of a sample", "GB/s by formula", "GB/s, replayed", "replayed over formula"), [
            (str(row["micro_batches"]), f"{row['length']:,}", f"{row['formula']:.1f}",
             *((f"{row['replayed']:.1f}", f"{row['replayed'] / row['formula']:.2f}") if row["replayed"] else
               (f"none up to {MOST:.0f}", ""))) for row in found["crossings"]],
            "At this many GB/s of a NIC both steps are equally long; with more, ZeRO-3 is faster."),
        "freed.md": table(("ranks of `dp`", "`--reshard_after`", "step, s", "exposed over `dp`", "GiB"), [
            (row["where"], f"`{row['reshard_after']}`", f"{row['step_s']:.2f}", f"{100 * row['exposed'].get('dp', 0):.0f} %", f"{row['gib']:.1f}")
            for row in found["freed"]],
            f"`dp` {RANKS // STAGES} `pp` {STAGES} with ZeRO-3, {LAST} micro-batches, {SHIPPED} GB/s of a NIC; by "
            f"`--mesh_order {ORDERS['in a node']}` and `{ORDERS['across nodes']}`.")}


def _bold(ratio):
    return f"**{ratio:.2f}**" if ratio < 1 else f"{ratio:.2f}"
