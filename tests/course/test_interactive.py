"""The interactive pages: their numbers are the programs' own, and a browser shows them well.

    python3 tests/course/test_interactive.py --bin build/release/bin

Their scripts run in a headless Chromium; where there is none, Node.js computes, and nothing is
looked at. With neither the test is skipped.
"""
import argparse
import itertools
import json
import random
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]

import chromium  # noqa: E402  (the path comes first)
from tools import chapters  # noqa: E402
from tools.interactive import interactive  # noqa: E402
from tools.look import mesh, trace  # noqa: E402
from tools.run.estimates import words_of  # noqa: E402

BIN = None  # folder of the programs
PAGES = (interactive.MEMORY, interactive.TIMELINE)
LOOKED_AT = (*PAGES, mesh.PAGE)
WIDTHS = (390, 768, 1280)
SCHEMES = ("light", "dark")
SETTINGS = 50
AA, AA_LARGE = 4.5, 3.0  # WCAG 2: contrast of text, and of text from 24 pixels on
PURE = {interactive.MEMORY: "// --- the form", interactive.TIMELINE: "// --- what is drawn"}
GIB = 2**30
METHODS = ("ring", "all_gather", "ulysses", "ring_ulysses")
WITHOUT = {"cp_size": 1, "cp_method": "ring", "cp_layout": "zigzag", "ulysses_size": 1,
           "cp_recompute": "exchange"}  # context parallelism
ALONE = {"pp_size": 1, "pp_schedule": "1f1b", "pp_chunks": 1}  # without a pipeline
SCHEDULES = ("1f1b", "afab", "interleaved", "zb_h1", "zb_h2")
CONTEXTS = (  # method, ranks of cp, and those of them that exchange heads
    ("ring", 2, 1), ("all_gather", 2, 1), ("ulysses", 2, 2), ("ring_ulysses", 4, 2),
    ("ring", 3, 1), ("all_gather", 3, 1), ("ulysses", 3, 3), ("ring_ulysses", 8, 2),
    ("ring", 4, 1), ("all_gather", 8, 1), ("ulysses", 4, 4), ("ring_ulysses", 6, 2),
    ("ring", 8, 1), ("ulysses", 8, 8), ("ring_ulysses", 12, 3), ("ring_ulysses", 8, 4),
    ("ring", 5, 1), ("ulysses", 6, 6), ("ring_ulysses", 4, 4), ("ring_ulysses", 2, 1),
    ("ring_ulysses", 12, 2))
BROWSER = None  # a chromium.Page, where there is a Chromium


# --- where scripts run ----------------------------------------------------------------------------


def setUpModule():
    global BROWSER
    if not chromium.why_not():
        BROWSER = chromium.Page(chromium.find())
        BROWSER.call("Emulation.setFocusEmulationEnabled", enabled=True)  # as of a tab in front


def tearDownModule():
    if BROWSER:
        BROWSER.close()


def opened(page, width=1280, scheme="light"):
    """The browser with a page from its folder, at a width, in light or dark."""
    BROWSER.size(width)
    BROWSER.scheme(scheme)
    BROWSER.open(page.as_uri())
    return BROWSER


# The memory page with every control that this Llama's count has.
WHOLE = {"recompute": "full", "tp_size": "2", "cp_size": "4", "cp_method": "ring_ulysses",
         "pp_size": "2", "pp_schedule": "interleaved", "grad_acc_steps": "2"}


def whole(page, width=1280, scheme="light"):
    """The same page with all that it can show."""
    browser = opened(page, width, scheme)
    if page == interactive.MEMORY:
        browser.run("form.elements.sequence_parallel.click()")
        browser.run(f"for (const [name, value] of Object.entries({json.dumps(WHOLE)})) "
                    "form.elements[name].value = value; show()")
    return browser


def evaluate(page, expression):
    """The value of an expression of JSON, with what the page's script defines."""
    if BROWSER:
        result = opened(page).run(expression)
        if BROWSER.errors:
            raise AssertionError("\n".join(BROWSER.errors))
        return json.loads(result)
    script = re.search(r"<script>\n(.*?)</script>", page.read_text(encoding="utf-8"), re.S)[1]
    blocks = {name: interactive.block(page, name) for name in
              re.findall(r'application/json" id="(\w+)"', page.read_text(encoding="utf-8"))}
    program = (f"const document = {{getElementById: (id) => ({{textContent: "
               f"({json.dumps(blocks)})[id]}})}};\n{script.partition(PURE[page])[0]}\n"
               f"process.stdout.write({expression});")
    done = subprocess.run(["node", "-"], input=program, encoding="utf-8", timeout=60, check=True,
                          stdout=subprocess.PIPE)
    return json.loads(done.stdout)


