"""Rounds of a measurement: those that something else disturbed are measured again, and in no table."""
import statistics

from tools.base import say

FAR = 0.7  # of the median: a round that far from it was disturbed by something else
TRIES = 3  # to measure such rounds again
DISTURBED = "disturbed"  # in a table, in place of a number that it should not have


def is_far(value, middle):
    """Whether a round with this value was disturbed, where the median is `middle`."""
    return value < FAR * middle or FAR * value > middle


def with_range(middle, lowest, highest, to="–", form=".2f", unit=""):
    """A value with its lowest and its highest round, or that these were disturbed: as measured and as printed,
    since rounding alone may move a small number far."""
    texts = [f"{value:{form}}" for value in (middle, lowest, highest)]
    values = [float(text.replace(",", "")) for text in texts]
    if any(is_far(own, middle) and is_far(printed, values[0])
           for own, printed in zip((lowest, highest), values[1:])):
        return DISTURBED
    return f"{texts[0]}{unit} ({texts[1]}{to}{texts[2]})"


def median(values, form):
    """A median alone, or that rounds were disturbed."""
    values = list(values)
    middle = statistics.median(values)
    return DISTURBED if any(is_far(value, middle) for value in values) else f"{middle:{form}}"


def disturbed(rounds):
    """Numbers of the rounds, each {quantity: value}, of which any quantity is far from its median."""
    medians = {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}
    return [number for number, each in enumerate(rounds)
            if any(is_far(each[name], middle) for name, middle in medians.items())]


def measure_again(rounds, what, printed, measure):
    """Puts new rounds, measure() of them, in place of disturbed ones, as often as TRIES says. printed(round): the
    quantities that a table tells."""
    for _ in range(TRIES):
        numbers = disturbed([printed(each) for each in rounds])
        for number in numbers:
            say(f"book: {what}: round {number + 1} was disturbed, and is measured again")
            rounds[number] = measure()
        if not numbers:
            return
