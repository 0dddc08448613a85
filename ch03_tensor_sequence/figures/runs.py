"""Small runs of the chapter's trainer, and what the tables of its figures have in common."""
from tools.book.short_runs import run, table  # noqa: F401  (the figures call them so)

# A model that 2, 4 and 8 ranks can share; there are 2 kv heads, so from 4 ranks on they have copies.
SHAPE = {"num_heads": 8, "num_kv_heads": 2, "hidden_size": 64, "ffn_hidden_size": 192,
         "num_layers": 2, "seq_len": 32}
# Ways to divide a layer: flags beside --tp_size. The first is tensor parallelism alone.
WAYS = {"tensor": {}, "kept": {"sequence_parallel": None, "gathered_input": "kept"},
        "again": {"sequence_parallel": None}}
WAY_NAMES = {"tensor": "tensor parallelism", "kept": "sequence parallelism, `kept`",
             "again": "sequence parallelism, `again`"}
