"""Judge of ch05.ex5: the chapter's own table of ZB-H1, on its last rank."""
from tools.exercise import schedule_tables

RANKS, MICRO_BATCHES = 8, 32


def measure(lab):
    """The most W that wait on the last rank when one of its forward passes begins."""
    table = schedule_tables.named(lab, "zb_h1", RANKS, MICRO_BATCHES)
    return most_waiting(table.order(RANKS - 1))


def most_waiting(order):
    """Of a rank's actions: the most W whose B has run, where an F stands."""
    waiting, most = 0, 0
    for name in order:
        if name[0] == "F":
            most = max(most, waiting)
        waiting += {"B": 1, "W": -1}.get(name[0], 0)
    return most


def suspects(measured):
    """[(a wrong answer, its words)]"""
    return [
        (measured + 1, "the micro-batch of the forward pass itself is held, too: room for p is one "
                       "less for those that wait"),
        (0, "none has to run at once: no rank waits for the output of a W"),
        (1, "more than one may wait: rank 0 holds p micro-batches, and the last rank has as much "
            "memory"),
        (2 * measured, "this needs twice the memory: it is what ZB-H2 does"),
        (MICRO_BATCHES, "all of them may wait until the update, as far as the result is concerned: "
                        "what they hold meanwhile has no room"),
        (MICRO_BATCHES - 1, "all of them may wait until the update, as far as the result is "
                            "concerned: what they hold meanwhile has no room"),
        (RANKS // 2, "this is half of the room: the other ranks' micro-batches are held by the "
                     "other ranks")]
