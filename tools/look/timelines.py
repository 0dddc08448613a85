"""What a timeline shows of a step, as numbers that are small enough to keep beside the figure.

  step, ms, circumstances
  ranks     waited    share of the step
            phases    [name, begin, end], in microseconds since the step began; [..., 1] of the
                      second of two that take turns
            waits     [begin, end, skew, exposed]: first for a later rank, at the end for messages
            messages  [begin, end, dimension, kind]
            freed     when gathered weights became fewer
  whole_ms  of a part of a step, which counts from its own begin: what the step took
"""
import json
from types import SimpleNamespace

from tools.look import trace as traces

GATHERED = "gathered weights"
PHASES = (traces.STEP, "forward", "backward", "optimizer")


def cut(recorded, step):
    """The record of one step of a trace."""
    shares = traces.steps(recorded)[step]
    begin, end = min(share.begin for share in shares), max(share.end for share in shares)

    def during(items):
        return [item for item in items if item.duration > 0 and item.begin < end
                and item.begin + item.duration > begin]

    def span(item):
        return [round(item.begin - begin), round(item.begin + item.duration - begin)]

    ranks = []
    for share, rank in zip(shares, recorded.ranks):
        gathered = [buffer for buffer in rank.buffers if buffer.name == GATHERED]
        ranks.append({
            "waited": round((share.exposed + share.skew) / max(share.end - share.begin, 1e-9), 4),
            "phases": [[item.name, *span(item), *([item.turn] if item.turn else [])]
                       for item in during(rank.work)
                       if item.category == "phase" and item.name in PHASES],
            "waits": [[*span(item), round(item.skew), round(item.exposed)]
                      for item in during(rank.stalls)],
            "messages": [[*span(item), item.dimension, item.kind]
                         for item in during(rank.communications)],
            "freed": [round(after.time - begin) for before, after in zip(gathered, gathered[1:])
                      if after.bytes < before.bytes and begin <= after.time < end]})
    return {"step": step, "ms": round((end - begin) / 1000, 3),
            "circumstances": traces.circumstances(recorded), "ranks": ranks}


def part(record, begin, duration):
    """The record of a part of a step, from a moment on for so long, in microseconds."""
    def during(items):
        return [[item[0] - begin, item[1] - begin, *item[2:]] for item in items
                if item[0] < begin + duration and item[1] > begin]

    ranks = [{**rank, "phases": [[name, *span] for *span, name in during(
        [[*span, name] for name, *span in rank["phases"]])],
              "waits": during(rank["waits"]), "messages": during(rank["messages"]),
              "freed": [time - begin for time in rank["freed"] if begin <= time < begin + duration]}
             for rank in record["ranks"]]
    return {**record, "ms": duration / 1000, "whole_ms": record["ms"], "ranks": ranks}


def text(record):
    """A file of several steps, {..., "ways": [record]}: a line for each."""
    head = json.dumps({key: value for key, value in record.items() if key != "ways"}, indent=1)
    ways = ",\n".join(json.dumps(way, separators=(",", ":")) for way in record["ways"])
    return f'{head.rstrip()[:-1].rstrip()},\n "ways": [\n{ways}\n ]\n}}\n'


def ranks_of(record):
    """The ranks of a record, with what the plots of traces read of a rank."""
    return [traces.Rank(
        spans=[SimpleNamespace(name=name, category="phase", begin=begin, duration=end - begin,
                               turn=turn[0] if turn else 0)
               for name, begin, end, *turn in rank["phases"]],
        waits=[SimpleNamespace(begin=begin, duration=end - begin, skew=skew, exposed=exposed)
               for begin, end, skew, exposed in rank["waits"]],
        communications=[SimpleNamespace(begin=begin, duration=end - begin, dimension=dimension,
                                        kind=kind)
                        for begin, end, dimension, kind in rank["messages"]],
        buffers=[SimpleNamespace(name=GATHERED, time=time, bytes=size)
                 for number, time in enumerate(rank["freed"])
                 for size in (2, 1)])
        for rank in record["ranks"]]
