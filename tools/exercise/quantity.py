"""Numbers with units, as a reader types them: "24 MB", "1.5 GiB", "33 %", "12"."""
import re

from tools.base import BookError

_DECIMAL = {"": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
_BYTES = {**{f"{prefix}B": factor for prefix, factor in {**_DECIMAL, **_BINARY}.items()},
          "bytes": 1, "byte": 1}
UNITS = {  # of a kind of quantity: {unit: how many of the smallest}
    "bytes": _BYTES,
    "seconds": {"s": 1, "ms": 1e-3, "us": 1e-6, "µs": 1e-6},
    "flops": {f"{prefix}FLOP": factor for prefix, factor in _DECIMAL.items()},
    "percent": {"%": 1, "percent": 1},
}
_NUMBER = re.compile(r"\s*([+-]?(?:\d[\d,_]*\.?\d*|\.\d+)(?:e[+-]?\d+)?)\s*(.*?)\s*", re.I)


def parse(text, kind):
    """The number, in the smallest unit of its kind. A kind without units, such as "messages", may
    be named behind the number. BookError (2) for what is no such number."""
    units = UNITS.get(kind, {"": 1, kind: 1, kind.rstrip("s"): 1})
    some = next(unit for unit in ("MB", "ms", "GFLOP", "%", kind) if unit in units)
    match = _NUMBER.fullmatch(text)
    if not match:
        raise BookError(f"{text!r} is no number of {kind}; try something like \"24 {some}\"", 2)
    number, unit = float(match[1].replace(",", "").replace("_", "")), match[2]
    exact = {name.lower(): factor for name, factor in units.items()}
    if unit.lower() not in exact:
        named = f"the unit {unit!r} is unknown" if unit else "it has no unit"
        raise BookError(f"{text!r}: {named}; units here: {', '.join(filter(None, units))}", 2)
    return number * units.get(unit, exact[unit.lower()])


def show(value, kind):
    """The number with the unit that makes it readable."""
    if kind == "bytes":
        for unit in ("TB", "GB", "MB", "kB"):
            if abs(value) >= _BYTES[unit]:
                return f"{value / _BYTES[unit]:.4g} {unit}"
        return f"{value:.0f} bytes"
    if kind == "seconds":
        return f"{value * 1e3:.4g} ms" if value < 1 else f"{value:.4g} s"
    if kind == "flops":
        for unit in ("TFLOP", "GFLOP", "MFLOP"):
            if abs(value) >= UNITS[kind][unit]:
                return f"{value / UNITS[kind][unit]:.4g} {unit}"
    return f"{value:.4g} {'%' if kind == 'percent' else kind}"
