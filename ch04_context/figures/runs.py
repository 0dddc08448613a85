"""Small runs of the chapter's trainer, and what the tables of its figures have in common."""
from tools.book.short_runs import (QUIET, look_into, run,  # noqa: F401  (the figures call them so)
                                   table)

# A model whose samples and heads 2, 4 and 8 ranks can share.
SHAPE = {"num_heads": 8, "num_kv_heads": 2, "hidden_size": 64, "ffn_hidden_size": 192,
         "num_layers": 2, "seq_len": 64}
# --cp_method, with the flags that belong to it; in the order of the tables.
METHODS = {"ring": {}, "all_gather": {}, "ulysses": {}, "ring_ulysses": {"ulysses_size": 2}}


def by_method(method):
    """The flags of a method."""
    return {"cp_method": method, **METHODS[method]}
