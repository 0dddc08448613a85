"""Random small mistakes in the solution of an exercise, which its judge must not let pass."""
import itertools
import random
import re

from tools.exercise import exercises

# What stands in a line of code, and what takes its place. Each leaves most code compilable.
SWAPS = ((r"(?<![+\-*/<>=!&|(,]) \+ ", " - "), (r"(?<![+\-*/<>=!&|(,]) - ", " + "),
         (r" \* ", " + "), (r" / ", " * "), (r" % ", " / "), (r" < ", " <= "), (r" <= ", " < "),
         (r" > ", " >= "), (r" >= ", " > "), (r" == ", " != "), (r" \+= ", " = "),
         (r" \+= ", " -= "), (r" -= ", " += "), (r"\bmin\b", "max"), (r"\bmax\b", "min"),
         (r"\bnext\b", "previous"), (r"\bprevious\b", "next"), (r"(?<=\.)begin\b(?!\()", "end"),
         (r"(?<=\.)end\b(?!\()", "begin"), (r"\btrue\b", "false"), (r"\bfalse\b", "true"))
NUMBER = re.compile(r"(?<![\w.])(\d+)(?![\w.])")
STATEMENT = re.compile(
    r"^ *(?!return|for|while|if|const|\}|//|[\w:<>]+ \w+ =)[\w.:>-]+[^\n{}]*;\n", re.M)


def places(hole):
    """[(begin, end, what takes its place)]: every single mistake that can be made in the code."""
    code = re.sub(r"//[^\n]*", lambda match: " " * len(match[0]), hole)
    found = [(match.start(), match.end(), new)
             for pattern, new in SWAPS for match in re.finditer(pattern, code)]
    found += [(match.start(), match.end(), str(int(match[1]) + 1))
              for match in NUMBER.finditer(code)]
    found += [(match.start(), match.end(), "\n") for match in STATEMENT.finditer(code)]
    return sorted(set(found))


def of(solution, name, count):
    """[(mutant_K, text)]: `count` solutions with one mistake each, or two where single ones run
    out; fewer of a short one, which has no more. The same ones every time."""
    hole = exercises.HOLE.search(solution)
    begin, end = hole.start(), hole.end()
    code = solution[begin:end]
    chosen = places(code)
    draw = random.Random(name)
    draw.shuffle(chosen)
    plans = [(place,) for place in chosen]
    pairs = sum(one[1] <= other[0] for one, other in itertools.combinations(sorted(chosen), 2))
    while len(plans) < min(count, len(chosen) + pairs):
        one, other = sorted(draw.sample(chosen, 2))
        if one[1] <= other[0] and (one, other) not in plans:
            plans.append((one, other))
    return [(f"mutant_{index}", solution[:begin] + mutated(code, plan) + solution[end:])
            for index, plan in enumerate(plans[:count])]


def mutated(code, plan):
    for start, stop, new in sorted(plan, reverse=True):
        code = code[:start] + new + code[stop:]
    return code
