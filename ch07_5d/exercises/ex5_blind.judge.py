"""Judge of ch07.ex5: layouts of the reader's, proven with a program that has a mistake."""
import shlex

from tools.base import BookError
from tools.exercise.lab import NotYet

MISTAKE = "pipeline_mirrored_norms_apart"
LAYOUT = "--pp_size 4 --pp_schedule dualpipe --num_layers 8 --grad_acc_steps 8"  # in which it shows
GROUPS = {"dp_cp": "--dp_size 2", "tp": "--tp_size 2 --sequence_parallel",
          "tp_kv": "--tp_size 2 --num_kv_heads 1", "edp": "--dp_size 2 --num_experts 4",
          "embedding": "--pp_size 2 --grad_acc_steps 2 --tie_word_embeddings", "mirror": LAYOUT}


def judge(answer, lab):
    """Lines for the group; NotYet for another one, and for a question, with what the program says."""
    if answer.startswith("prove"):
        flags = answer[len("prove"):].strip()
        said = lab.prove("ch07", MISTAKE, shlex.split(flags))
        raise NotYet(f"{flags}: {'differs' if said else 'equal to one process, with the mistake, too'}", *said)
    if answer not in GROUPS:
        raise BookError(f"'{answer}' is neither a question, such as \"prove --tp_size 2\", nor one of the groups "
                        f"{', '.join(GROUPS)}", 2)
    said = lab.prove("ch07", MISTAKE, shlex.split(GROUPS[answer]))
    if not said:
        raise NotYet(f"a layout with copies over {answer} is equal to one process, with the mistake, too",
                     GROUPS[answer])
    return [f"{GROUPS[answer]}:", *said]


def settings():
    """What the course keeps, so that no test of it builds a program: tools/exercise/record.py."""
    return [{"mistake": MISTAKE, "flags": flags} for flags in GROUPS.values()]
