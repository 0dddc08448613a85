"""Judge of ch01.ex1: the bytes that a dry run keeps."""

FLAGS = {"model": "small", "dtype": "bf16"}
BYTES = 18  # a parameter: 2 weight, 4 gradient, 4 master, 4 + 4 moments


def measure(lab):
    """Bytes of weights, gradients and optimizer states."""
    found = lab.estimate("ch01", **FLAGS)["simulated"]
    return found["weights"] + found["gradients"] + found["optimizer"]


def suspects(measured):
    """[(a wrong answer, its words)], by the bytes a parameter that it counts."""
    of_parameter = (
        (16, "gradients count as bf16: here backward writes and sums them in f32, 4 bytes"),
        (14, "one f32 copy is missing: the optimizer keeps a master weight and two moments"),
        (10, "one f32 copy of three is there: the optimizer keeps a master weight and two moments"),
        (12, "these are the optimizer states alone: weights and gradients come on top"),
        (6, "these are weights and gradients alone: the optimizer states are missing"),
        (2, "these are the weights alone"),
        (1, "this is half the weights: bf16 has 2 bytes"),
        (8, "everything counts as bf16: only the weights are"),
        (20, "gradients count twice, in bf16 and f32: here one buffer of f32 holds them"))
    return [(measured * size / BYTES, words) for size, words in of_parameter]
