"""Judge of ch07.ex2: the groups of a rank, by what --mesh_show json prints."""
import json
import re

from tools.exercise.lab import NotYet
from tools.run import estimates

FLAGS = {"dp_size": 2, "pp_size": 2, "cp_size": 2, "tp_size": 2, "sequence_parallel": None,
         "grad_acc_steps": 2, "num_experts": 4, "ep_size": 2, "expert_tp": None,
         "mesh_order": "dp,pp,cp,tp", "mesh_show": "json"}
RANK = 5
NAMES = ("tp", "cp", "pp", "dp", "dp_cp", "ep")
WORDS = {"tp": "tp is the fastest axis: its ranks are neighbors",
         "cp": "cp comes behind tp: two ranks of it are 2 apart",
         "pp": "pp comes behind tp and cp: two ranks of it are 4 apart",
         "dp": "dp is the slowest axis: two ranks of it are 8 apart",
         "dp_cp": "dp_cp has the ranks that differ in dp, in cp or in both",
         "ep": "with --expert_tp ep takes neighbors out of dp_cp"}


def read(answer):
    """{group: ranks} of the reader's lines."""
    found = {}
    for line in answer.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        match = re.fullmatch(r"(\w+): ([\d ,]+)", line.strip())
        if not match or match[1] not in NAMES:
            raise NotYet(f"this line is no group of the table: '{line.strip()}'", "a line is such as: tp: 0 1")
        found[match[1]] = [int(word) for word in re.findall(r"\d+", match[2])]
    return found


def judge(answer, lab):
    """Lines for a right table; NotYet for the first group that is wrong."""
    found = read(answer)
    layout = json.loads(estimates.output_of([str(lab.program("ch07")), *estimates.words_of(FLAGS)]))
    for name in NAMES:
        if name not in found:
            raise NotYet(f"a line is missing: {name}")
        kind = next(kind for kind in layout["groups"] if kind["name"] == name)
        own = next(group for group in kind["ranks"] if RANK in group)
        if found[name] != own:
            raise NotYet(WORDS[name], f"{name}: not {' '.join(map(str, found[name]))}")
    return [f"as --mesh_show json says; rank {RANK} lies at "
            + ", ".join(f"{axis} {place}" for axis, place in layout["ranks"][RANK].items())]
