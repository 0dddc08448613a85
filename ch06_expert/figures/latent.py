"""What latent attention keeps of a position and computes, beside heads that share keys and values:
caches, operations, messages of ranks. Each by formula, and counted by the programs."""
import re

from tools.base import BookError, say
from tools.book.short_runs import run, table
from tools.book.showcase import output_of
from tools.run.estimates import words_of

from . import memory
from .memory import GIB, LATENT

EXAMPLE = "kv_cache"
BF16, F32 = 2, 4  # bytes of a number
POSITIONS = 131072
# Shapes of attention, by their authors; a cache knows of no experts.
DEEPSEEK = {"hidden_size": 7168, "num_layers": 61, "num_heads": 128, "ffn_hidden_size": 18432,
            "vocab_size": 129280}
MODELS = {"8B": {"hidden_size": 4096, "num_layers": 32, "num_heads": 32, "ffn_hidden_size": 14336,
                 "vocab_size": 128256},
          "70B": {"hidden_size": 8192, "num_layers": 80, "num_heads": 64, "ffn_hidden_size": 28672,
                  "vocab_size": 128256},
          "DeepSeek-V3": DEEPSEEK}
CHANNELS = 128  # of a head, in all of them
# {kind: {model: heads of keys and values}}; 0: latent.
KINDS = {"MHA": None, "GQA": 8, "MQA": 1, "MLA": 0}
# Operations: new tokens among so many positions, and where the two ways cost alike.
NEW, KEYS = (1, 16, 128, 256, 1024, 8192), 8192
CURVES = (1024, 8192, 131072)
CURVE_NEW = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
INTENSITY_KEYS = (4096, 8192)
CACHE_TP = (1, 2, 4, 8)
# A small model in DeepSeek-V3's proportions: 8 heads of keys and values, or a latent of 4 heads' width
# and half a head that is rotated.
SMALL = {"hidden_size": 128, "num_heads": 16, "ffn_hidden_size": 256, "seq_len": 64,
         "micro_batch_size": 8, "dp_size": 1, "vocab_size": 256}
SMALL_KINDS = {"GQA": {"num_kv_heads": 8}, "MLA, queries of x": {"attention_kind": "mla"},
               "MLA, queries of a latent": {"attention_kind": "mla", "q_lora_rank": 48}}
