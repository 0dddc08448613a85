"""Judge of ch07.ex6: the types of attention's tensors, by what --mesh_show types prints."""
import re

from tools.exercise.lab import NotYet
from tools.run import estimates

FLAGS = {"tp_size": 2, "cp_size": 2, "cp_method": "all_gather", "mesh_show": "types"}
# (name, how the program's row begins, words for a letter that is wrong along tp, and along cp)
ROWS = (("q_proj", r"forward +linear_forward +self_attn\.q_proj",
         "q_proj has other outputs on each rank of tp, so each has other heads",
         "a product with the same weight leaves the rows where they are"),
        ("all_gather", "forward +all_gather over cp", "a message over cp changes nothing along tp",
         "a gather makes other rows the same rows on every rank"),
        ("attention", "forward +attention_forward", "a rank of tp attends with its own heads alone",
         "the result has the rows of the queries, not those of the keys"),
        ("o_proj", r"forward +linear_forward +self_attn\.o_proj",
         "o_proj sums over inputs of which a rank of tp has a part",
         "a product with the same weight leaves the rows where they are"),
        ("all_reduce", "forward +all_reduce over tp", "an all-reduce makes terms of a sum the same on every rank",
         "a message over tp changes nothing along cp"),
        ("d_o_proj", r"backward +linear_backward_weight +self_attn\.o_proj",
         "both ranks of tp have the same rows, and the gradient is divided as o_proj is: by inputs",
         "a weight's gradient sums over rows of which a rank of cp has a part"),
        ("d_x", r"backward +linear_backward_input +self_attn\.q_proj",
         "backward through q_proj sums over outputs of which a rank of tp has a part",
         "the gradient of rows lies where the rows lie"),
        ("d_q_proj", r"backward +linear_backward_weight +self_attn\.q_proj",
         "both ranks of tp have the same rows, and the gradient is divided as q_proj is: by outputs",
         "a weight's gradient sums over rows of which a rank of cp has a part"),
        ("d_norm", "backward +rmsnorm_backward_weight +input_layernorm",
         "without sequence parallelism both ranks of tp have the same rows, and the whole gradient",
         "a weight's gradient sums over rows of which a rank of cp has a part"))


def read(answer):
    """{name: letters} of the reader's lines."""
    found, names = {}, [row[0] for row in ROWS]
    for line in answer.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        match = re.fullmatch(r"(\w+): ([A-Z0]) ([A-Z0])", line.strip())
        if not match or match[1] not in names:
            raise NotYet(f"this line is no type of the table: '{line.strip()}'", "a line is such as: q_proj: R T")
        found[match[1]] = (match[2], match[3])
    return found


def judge(answer, lab):
    """Lines for a right table; NotYet for the first letter that is wrong."""
    found = read(answer)
    typed = estimates.output_of([str(lab.program("ch07")), *estimates.words_of(FLAGS)])
    for name, begins, *words in ROWS:
        if name not in found:
            raise NotYet(f"a line is missing: {name}")
        made = re.search(rf"^{begins}.*?tp:(\w+) cp:(\w+)", typed, re.M).groups()
        for letter, right, axis, why in zip(found[name], made, ("tp", "cp"), words):
            if letter != right:
                raise NotYet(why, f"{name} along {axis}: not {letter}")
    return [f"as --mesh_show types says: {name} makes {' '.join(found[name])}" for name in ("o_proj", "d_q_proj")]