# --- the memory page ------------------------------------------------------------------------------


def random_context(draw, number):
    """Context parallelism of a setting: cp_size, the ranks u that exchange heads, and the flags."""
    method, cp, u = CONTEXTS[number % len(CONTEXTS)]
    return cp, u, {"cp_size": cp, "cp_method": method,
                   "cp_layout": draw.choice(("zigzag", "zigzag", "contiguous")),
                   "ulysses_size": u if method == "ring_ulysses" else 1,
                   "cp_recompute": draw.choice(("exchange", "keep"))}


def random_pipeline(draw, number):
    """Flags of a setting's pipeline, its micro-batches, and the layers that it needs."""
    p, schedule = draw.choice((2, 2, 3, 4, 5)), SCHEDULES[number % len(SCHEDULES)]
    looping = schedule == "interleaved"
    chunks = draw.choice((2, 2, 3)) if looping else 1
    return ({"pp_size": p, "pp_schedule": schedule, "pp_chunks": chunks,
             "grad_acc_steps": p * draw.randint(1, 3) if looping else draw.randint(1, 3 * p)},
            p * chunks)


def random_settings(count, context=False, pipeline=False):
    """Settings of the page: small shapes with odd sizes, and some of the presets; with context
    parallelism, with a pipeline, or without."""
    draw = random.Random(16 * context + 3 * pipeline or 7)
    for number in range(count):
        tp, dtype = draw.choice((1, 1, 2, 3, 4)), draw.choice(("bf16", "bf16", "f32", "f64"))
        cp, u, flags = random_context(draw, number) if context else (1, 1, WITHOUT)
        pieces = cp * 2 if cp > 1 and flags["cp_layout"] == "zigzag" else cp
        kv = draw.choice([heads for heads in range(1, 13)
                          if (heads % tp == 0 or tp % heads == 0)
                          and (max(1, heads // tp) % u == 0 or u % max(1, heads // tp) == 0)])
        heads = max(kv, tp) * draw.randint(1, 3) * u  # of which kv, tp and tp u are divisors
        chosen = {"hidden_size": heads * 2 * draw.randint(1, 40), "num_layers": draw.randint(1, 6),
                  "num_heads": heads, "num_kv_heads": kv,
                  "ffn_hidden_size": tp * draw.randint(1, 200),
                  "vocab_size": draw.randint(256, 4000),
                  "seq_len": tp * pieces * draw.randint(1, 100),
                  "micro_batch_size": draw.randint(1, 6)}
        if number % 5 == 0 and u in (1, 2, 4, 8):
            name, tp = draw.choice(("1B", "8B", "70B", "405B")), draw.choice((1, 2, 8, 16))
            sizes = {"1B": (2048, 16, 32, 8, 8192), "8B": (4096, 32, 32, 8, 14336),
                     "70B": (8192, 80, 64, 8, 28672), "405B": (16384, 126, 128, 8, 53248)}[name]
            tp = min(tp, sizes[2] // u)
            chosen = dict(zip(chosen, (*sizes, 128256,
                                       draw.choice((1024, 4096, 8192)) * pieces, 1)))
        stages = {**ALONE, "grad_acc_steps": draw.randint(1, 3)}
        if pipeline:
            stages, least = random_pipeline(draw, number)
            chosen["num_layers"] = max(chosen["num_layers"], least + draw.randint(0, 3))
        yield {**chosen, **stages, "dtype": dtype,
               "grad_accumulation": draw.choice(("f32", "bf16", "both")) if dtype == "bf16"
               else "f32",
               "attention": draw.choice(("naive", "blockwise")),
               "recompute": draw.choice(("none", "selective", "full")),
               "dp_size": draw.choice((1, 1, 2, 3, 4, 7, 8, 64)),
               "zero_stage": draw.choice((0, 0, 1, 2, 3)), "tp_size": tp,
               "sequence_parallel": tp > 1 and draw.random() < 0.6,
               "gathered_input": draw.choice(("again", "kept")), **flags,
               "tie_word_embeddings": draw.random() < 0.3}


# The first chapter that has the flag, where the setting is not the one without it.
CHAPTERS = {"dp_size": ("ch02_data_parallel", 1), "zero_stage": ("ch02_data_parallel", 0),
            "tp_size": ("ch03_tensor_sequence", 1),
            "sequence_parallel": ("ch03_tensor_sequence", False),
            "cp_size": ("ch04_context", 1), "pp_size": ("ch05_pipeline", 1)}


def command_of(settings):
    """The words for --estimate: the first program that knows all of the settings, and its flags."""
    needed = {name: chapter for name, (chapter, without) in CHAPTERS.items()
              if settings[name] != without}
    if {"tp_size", "cp_size", "pp_size", "zero_stage"} & set(needed):
        needed.setdefault("dp_size", "ch02_data_parallel")  # else: all ranks of one
    flags = {name: value for name, value in settings.items()
             if name not in (*CHAPTERS, *WITHOUT, *ALONE, "gathered_input", "model")
             and not isinstance(value, bool)}
    flags.update((name, None if settings[name] is True else settings[name]) for name in needed)
    if settings["sequence_parallel"]:
        flags["gathered_input"] = settings["gathered_input"]
    if settings["cp_size"] > 1:
        flags["cp_method"], flags["cp_layout"] = settings["cp_method"], settings["cp_layout"]
        if settings["cp_method"] == "ring_ulysses":
            flags["ulysses_size"] = settings["ulysses_size"]
        if settings["recompute"] == "full" and settings["attention"] == "blockwise":
            flags["cp_recompute"] = settings["cp_recompute"]
    if settings["pp_size"] > 1:
        flags["pp_schedule"] = settings["pp_schedule"]
        if settings["pp_chunks"] > 1:
            flags["pp_chunks"] = settings["pp_chunks"]
    if settings["tie_word_embeddings"]:
        flags["tie_word_embeddings"] = None
    return [BIN / max(needed.values(), default="ch01_single_gpu"), "--estimate", *words_of(flags)]


def ask(settings):
    """What --estimate says of the settings."""
    with tempfile.TemporaryDirectory(prefix="book_estimate_") as scratch:
        path, command = Path(scratch) / "estimate.json", command_of(settings)
        done = subprocess.run([*command, "--estimate_file", path], stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, encoding="utf-8", check=False)
        if done.returncode:
            raise AssertionError(f"{command}: {done.stdout}")
        return json.loads(path.read_text(encoding="utf-8"))


def expected(settings, found):
    """The estimate in the page's words."""
    layers, rows = settings["num_layers"], {}
    for entry in found["activations"]:
        block = {-1: "batch", 0: "embedding", layers + 1: "head"}.get(entry["layer"], "layer")
        rows.setdefault(f"{block}/{entry['name']}", set()).add(entry["predicted"])
    return {**{name: found["predicted"][name] for name in ("weights", "gradients", "optimizer")},
            "activations": found["predicted"]["activations"],
            # Of the dry run, against which the program's tests hold the formula.
            "peak_activations": found["simulated"]["peak_activations"],
            "saved": {name: list(sizes) for name, sizes in rows.items()},
            "buffers": {entry["name"]: entry["predicted"] for entry in found["buffers"]}}


# estimate() with its whole numbers as text: JSON has none so large
OURS = """JSON.stringify(CASES.map((c) => {
  const found = estimate(c), saved = {};
  for (const row of found.saved) saved[row.block + "/" + row.name] = [row.bytes];
  delete found.parameters;  // a rank's; the program prints those of the model
  return {...found, saved, activations: sum(found.saved.map((row) => row.bytes * row.times))};
}), (_, value) => typeof value === "bigint" ? String(value) : value)"""


class Memory(unittest.TestCase):
    def test_the_table_is_what_the_accountant_says(self):
        told = interactive.table_text(BIN)
        with_lessons = [chapter for chapter in chapters.find_chapters() if not chapter.is_begun]
        told = told.replace(chapters.find_chapters()[-1].name, with_lessons[-1].name)  # its copy
        self.assertEqual(interactive.block(interactive.MEMORY, "table"), told,
                         "run python3 tools/interactive/interactive.py --bin build/release/bin")

    def check(self, cases):
        """The page's numbers, which are those of the programs; and the programs' names."""
        computed = evaluate(interactive.MEMORY, OURS.replace("CASES", json.dumps(cases)))
        self.assertEqual(len(computed), SETTINGS)
        with ThreadPoolExecutor(2) as pool:
            told = pool.map(ask, cases)
            for settings, result, estimate in zip(cases, computed, told):
                with self.subTest(settings=settings):
                    wanted = json.loads(json.dumps(expected(settings, estimate)), parse_int=str)
                    self.assertEqual(result, wanted)
        return computed, {command_of(settings)[0].name for settings in cases}

    def test_fifty_settings_to_the_byte(self):
        cases = list(random_settings(SETTINGS))
        computed, programs = self.check(cases)
        self.assertGreaterEqual(len({(settings["zero_stage"], settings["grad_accumulation"])
                                     for settings in cases}), 10)
        self.assertEqual(len({name for result in computed for name in result["buffers"]}), 4)
        self.assertEqual(len(programs), 3)

    def test_fifty_settings_with_context_parallelism_to_the_byte(self):
        cases = list(random_settings(SETTINGS, context=True))
        _, programs = self.check(cases)
        self.assertEqual(programs, {"ch04_context"})
        for name, least in (("cp_method", 4), ("cp_layout", 2), ("zero_stage", 4), ("tp_size", 4)):
            self.assertGreaterEqual(len({settings[name] for settings in cases}), least, name)
        # Heads of which ranks have copies, and rings of every length, where heads are exchanged
        # too, and where probabilities are kept.
        seen = set()
        for case in cases:
            groups = {"ulysses": case["cp_size"], "ring_ulysses": case["ulysses_size"]}
            u = groups.get(case["cp_method"], 1)
            kept = case["attention"] == "naive" and case["recompute"] != "selective"
            seen.add((u > max(1, case["num_kv_heads"] // case["tp_size"]), ""))
            seen.add((min(4, case["cp_size"] // u), "by head" if u > 1 else "", kept))
        self.assertLessEqual({(True, ""), *itertools.product(range(2, 5), ("",), (False, True)),
                              *itertools.product(range(1, 5), ("by head",), (False, True))}, seen)
        self.assertGreater(sum(command_of(case).count("--cp_recompute") for case in cases), 2)

    def test_fifty_settings_with_pipelines_to_the_byte(self):
        cases = list(random_settings(SETTINGS, pipeline=True))
        cases[::4] = [{**with_context, **{name: case[name] for name in (*ALONE, "grad_acc_steps")},
                       "num_layers": max(case["num_layers"], with_context["num_layers"])}
                      for case, with_context in zip(cases[::4], random_settings(SETTINGS, True))]
        _, programs = self.check(cases)
        self.assertEqual(programs, {"ch05_pipeline"})
        self.assertEqual({case["pp_schedule"] for case in cases}, set(SCHEDULES))
        for name, least in (("zero_stage", 4), ("tp_size", 4), ("cp_method", 4), ("recompute", 3),
                            ("tie_word_embeddings", 2)):
            self.assertGreaterEqual(len({case[name] for case in cases}), least, name)

    def test_the_presets_are_the_programs(self):
        presets = evaluate(interactive.MEMORY, "JSON.stringify({SHAPE, PRESETS})")
        for name, sizes in presets["PRESETS"].items():
            with tempfile.TemporaryDirectory(prefix="book_estimate_") as scratch:
                path = Path(scratch) / "estimate.json"
                subprocess.run([BIN / "ch01_single_gpu", "--estimate", "--model", name,
                                "--estimate_file", path], stdout=subprocess.DEVNULL, check=True)
                config = json.loads(path.read_text(encoding="utf-8"))["config"]
            self.assertEqual(sizes, [config[size] for size in presets["SHAPE"]], name)

    @unittest.skipIf(chromium.why_not(), chromium.why_not())
    def test_the_command_that_the_page_shows_gives_its_numbers(self):
        cases = [{**settings, "model": "own"} for settings in
                 (*random_settings(4), *random_settings(5, context=True),
                  *random_settings(5, pipeline=True))]
        shown = evaluate(interactive.MEMORY, "JSON.stringify({newest: TABLE.chapter, commands: "
                         f"{json.dumps(cases)}.map(commandOf), first: commandOf(settings())}})")
        newest = shown["newest"]
        for settings, command in zip(cases, shown["commands"]):
            words = command.split()
            self.assertEqual(words[:5], ["./book", "run", newest[:4], "--", "--estimate"])
            printed = [subprocess.run(line, stdout=subprocess.PIPE, encoding="utf-8", check=True)
                       .stdout for line in ([BIN / newest, *words[4:]], command_of(settings))]
            rows = [re.findall(r"^(\w[\w ]+?) {2,}.*?(\d+\.\d+)", text, re.M) for text in printed]
            self.assertEqual(*rows)
            self.assertGreater(len(rows[0]), 8 if settings["pp_size"] == 1 else 7)
        self.assertIn(" --model 8B --seq_len 4096 ", shown["first"])


# --- the book's numbers ---------------------------------------------------------------------------

SHAPES = {"1B": (2048, 16, 32), "8B": (4096, 32, 32), "70B": (8192, 80, 64),
          "405B": (16384, 126, 128)}
# The book's charts, GiB: activations without and with the input's dropout.
RECOMPUTATION = {  # bars by mode: 1k and 8k tokens
    ("1B", "none"): (3.564, 168.516), ("1B", "selective"): (1.064, 8.516),
    ("1B", "full"): (0.064, 0.516), ("8B", "none"): (9.254, 354.031),
    ("8B", "selective"): (4.254, 34.031), ("8B", "full"): (0.254, 2.031),
    ("70B", "none"): (46.258, 1770.062), ("70B", "selective"): (21.258, 170.062),
    ("70B", "full"): (1.258, 10.062), ("405B", "none"): (145.703, 5575.625),
    ("405B", "selective"): (66.953, 535.625), ("405B", "full"): (3.953, 31.625)}
LAYOUTS = [  # model, layout, tokens, activations of layers under selective recomputation
    ("70B", {"tp_size": 8}, 1024, 8.125), ("70B", {"tp_size": 8}, 16384, 130.0),
    ("70B", {"tp_size": 16}, 4096, 28.75),
    ("70B", {"tp_size": 8, "sequence_parallel": True}, 4096, 10.625),
    ("70B", {"tp_size": 16, "sequence_parallel": True}, 16384, 21.25),
    ("8B", {"tp_size": 2}, 4096, 11), ("8B", {"tp_size": 2, "cp_size": 4}, 131072, 88),
    ("8B", {"pp_size": 8, "grad_acc_steps": 32}, 16384, 68)]
STATES = [  # model, layout, weights in bf16; the charts' optimizer states lack the f32 weights
    ("8B", {}, 14.957, 59.828), ("8B", {"tp_size": 2}, 7.479, 29.914),
    ("8B", {"pp_size": 8}, 2.604, 10.414), ("8B", {"dp_size": 8, "zero_stage": 1}, 15.0, 7.5),
    ("8B", {"dp_size": 8, "zero_stage": 3}, 1.875, 7.5), ("70B", {"tp_size": 8}, 16.44, 65.75),
    ("70B", {"tp_size": 16}, 8.22, 32.88)]
ROUNDED = 6e-4  # GiB: the charts of activations have three digits behind the point
CLOSE = 4e-3    # relative: those of states have fewer, and one of them 131.5 for 131.4


def book_settings(model, **others):
    hidden, layers, heads = SHAPES[model]
    ffn = {"1B": 8192, "8B": 14336, "70B": 28672, "405B": 53248}[model]
    return {"hidden_size": hidden, "num_layers": layers, "num_heads": heads, "num_kv_heads": 8,
            "ffn_hidden_size": ffn, "vocab_size": 128256, "tie_word_embeddings": model == "1B",
            "seq_len": 1024, "micro_batch_size": 1, "grad_acc_steps": 1, "dtype": "bf16",
            "grad_accumulation": "bf16", "recompute": "selective", "feed_forward": "gelu",
            "dp_size": 1, "zero_stage": 0, "tp_size": 1, "cp_size": 1, "pp_size": 1,
            "schedule": "1f1b",
            "sequence_parallel": False, **others}


def book(cases):
    """What the page's book() says of them, with activations of layers, and with the dropout."""
    found = evaluate(interactive.MEMORY, f"JSON.stringify({json.dumps(cases)}.map(book))")
    for each in found:
        each["layers_saved"] = sum(row["bytes"] for row in each["saved"] if row["block"] == "layer")
        each["with_dropout"] = each["layers_saved"] + sum(
            row["bytes"] for row in each["saved"] if row["name"] == "input dropout")
    return found


class Book(unittest.TestCase):
    def close(self, value, wanted, what, most):
        self.assertLessEqual(abs(value - wanted), most, f"{what}: {value} for {wanted}")

    def test_activations_of_the_charts(self):
        modes = [(model, mode, tokens, size) for (model, mode), sizes in RECOMPUTATION.items()
                 for tokens, size in zip((1024, 8192), sizes)]
        cases = [book_settings(model, recompute=mode, seq_len=tokens)
                 for model, mode, tokens, _ in modes]
        for (model, mode, tokens, size), found in zip(modes, book(cases)):
            self.close(found["with_dropout"] / GIB, size, f"{model}, {mode}, {tokens} tokens",
                       ROUNDED)

    def test_layouts_of_the_charts(self):
        cases = [book_settings(model, seq_len=tokens, **layout)
                 for model, layout, tokens, _ in LAYOUTS]
        for (model, layout, tokens, size), found in zip(LAYOUTS, book(cases)):
            self.close(found["layers_saved"] / GIB, size, f"{model}, {layout}, {tokens} tokens",
                       ROUNDED)

    def test_states_of_the_charts_with_the_missing_master_weights(self):
        cases = [book_settings(model, **layout) for model, layout, *_ in STATES]
        for (model, layout, weights, moments), found in zip(STATES, book(cases)):
            for part, wanted in (("weights", weights), ("optimizer", 1.5 * moments)):
                self.close(found[part] / GIB, wanted, f"{part} of {model}, {layout}",
                           CLOSE * wanted)

    def test_sequence_parallelism_divides_the_probabilities_too(self):
        found = book([book_settings("8B", recompute="none", tp_size=tp, sequence_parallel=shared)
                      for tp, shared in ((1, False), (8, False), (8, True))])
        whole, plain, shared = (next(row["bytes"] for row in each["saved"]
                                     if row["name"] == "probabilities") for each in found)
        self.assertEqual([plain, shared], [whole / 8, whole / 8])

    def test_the_schedule_decides_how_many_micro_batches_are_in_flight(self):
        found = book([book_settings("8B", pp_size=8, grad_acc_steps=micro, schedule=schedule)
                      for schedule, micro in (("1f1b", 32), ("1f1b", 4), ("afab", 32))])
        self.assertEqual([each["inFlight"] for each in found], [8, 4, 32])

    def test_without_pp_it_is_the_programs_formula(self):
        cases = [*random_settings(10), *random_settings(10, context=True)]
        for settings, found in zip(cases, book([{**book_settings("8B"), **settings,
                                                 "dtype": "bf16"} for settings in cases])):
            wanted = ask(settings)["book"]
            self.assertAlmostEqual(found["layers_saved"] / wanted["activations"], 1, places=12)
            if settings["dtype"] == "bf16" and settings["grad_accumulation"] != "f32":
                states = found["weights"] + found["gradients"] + found["optimizer"]
                self.assertAlmostEqual(states / wanted["weights_gradients_optimizer"], 1, places=12)


# --- the timeline ---------------------------------------------------------------------------------


class Timeline(unittest.TestCase):
    def test_exposed_time_by_group_is_that_of_the_tools(self):
        sample = json.loads(interactive.block(interactive.TIMELINE, "sample"))
        late = dict(next(event for event in reversed(sample["traceEvents"])
                         if event.get("cat") == "wait" and event["args"]["exposed_us"] > 0))
        late["ts"] += 1e6  # of no step
        sample["traceEvents"].append(late)
        text = json.dumps(sample)
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch) / trace.RECORDED
            path.write_text(text, encoding="utf-8")
            recorded = trace.load(path)
        shown = evaluate(interactive.TIMELINE, "JSON.stringify((() => { const all = "
                         f"read({json.dumps(text)}), found = {{}}; for (const step of all.steps) "
                         "found[step] = waitedByGroup(all, step); return found; })())")
        wanted = trace.exposed_by_group(recorded)
        self.assertEqual({int(step) for step in shown}, set(wanted))
        for step, shares in trace.steps(recorded).items():
            self.assertEqual(set(shown[str(step)]), set(wanted[step]))
            for name, of_ranks in wanted[step].items():
                self.assertGreater(max(of_ranks), 0, name)
                for rank, value in enumerate(of_ranks):
                    self.assertAlmostEqual(shown[str(step)][name][rank], value, places=6)
            for rank, share in enumerate(shares):
                self.assertAlmostEqual(sum(of[rank] for of in wanted[step].values()), share.exposed)

    @unittest.skipIf(chromium.why_not(), chromium.why_not())
    def test_with_the_keyboard_alone(self):
        page = opened(interactive.TIMELINE)
        for _ in range(10):
            page.press("Tab")
            if page.run("document.activeElement.id") == "canvas":
                break
        seen = []
        for key in ("ArrowRight", "ArrowRight", "ArrowDown", "Enter", "-", "[", "0"):
            page.press(key)
            span, text, focus = page.run("[view[1] - view[0], byId('chosen').innerText, "
                                         "document.activeElement.id]")
            self.assertEqual(focus, "canvas", key)
            seen.append((key, span, text))
        self.assertEqual(page.errors, [])
        spans = {key: span for key, span, _ in seen}
        self.assertLess(spans["Enter"], spans["ArrowDown"])
        self.assertGreater(spans["-"], spans["Enter"])
        self.assertEqual(spans["0"], spans["ArrowRight"])
        texts = [text for *_, text in seen[:3]]
        self.assertEqual(len(set(texts)), 3, texts)
        self.assertTrue(all("rank" in text for text in texts), texts)

    @unittest.skipIf(chromium.why_not(), chromium.why_not())
    def test_what_is_said_of_messages_and_of_files_that_are_no_traces(self):
        page = opened(interactive.TIMELINE)
        item = json.loads(page.run("""(() => {
          const lane = lanes.findIndex((each) => each.kind === "messages");
          lanes[lane].items[0].wire_bytes = 12345;  // else as many as are exchanged
          choose(lane, lanes[lane].items[0]);
          return JSON.stringify(lanes[lane].items[0]);
        })()"""))
        told = page.run("byId('chosen').innerText")
        for word in (item["kind"].replace("_", "-"), item["dimension"], "peers", "rank 1",
                     f"{item['payload_bytes']:,} bytes", "12,345 bytes sent"):
            self.assertIn(word, told)
        for text, word in (("{", "no whole JSON"), ("{}", "no trace.json"),
                           ('{"otherData": {"format": 9}, "traceEvents": []}', "format 9")):
            page.run(f"open({json.dumps(text)}, 'x.json')")
            self.assertRegex(page.run("byId('error').textContent"), f"^x.json: .*{word}")
        self.assertEqual(page.errors, [])


# --- both, as they are seen -----------------------------------------------------------------------

@unittest.skipIf(chromium.why_not(), chromium.why_not())
class Looks(unittest.TestCase):
    def test_widths_contrast_and_reach(self):
        look = (Path(__file__).parent / "look.js").read_text(encoding="utf-8")
        least = json.dumps({"text": AA, "large": AA_LARGE})
        for page, width, scheme in itertools.product(LOOKED_AT, WIDTHS, SCHEMES):
            with self.subTest(page=page.name, width=width, scheme=scheme):
                browser = whole(page, width, scheme)
                seen = browser.run(f"(() => {{ {look}\nreturn look({least}); }})()")
                self.assertEqual(browser.errors, [])
                self.assertGreater(seen.pop("letters"), 500)
                self.assertLessEqual(seen.pop("overflow"), 0)
                self.assertEqual({name: faults for name, faults in seen.items() if faults}, {})

    def test_the_tab_key_reaches_every_control(self):
        for page in LOOKED_AT:
            browser = whole(page)
            wanted = browser.run("[...document.querySelectorAll('a[href], button, input, select, "
                                 "[tabindex]')].filter((each) => each.getClientRects().length && "
                                 "!each.disabled).map((each, i) => { each.dataset.control = i; "
                                 "return each.type === 'radio' && !each.checked ? -1 : i; })")
            reached = set()
            for _ in range(len(wanted) + 2):
                browser.press("Tab")
                reached.add(browser.run("Number(document.activeElement.dataset.control ?? -1)"))
            self.assertEqual(set(wanted) - {-1} - reached, set(), page.name)
            self.assertGreater(len(reached), 5)

    def test_they_ask_no_host(self):
        for page, shown in ((interactive.MEMORY, "153 GiB"),
                            (interactive.TIMELINE, "ch02_data_parallel, measured: step"),
                            (mesh.PAGE, "Rank 0 on node 0")):
            browser = opened(page)
            self.assertEqual(browser.errors, [], page.name)  # with every address that is loaded
            self.assertIn(shown, browser.run("document.body.innerText"))

    def test_a_setting_that_cannot_be_is_refused_with_one_that_works(self):
        page = opened(interactive.MEMORY)
        for name, value, words in (
                ("num_heads", "3", "num_heads=3 must divide hidden_size=4096; try 1, 2, 4"),
                ("num_kv_heads", "5", "num_kv_heads=5 must divide num_heads=32; try"),
                ("tp_size", "3", "tp_size=3 must divide num_heads=32; try 1, 2, 4"),
                ("seq_len", "0", "seq_len=0 must be a whole number; try 1")):
            self.refused(page, name, value, words)
        page = whole(interactive.MEMORY)  # cp_size 4, ulysses_size 2, tp_size 2
        for name, value, words in (
                ("seq_len", "4094", "seq_len=4094 must divide into the 8 pieces of cp_size=4, "
                 "cp_layout=zigzag; try 4088 or 4096"),
                ("cp_size", "3", "ulysses_size=2 must divide cp_size=3; try 1, 3"),
                ("ulysses_size", "0", "ulysses_size=0 must be a whole number; try 1"),
                ("seq_len", "4", "seq_len=4 must divide into the 8 pieces of cp_size=4, "
                 "cp_layout=zigzag; try 8"),
                ("hidden_size", "32", "hidden_size/num_heads=1 must be even")):
            self.refused(page, name, value, words)
        page.run("form.elements.cp_layout.value = 'contiguous'")
        self.refused(page, "seq_len", "4", "tp_size=2 must divide the seq_len/cp_size=1 tokens")
        page.run("form.elements.cp_method.value = 'ulysses'")
        self.refused(page, "cp_size", "64", "cp_size=64 must divide the 16 heads of a rank")
        shape = {"hidden_size": 6144, "num_heads": 96, "num_kv_heads": 24}
        page.run(f"for (const [name, value] of Object.entries({json.dumps(shape)})) "
                 "form.elements[name].value = value")
        self.refused(page, "cp_size", "8", "cp_size=8 must divide the 12 kv heads of a rank")
        self.assertEqual(page.errors, [])

    def refused(self, page, name, value, words):
        """The page says so where a control has the value, and nothing where it has the old one."""
        text, hidden, after = page.run(f"""(() => {{
          const control = form.elements.{name}, old = control.value, told = [];
          for (const value of ["{value}", old]) {{
            control.value = value;
            control.dispatchEvent(new Event("input", {{bubbles: true}}));
            told.push(byId("error").textContent, byId("result").hidden);
          }}
          return [told[0], told[1], told.slice(2)];
        }})()""")
        self.assertIn(words, text)
        self.assertTrue(hidden)
        self.assertEqual(after, ["", False])

    def test_context_parallelism_with_the_keyboard_alone(self):
        page = opened(interactive.MEMORY)
        hidden = "form.elements.{}.closest('[hidden]') !== null"

        def go_to(name):
            for _ in range(40):
                page.press("Tab")
                if page.run("document.activeElement.name") == name:
                    return
            self.fail(f"the Tab key does not reach {name}")

        before = page.run("byId('total').textContent")
        self.assertTrue(page.run(hidden.format("cp_method")))
        go_to("cp_size")
        page.type("4")  # what is there is selected
        self.assertFalse(page.run(hidden.format("cp_method")))
        self.assertTrue(page.run(hidden.format("ulysses_size")))
        self.assertNotEqual(page.run("byId('total').textContent"), before)
        go_to("cp_method")
        for value in METHODS[1:]:
            page.press("ArrowDown")
            self.assertEqual(page.run("form.elements.cp_method.value"), value)
        go_to("ulysses_size")
        self.assertIn("--cp_size 4 --cp_method ring_ulysses --cp_layout zigzag --ulysses_size 2",
                      page.run("byId('command').textContent"))
        self.assertEqual(page.errors, [])


class Blocks(unittest.TestCase):
    def test_the_colours_are_the_palettes(self):
        for page in PAGES:
            self.assertEqual(interactive.block(page, "palette"), interactive.palette_text(),
                             "run python3 tools/interactive/interactive.py")


def main():
    global BIN
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    folder = parser.add_mutually_exclusive_group(required=True)
    folder.add_argument("--bin", type=Path, help="folder of the programs")
    folder.add_argument("--binary", type=Path, help="one of them, such as memory_table")
    args, rest = parser.parse_known_args()
    BIN = (args.bin or args.binary.parent).resolve()
    if chromium.why_not() and shutil.which("node") is None:
        sys.stdout.write(f"{chromium.why_not()}, and no node on PATH\n")
        return 77
    result = unittest.main(argv=[sys.argv[0], *rest], exit=False).result
    return 0 if result.wasSuccessful() else 1


if __name__ == "__main__":
    sys.exit(main())
