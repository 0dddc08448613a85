"""Products beside an all-reduce on this machine: the book's caveat, measured."""
import re

from tools.base import say
from tools.book.short_runs import table
from tools.book.showcase import output_of
from tools.run import build

EXAMPLE = "beside"  # prints what is read here
RANKS, ROUNDS = 2, 100
LINE = re.compile(r"^(\w.*?) {2,}([\d.e+-]+) +([\d.e+-]+) to ([\d.e+-]+)$", re.M)
RATE, TIME, BOTH = ("rate of products beside over alone", "time of the all-reduce beside over alone",
                    "both at once over one after the other")


def program(chapter):
    return build.binary(build.RELEASE, f"{chapter.name}_{EXAMPLE}")


def parse(text):
    """{link: {what: [median, a quarter below, a quarter above]}}, and the emulated link's GB/s."""
    own, emulated = text.split("an emulated link of ")
    found = {link: {what: [float(number) for number in numbers] for what, *numbers in LINE.findall(part)}
             for link, part in (("own", own), ("emulated", emulated))}
    return {**found, "gbs": float(emulated.split()[0])}


def measure(chapter):
    """Turns of products, of an all-reduce, and of both."""
    say("book: products beside an all-reduce")
    return {"rounds": ROUNDS, **parse(output_of(program(chapter), ["--rounds", str(ROUNDS)], RANKS))}


def ratio(numbers):
    """0.55 (0.51 to 0.60)"""
    return "{:.2f} ({:.2f} to {:.2f})".format(*numbers)


def beside_table(found):
    names = {"own": "its own", "emulated": "emulated"}
    return table(("link of this machine", "rate of products", "time of the all-reduce", "both at once"), [
        (name, *(ratio(found[link][what]) for what in (RATE, TIME, BOTH))) for link, name in names.items()],
        f"{RANKS} ranks on a core each; products of 256 x 256 in f32 beside an all-reduce of 64 MiB. Rates "
        "and times are those beside the other over those alone; `both at once` is over one after the other. The "
        "emulated link has an eighth of the "
        f"other's bandwidth, {found['gbs']:.2f} GB/s. Brackets have the middle half of {found['rounds']} rounds.")


def claims_table(found):
    median, _, upper = found["own"][RATE]
    return table(("", "the book", "expected", "found", "holds", "where"), [
        ("Q8.6", "communication takes some of what computes, so products beside it are slower", "three of four below 1",
         f"{median:.2f} of the rate alone", "yes" if upper < 1 else "no",
         "products beside an all-reduce, this machine's cores")])
