"""Judge of ch08.ex3: four replays with the reader's numbers of a cluster, three of which the reader knows."""
from pathlib import Path

from tools.base import BookError
from tools.exercise import lab as labs

HERE = Path(__file__).parent
KEYS = ("matmul", "launch_us", "node.gbs")
FLAGS = "--nodes 1 --cp_size 1 --pp_size 1 --recompute none"
UNSEEN = "--model 1B --seq_len 2048 --plan 262144 --dp_size 2 --tp_size 4 --zero_stage 1 --micro_batch_size 2"
TRUE = {"matmul": 0.62, "launch_us": 30, "node.gbs": 150}
NEAR = 0.03


def judge(answer, lab):
    """Lines for numbers that explain all four; NotYet with the first step that they do not."""
    words = answer.split()
    try:
        given = {key: float(value) for key, value in zip(words[::2], words[1::2])}
    except ValueError:
        given = {}
    if tuple(given) != KEYS or len(words) != 6:
        raise BookError(f"{answer!r} is not three keys with their values; try \"matmul 0.75 launch_us 5 node.gbs 360\"", 2)
    mine, true = (lab.changed(HERE / "ex3_three_runs.json", **numbers) for numbers in (given, TRUE))
    rows = []
    for flags, measured in [*labs.rows_of(HERE / "ex3_three_runs.md"), (UNSEEN, step(lab, true, UNSEEN))]:
        found = step(lab, mine, flags)
        rows.append(f"measured {measured:8.4g} s   with your numbers {found:8.4g} s")
        if abs(found / measured - 1) > NEAR:
            seen = f"the step of run {len(rows)}" if flags != UNSEEN else "the step of the fourth run"
            raise labs.NotYet(f"{seen} would be {'shorter' if found < measured else 'longer'} than measured", rows[-1])
    return rows


def step(lab, cluster, flags):
    """Seconds."""
    words = flags.split()
    at = words.index("--plan")
    return lab.plan(cluster, words[at + 1], " ".join([*words[:at], *words[at + 2:], FLAGS]))["step_s"]
