"""What a step of 1B should take on one H100, part by part: on paper, since no card was at hand.

Work is counted here from the model's shape. tests/course/test_gpu.py holds operations against the accountant,
elementwise bytes against small runs, and the sum against the page of predictions. Rates of the reference kernels are
those by which the program chooses attention.
"""
import re

from tools.base import ROOT
from tools.book.short_runs import table
from tools.run import gpu

SHAPE = {"layers": 16, "hidden": 2048, "heads": 32, "kv_heads": 8, "head": 64, "ffn": 8192, "vocabulary": 128256}  # 1B
TOKENS, BF16, F32 = 4096, 2, 4  # of one sample; bytes
CHOICE = ROOT / "common/run/attention_choice.cpp"
FLASH, PRODUCTS, OF_SHEET = 350e12, 700e12, 0.9  # hopes: FLOP/s on tensor cores; of the data sheet's bandwidth
OF_A_PARAMETER = 30 + 4  # bytes: AdamW's; the gradient once more for its squares
LAUNCHES = {"reference": (30, 18), "fused": (30, 19)}  # of a layer, and of the rest, without the optimizer's
TENSORS = (9, 3)  # the same of parameters
FEWEST = 16  # launches of a layer with every fusion
CHUNKS, OF_A_CHUNK = 8, 6  # of the fused head: at its 512 rows; launches
SQUARED = 32  # parameters whose squares fused kernels sum in one pass, of two launches
NOT_MEASURED = "not measured"


def rates():
    """{name: value}: FLOP/s of blockwise attention and of products, bytes/s, seconds of a launch and of a score."""
    text = CHOICE.read_text(encoding="utf-8")

    def found(pattern):
        return float(re.search(pattern, text)[1])
    return {"blockwise": found(r"\? 6\.85e12 : (\S+);"), "products": found(r"DType::bf16 \? (\S+) :"),
            "memory": found(r"kBytesASecond = (\S+);"), "launch": found(r"kLaunchSeconds = (\S+);"),
            "score": found(r"kSoftmaxSeconds = (\S+);")}


def attention_flops():
    """Of forward's two products below the causal mask."""
    return SHAPE["layers"] * 2 * TOKENS * (TOKENS + 1) * SHAPE["heads"] * SHAPE["head"]


def weights():
    """Of the products, with the head's; the embedding has as many as the head."""
    s = SHAPE
    layer = s["hidden"] * ((2 * s["heads"] + 2 * s["kv_heads"]) * s["head"] + 3 * s["ffn"])
    return s["layers"] * layer + s["hidden"] * s["vocabulary"]


def product_flops():
    return 6 * TOKENS * weights()


def elementwise_bytes(which, s, tokens):
    """Of all layers: SwiGLU forward and backward, norms, the residual, RoPE both ways; and the norm before the head."""
    of_ffn, of_hidden, of_rope = {
        "reference": (3 + 5, 2 * 8 + 2 * 3, 4),
        "fused": (3 + 5 + 3, 2 * 8 + 2 * 1, 4),      # the product of SwiGLU again; the residual is read alone
        "best": (1 + 2, 2 * 8 + 2 * 1, 0)}[which]    # SwiGLU and RoPE behind the products that they follow
    layer = of_ffn * s["ffn"] + of_hidden * s["hidden"] + of_rope * (s["heads"] + s["kv_heads"]) * s["head"]
    return tokens * BF16 * (s["layers"] * layer + 7 * s["hidden"])


def launches(which, layers, chunks):
    """Of a step in bf16 on one GPU. tests/parity/test_device_ranks.py counts them on an emulated one."""
    (of_layer, of_rest), (tensors, others) = LAUNCHES[which], TENSORS
    found, parameters = of_layer * layers + of_rest, tensors * layers + others
    if which == "reference":
        return found + 3 * parameters
    passes = -(-parameters // SQUARED)
    return found + 2 * passes + (layers + 2) + OF_A_CHUNK * (chunks - 1)  # AdamW: a unit in one launch


def parts():
    """[(part, seconds by reference kernels, by fused ones, with every fusion, whether fused kernels have it)]"""
    s, rate = SHAPE, rates()
    best = OF_SHEET * gpu.data_sheet("H100 SXM")["memory"] * 1e9
    head = s["hidden"] * s["vocabulary"]
    again = 2 * TOKENS * head  # the fused head's product
    optimizer = OF_A_PARAMETER * (weights() + head)
    embedding = head * F32 + TOKENS * s["hidden"] * (BF16 + F32)
    logits = TOKENS * s["vocabulary"]
    loss = 3 * BF16 * logits / rate["memory"] + logits * rate["score"]
    return [
        ("attention, backward", 3.5 * attention_flops() / rate["blockwise"], 3.5 * attention_flops() / FLASH,
         2.5 * attention_flops() / FLASH, "yes, by seven products instead of five"),
        ("attention, forward", attention_flops() / rate["blockwise"], attention_flops() / FLASH,
         attention_flops() / FLASH, "yes"),
        ("matrix products", product_flops() / rate["products"], (product_flops() + again) / rate["products"],
         product_flops() / PRODUCTS, "no: one library for both, and the head's logits once more"),
        ("AdamW, squares of gradients", optimizer / rate["memory"], optimizer / rate["memory"], optimizer / best,
         "its launches; the bytes are the same"),
        ("elementwise", *(elementwise_bytes(which, s, TOKENS) / speed for which, speed in (
            ("reference", rate["memory"]), ("fused", rate["memory"]), ("best", best))), "the residual; SwiGLU's product is made again, which saves memory"),
        ("embedding, backward", embedding / rate["memory"], embedding / rate["memory"], embedding / best,
         "in both: a warp reads the tokens of its row"),
        ("cross entropy", loss, loss, 3 * BF16 * logits / best, "its memory"),
        ("launches", *(count * rate["launch"] for count in (
            launches("reference", s["layers"], 1), launches("fused", s["layers"], CHUNKS), FEWEST * s["layers"])),
         "the optimizer's and the residual's")]


def expected_table():
    rows = [(part, *(f"{1e3 * value:.1f}" for value in seconds), has, NOT_MEASURED)
            for part, *seconds, has in parts()]
    sums = [sum(each[i] for each in parts()) for i in (1, 2, 3)]
    rows += [("sum", *(f"{1e3 * value:.0f}" for value in sums), "", NOT_MEASURED),
             ("tokens a second", *(f"{TOKENS / value:,.0f}" for value in sums), "", NOT_MEASURED)]
    return table(("part of a step", "`reference`, predicted, ms", "`fused`, predicted, ms", "with every fusion, ms",
                  "`--kernels fused` has it", "measured"), rows,
                 "1B, one sample of 4,096 tokens a step in bf16 on one H100 SXM, `--attention blockwise`. Nothing is measured. "
                 f"Launches: {launches('reference', SHAPE['layers'], 1)}, and fused {launches('fused', SHAPE['layers'], CHUNKS)}; "
                 "a test counts those of smaller models on an emulated GPU.")


def tables():
    return {"expected.md": expected_table()}
