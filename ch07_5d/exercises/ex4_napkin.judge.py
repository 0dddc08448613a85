"""Judge of ch07.ex4: what a rank in the middle of DeepSeek-V3's pipeline holds from step to step."""
from tools import chapters
from tools.run import estimates, recipes

EXPERT = 3 * 7168 * 2048
ATTENTION = 7168 * 1536 + 1536 * 128 * 192 + 7168 * 576 + 512 * 128 * 256 + 128 * 128 * 7168
# On which states do not depend, and the time of a dry run does.
SHORT = {"grad_acc_steps": 32}


def napkin(layers=8, experts=4, shared=1, attention=1, weight=6, dense_copies=128, expert_copies=2):
    """Bytes of states: weights and gradients of `weight` bytes, and a share of the optimizer's 12."""
    dense, own = layers * (attention * ATTENTION + shared * EXPERT), layers * experts * EXPERT
    return weight * (dense + own) + 12 * (dense / dense_copies + own / expert_copies)


def measure(lab):
    """Bytes of states of rank 1024."""
    flags = {**recipes.load(chapters.resolve("ch07"), "deepseek_v3").flags, **SHORT}
    found = estimates.read(lab.program("ch07"), {flag: None if value is True else value
                                                 for flag, value in flags.items()},
                           lambda found: found["distinct_ranks"])
    return next(each["states"] for each in found if each["rank"] == 1024)


def suspects(measured):
    """[(a wrong answer, its words)], as parts of the right one."""
    return [(measured * wrong / napkin(), words) for wrong, words in (
        (napkin(layers=4), "one stage: with dualpipe a rank has two, one for each direction"),
        (napkin(weight=4), "gradients are f32, four bytes, and not bf16"),
        (napkin(dense_copies=1, expert_copies=1), "the whole of the optimizer's states: ZeRO-1 divides them"),
        (napkin(expert_copies=128), "two ranks have the same expert, not 128: ep has divided dp by 64"),
        (napkin(shared=0), "four experts: the shared one is on every rank, too"),
        (napkin(attention=0), "experts alone: every rank has the attention of its layers, which ep does not divide"),
        (napkin(experts=256), "all 256 experts: a rank of ep has 256 / 64 of them"))]