SMALL_LATENT = {"kv_lora_rank": 32, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
LAYERS, STEPS, RANKS = (2, 3), 2, 2
TP = {"": {}, " and `--sequence_parallel`": {"sequence_parallel": None}}
LINE = re.compile(r"^ *(.+?) {2,}(\d+) (bytes|operations|new tokens)$", re.M)


# --- formulas -------------------------------------------------------------------------------------


def heads_of(kind, shape):
    """Heads of keys and values."""
    return shape["num_heads"] if KINDS[kind] is None else KINDS[kind]


def cached_numbers(kind, shape, tp=1):
    """Of a position in a layer, on one rank: 2 G D, or C + rope, which tp does not divide."""
    if kind == "MLA":
        return LATENT["kv_lora_rank"] + LATENT["qk_rope_head_dim"]
    return 2 * max(1, heads_of(kind, shape) // tp) * CHANNELS


def cache_bytes(kind, shape, positions=POSITIONS, tp=1):
    return shape["num_layers"] * positions * cached_numbers(kind, shape, tp) * BF16


def widths(latent=None):
    """(C, nope, rope, V)"""
    own = latent or LATENT
    return tuple(own[name] for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim",
                                        "v_head_dim"))


def pairs(new, keys):
    """Of queries at the last positions and keys, those that the mask lets through."""
    return new * keys - new * (new - 1) // 2


def projections(new):
    """Operations of both ways: queries, latents, output."""
    c, nope, rope, v = widths()
    h, heads, q = DEEPSEEK["hidden_size"], DEEPSEEK["num_heads"], LATENT["q_lora_rank"]
    return 2 * new * (h * q + q * heads * (nope + rope) + h * (c + rope) + heads * v * h)


def absorbed(new, keys):
    """Operations of attention in the space of latents: into it and out of it for each new token,
    then each pair twice over C + rope."""
    c, nope, rope, v = widths()
    heads = DEEPSEEK["num_heads"]
    return (projections(new) + 2 * new * heads * c * (nope + v)
            + 4 * pairs(new, keys) * heads * (c + rope))


def expanded(new, keys):
    """Operations where keys and values are made of every position's latent: then each pair twice
    over nope + rope."""
    c, nope, rope, v = widths()
    heads = DEEPSEEK["num_heads"]
    return (projections(new) + 2 * keys * heads * c * (nope + v)
            + 4 * pairs(new, keys) * heads * (nope + rope))


def limit():
    """New tokens up to which the first is less, among very many positions."""
    c, nope, _, v = widths()
    return c * (nope + v) / (2 * (c - nope))


def small_widths(kind):
    """(numbers of a position that a ring carries, widths that enter the region of tp)."""
    h = SMALL["hidden_size"]
    if kind == "GQA":
        return 2 * SMALL_KINDS[kind]["num_kv_heads"] * h // SMALL["num_heads"], h
    c, _, rope, _ = widths(SMALL_LATENT)
    return c + rope, SMALL_KINDS[kind].get("q_lora_rank", h) + c + rope


def ring_bytes(kind, ranks=RANKS):
    """Of a layer and a step, sent by a rank: what the ring carries forward, again backward, and its
    gradient."""
    rows = SMALL["micro_batch_size"] * SMALL["seq_len"] // ranks
    return 3 * (ranks - 1) * rows * small_widths(kind)[0] * F32


def tp_bytes(kind, sequence_parallel, ranks=RANKS):
    """Of a layer and a step, sent by a rank: at entries and exits of its two regions."""
    h, inputs = SMALL["hidden_size"], small_widths(kind)[1]
    tokens = SMALL["micro_batch_size"] * SMALL["seq_len"]
    part = (ranks - 1) * F32 // ranks
    if not sequence_parallel:
        return 2 * part * tokens * (inputs + 3 * h)
    rope = 0 if kind == "GQA" else SMALL_LATENT["qk_rope_head_dim"]
    gathers = (inputs + h) + (inputs - rope + h) + 2 * h  # forward, again, the exits' gradients
    scatters = (inputs + h) + 2 * h
    return part * (tokens * (gathers + scatters) + 2 * (2 * h + replicated(kind)))


def replicated(kind):
    """Weights of a layer that every rank of tp has, beside the two norms: those before a latent."""
    if kind == "GQA":
        return 0
    c, _, rope, _ = widths(SMALL_LATENT)
    q, h = SMALL_KINDS[kind].get("q_lora_rank", 0), SMALL["hidden_size"]
    return h * (q + c + rope) + q + c


# --- counts ---------------------------------------------------------------------------------------


def example(program):
    """The program that counts."""
    return program.parent / f"{program.name}_{EXAMPLE}"


def say_of_cache(program, flags):
    """{what: number} as the example prints it."""
    found = {name: int(value) for name, value, _ in LINE.findall(
        output_of(example(program), words_of(flags)))}
    if "cache by formula" not in found:
        raise BookError(f"{EXAMPLE} says nothing of its cache")
    return found


def flags_of(kind, model):
    """Of attention of this kind in a model of this shape."""
    own = dict(MODELS[model])
    if kind != "MLA":
        return {**own, "num_kv_heads": heads_of(kind, own), "head_dim": CHANNELS}
    # Of 8B and 70B queries are made of x; a cache does not know.
    latent = {name: value for name, value in LATENT.items()
              if model == "DeepSeek-V3" or name != "q_lora_rank"}
    return {**own, **latent}


def outputs(program):
    """What the example says of 8B, of latents and then of its own heads: the lines of a page."""
    shown = ({"model": "8B", "seq_len": POSITIONS, "dtype": "bf16", **more}
             for more in ({"attention_kind": "mla"}, {}))
    return "".join("".join(text.splitlines(True)[:3]) for text in
                   (output_of(example(program), words_of(flags)) for flags in shown))


def count(program):
    """All of latent.json but the runs that train."""
    say("book: counting caches, operations and messages of latent attention")
    return {"caches": [{"model": model, "kind": kind, "bytes": _cache(program, model, kind)}
                       for model in MODELS for kind in KINDS],
            "over_tp": [{"kind": kind, "tp": tp,
                         "bytes": _cache(program, "DeepSeek-V3", kind, tp_size=tp)}
                        for kind in ("GQA", "MLA") for tp in CACHE_TP],
            "operations": [_operations(program, new, KEYS) for new in NEW],
            "curves": [_operations(program, new, keys) for keys in CURVES for new in CURVE_NEW],
            "crossover": [{"keys": keys, "new": _layer(program, "MLA", 1, keys)[
                "the first is less up to"]} for keys in CURVES],
            "intensity": [{"kind": kind, "operations": _rise(program, kind)} for kind in KINDS],
            "ring": [{"kind": kind, "sent": _sent(program, kind, "cp", cp_size=RANKS,
                                                  cp_method="ring")} for kind in SMALL_KINDS],
            "tp": [{"kind": kind, "flags": list(flags), "sent": _sent(
                program, kind, "tp", tp_size=RANKS, **flags)}
                   for flags in TP.values() for kind in SMALL_KINDS],
            "ledger": ledger(program)}


def ledger(program):
    """The names of the messages of a run over tp and cp."""
    return sorted(run(program, RANKS * RANKS, **SMALL, **SMALL_KINDS["MLA, queries of a latent"], **SMALL_LATENT,
                      tp_size=RANKS, sequence_parallel=None, cp_size=RANKS, cp_method="ring", dtype="f32",
                      num_layers=LAYERS[0], steps=STEPS)[1])


def _cache(program, model, kind, **more):
    found = say_of_cache(program, {**flags_of(kind, model), "dtype": "bf16",
                                   "seq_len": POSITIONS, **more})
    if found["cache in a dry run"] != found["cache by formula"]:
        raise BookError(f"{model}, {kind}: {found}")
    return found["cache in a dry run"]


def _layer(program, kind, new, keys):
    """Of one layer of DeepSeek-V3."""
    return say_of_cache(program, {**flags_of(kind, "DeepSeek-V3"), "num_layers": 1,
                                  "dtype": "bf16", "new_tokens": new, "seq_len": keys})


def _operations(program, new, keys):
    found = _layer(program, "MLA", new, keys)
    return {"new": new, "keys": keys, "absorbed": found["by the cache"],
            "expanded": found["by keys and values again"]}


def _rise(program, kind):
    """Operations that one more position in the cache costs a new token."""
    few, many = (_layer(program, kind, 1, keys)["by the cache"] for keys in INTENSITY_KEYS)
    return (many - few) / (INTENSITY_KEYS[1] - INTENSITY_KEYS[0])


def _sent(program, kind, over, **flags):
    """{operation: bytes} that rank 0 sends for a layer in a step, by the ledger: two runs that
    differ by one layer differ by it."""
    latent = SMALL_LATENT if kind != "GQA" else {}
    few, more = (run(program, RANKS, **SMALL, **SMALL_KINDS[kind], **latent, **flags, dtype="f32",
                     num_layers=layers, steps=STEPS)[1] for layers in LAYERS)
    return {name: (entry["wire_bytes"] - few[name]["wire_bytes"]) / STEPS
            for name, entry in more.items() if re.match(rf"{over}[._]", name)
            and not name.startswith("tp_kv")}


# --- tables ---------------------------------------------------------------------------------------


def find(found, **keys):
    return next(own for own in found if all(own[name] == value for name, value in keys.items()))


def problem_table(found):
    """What a position takes, and a long text."""
    rows = []
    for model, shape in MODELS.items():
        sizes = [find(found, model=model, kind=kind)["bytes"] for kind in KINDS]
        rows.append([model, str(shape["num_layers"]), str(shape["num_heads"]),
                     *(f"{size / POSITIONS / 1024:,.0f} ({size / GIB:,.1f})" for size in sizes)])
    return table(["", "layers", "heads", "each head its own", "8 heads", "1 head", "latent"], rows,
                 f"KiB of a position in all layers, in brackets GiB of {POSITIONS:,} positions, in bf16: by "
                 "dry runs, and the same by formula. Columns are heads of keys and values.")


def formula_table(found):
    """Numbers of a position in one layer, DeepSeek-V3."""
    names = {"MHA": ("each head its own, MHA", "`2 a h/a`"), "GQA": ("8 heads, GQA", "`2 a_kv h/a`"),
             "MQA": ("1 head, MQA", "`2 h/a`"), "MLA": ("latent, MLA", "`d_c + rope`")}
    rows = []
    for kind, (name, formula) in names.items():
        size = find(found, model="DeepSeek-V3", kind=kind)["bytes"]
        counted = size / (DEEPSEEK["num_layers"] * POSITIONS * BF16)
        rows.append([name, formula, f"{cached_numbers(kind, DEEPSEEK):,}", f"{counted:,.0f}"])
    return table(["keys and values", "formula", "its value", "counted"], rows,
                 f"Numbers of a position in a layer. `h/a` stands for the channels of a head. DeepSeek-V3's "
                 f"heads have {CHANNELS}, more than its `h` divided by its `a`, which is {DEEPSEEK['hidden_size'] // DEEPSEEK['num_heads']}.")


def parameters_table(problem):
    """DeepSeek-V3's beside the authors'."""
    case = next(name for name, (shape, _) in memory.PROBLEM.items() if shape is memory.DEEPSEEK)
    parameters = find(problem, case=case)["weights"] / BF16
    active = memory.active_parameters(memory.DEEPSEEK, parameters)
    embedding = memory.DEEPSEEK["vocab_size"] * memory.DEEPSEEK["hidden_size"]
    told = [str(number) for number in memory.PROBLEM[case][1]]
    rows = [[name, f"{number / 1e9:.2f}", theirs] for name, number, theirs in (
        ("all", parameters, told[0]), ("active", active, told[1]),
        ("active, without the embedding", active - embedding, told[1]))]
    return table(["DeepSeek-V3's parameters, billions", "here", "the authors'"], rows,
                 "By a dry run: the first page's flags. Of the embedding a token reads one row.")


def operations_table(found):
    """Both ways of a layer's attention."""
    rows = [[f"{own['new']:,}", *(f"{own[name] / 1e9:,.2f} ({way(own['new'], own['keys']) / 1e9:,.2f})"
                                 for name, way in (("absorbed", absorbed), ("expanded", expanded))),
             f"{own['absorbed'] / own['expanded']:.2f}"] for own in found]
    return table(["new tokens", "absorbed, GFLOP", "made again, GFLOP", "ratio"], rows,
                 f"Attention of one layer of DeepSeek-V3, for the last of {KEYS:,} positions; counted, in "
                 "brackets by formula. The last row is a prompt: no latent is older than the pass.")


def crossover_table(found):
    """Up to how many new tokens absorbing costs less."""
    rows = [[f"{own['keys']:,}", f"{own['new']:,}"] for own in found]
    return table(["positions", "absorbing is less up to, new tokens"], rows,
                 f"Counted by trying; by formula it tends to {limit():.1f} as positions grow.")


def intensity_table(found):
    """Operations for each byte of the cache."""
    rows = []
    for own in found:
        size = cached_numbers(own["kind"], DEEPSEEK) * BF16
        rows.append([own["kind"], f"{size:,}", f"{own['operations']:,.0f}",
                     f"{own['operations'] / size:,.0f}"])
    return table(["", "bytes of a position in a layer", "operations that it costs a new token",
                  "operations for a byte"], rows,
                 "DeepSeek-V3's heads, in bf16; counted as the difference that one more position makes.")


def over_tp_table(found):
    """The cache of a rank."""
    rows = [[str(tp), *(f"{find(found, kind=kind, tp=tp)['bytes'] / GIB:.2f}"
                        for kind in ("GQA", "MLA"))] for tp in CACHE_TP]
    return table(["`tp`", "8 heads of keys and values", "latent"], rows,
                 f"GiB of a rank's cache of {POSITIONS:,} positions, DeepSeek-V3's heads, bf16: by a dry "
                 "run.")


def tp_table(found):
    """What rank 0 sends over tp."""
    rows = []
    for kind in SMALL_KINDS:
        row = [kind, str(small_widths(kind)[1])]
        for flags in TP.values():
            own = find(found, kind=kind, flags=list(flags))
            row.append(f"{sum(own['sent'].values()):,.0f} ({tp_bytes(kind, bool(flags)):,.0f})")
        rows.append(row)
    return table(["", "channels that enter the region", *(f"`--tp_size {RANKS}`{more}" for more in TP)],
                 rows, f"Bytes that rank 0 sends over `tp` for a layer in a step, by the ledger; in brackets "
                 f"by formula. {SMALL['hidden_size']} channels, {SMALL['num_heads']} heads, "
                 f"{SMALL['micro_batch_size']} samples of {SMALL['seq_len']} positions, f32. Latents have "
                 f"{SMALL_LATENT['kv_lora_rank']} channels, latents of queries "
                 f"{SMALL_KINDS['MLA, queries of a latent']['q_lora_rank']}, and `rope` is "
                 f"{SMALL_LATENT['qk_rope_head_dim']}.")


def ring_table(found):
    """What rank 0 sends over cp."""
    rows = []
    for own in found:
        sent = sum(own["sent"].values())
        rows.append([own["kind"], str(small_widths(own["kind"])[0]), f"{sent:,.0f}",
                     f"{ring_bytes(own['kind']):,.0f}"])
    return table(["", "numbers of a position", "sent, bytes", "by formula"], rows,
                 f"What rank 0 sends over `cp` for a layer in a step, by the ledger; `--cp_size {RANKS} "
                 f"--cp_method ring`, {SMALL['seq_len']} positions, {SMALL['micro_batch_size']} samples, f32.")
