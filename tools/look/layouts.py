"""A layout's flags, as searches print them, read back."""

DEGREES = ("dp", "tp", "cp", "pp", "ep")


def values_of(flags):
    """{flag: value} of a layout's flags; a switch has the value True, a word stays one."""
    words = flags.split()
    return {word[2:]: True if after.startswith("--") else int(after) if after.isdigit() else after
            for word, after in zip(words, [*words[1:], "--"]) if word.startswith("--")}


def degrees_of(flags):
    """{"dp": 4, "tp": 1, ...}"""
    value = values_of(flags)
    return {name: value.get(f"{name}_size", 1) for name in DEGREES}


def stage_of(flags):
    """The stage of ZeRO, 0 without it. No other flag of a layout ends so."""
    return next((value for name, value in values_of(flags).items() if name.endswith("_stage")), 0)
