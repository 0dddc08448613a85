"""Expert parallelism: the formulas of the chapter's figures, how their data are read, and who stands in
which group in its drawings. The same of latent attention.

    python3 tests/course/test_expert.py        needs no build
"""
import contextlib
import io
import json
import math
import re
import struct
import sys
import tempfile
import unittest
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from ch06_expert.figures import (  # noqa: E402  (the path comes first)
    balance, claims, counts, draw_dispatch, draw_experts, hiding, latent, latent_runs, make, memory,
    nodes, speed, ways)
from tools.bench import bench  # noqa: E402
from tools.book.showcase import read_json  # noqa: E402
from tools.look.trace import Communication, Rank, Span, Wait  # noqa: E402

SHAPE = {"hidden_size": 10, "num_layers": 3, "first_dense_layers": 1, "num_experts": 4,
         "num_experts_per_tok": 1, "ffn_hidden_size": 50, "moe_ffn_hidden_size": 7}


class Formulas(unittest.TestCase):
    def test_parameters_in_a_tokens_way(self):
        experts = 2 * 4 * 3 * 10 * 7
        self.assertEqual(memory.expert_parameters(SHAPE), experts)
        self.assertEqual(memory.active_parameters(SHAPE, experts + 1000), 1000 + experts / 4)
        dense = {name: value for name, value in SHAPE.items() if "expert" not in name}
        self.assertEqual(memory.active_parameters(dense, 1000), 1000)
        wide = {name: value for name, value in SHAPE.items() if name != "moe_ffn_hidden_size"}
        self.assertEqual(memory.expert_parameters(wide), 2 * 4 * 3 * 10 * 50)

    def test_memory_and_work_by_ep(self):
        shape = {**SHAPE, "first_dense_layers": 0, "num_heads": 5, "num_kv_heads": 1, "vocab_size": 11}
        of_layer = 2 * 10 * 10 + 2 * 10 * 2 + 2 * 10 + 4 * 10  # attention, norms, router
        self.assertEqual(memory.other_parameters(shape), 2 * 11 * 10 + 10 + 3 * of_layer)
        # 100 tokens go through one expert of each layer, whose products are 3 forward, 6 backward.
        self.assertEqual(memory.expert_flops(shape, 100), 3 * 100 * 9 * 2 * 10 * 7)
        for shape, tokens, seq_len, found in (
                (memory.SMALL, memory.SMALL_BATCH * memory.SMALL["seq_len"], memory.SMALL["seq_len"],
                 data("memory")["small"]),
                (memory.MIXTRAL, memory.LARGE["seq_len"], memory.LARGE["seq_len"],
                 data("memory")["ep"])):
            for own in found:
                self.assertEqual(own["flops"], memory.step_flops(shape, tokens, seq_len))

    def test_the_first_stage_holds_what_the_estimate_says(self):
        estimated = {json.dumps([own["model"], own["mesh"]]): own for own in data("memory")["meshes"]}
        counted = data("counts")["stages"]
        self.assertEqual([own["mesh"]["pp_size"] for own in counted],
                         [len(own["stages"]) for own in counted])
        self.assertGreater(len(counted), 0)
        for own in counted:
            first = estimated[json.dumps([own["model"], own["mesh"]])]
            self.assertEqual(own["stages"][0], {name: first[name] for name in own["stages"][0]})
            self.assertNotEqual(own["stages"][0], own["stages"][-1])

    def test_the_least_and_the_most_of_stages(self):
        said = "stage weights gradients optimizer peak_activations peak_total\n0 1 2 3 4 5\n1 7 2 3 1 9\n"
        stages = memory.stages_of(said)
        self.assertEqual(stages[1], {"weights": 7, "gradients": 2, "optimizer": 3,
                                     "peak_activations": 1, "peak_total": 9})
        of_gib = [{name: memory.GIB * size for name, size in stage.items()} for stage in stages]
        mesh = {"dp_size": 4, "pp_size": 2}
        cases = [{"model": "a", "mesh": own, **of_gib[0]} for own in (mesh, {"dp_size": 4})]
        shown = cells_of(memory.meshes_table(cases, [{"model": "a", "mesh": mesh, "stages": of_gib}]))
        self.assertEqual(shown[0], ["a", "8", "`dp` 4 `pp` 2", "1.0–7.0", "2.0", "3.0", "1.0–4.0",
                                    "5.0–9.0"])
        self.assertEqual(shown[1][3:], ["1.0", "2.0", "3.0", "4.0", "5.0"])

    def test_messages(self):
        tokens = counts.MESSAGE_BATCH * memory.SMALL["seq_len"]
        # Of 2 tokens' rows one leaves, 4 times in each of 2 layers; h numbers of 4 bytes.
        self.assertEqual(counts.message_bytes(2, 1), 4 * 2 * (tokens / 2) * 64 * 4)
        self.assertEqual(counts.message_bytes(4, 8), 4 * 2 * (tokens * 8 * 3 / 4) * 64 * 4)
        self.assertEqual(counts.message_bytes(1, 8), 0)

    def test_nodes_of_a_token(self):
        here = counts.EXPERTS // counts.NODES
        none = math.comb(counts.EXPERTS - here, counts.CHOICES) / math.comb(counts.EXPERTS,
                                                                          counts.CHOICES)
        free = counts.route(counts.NODES)
        self.assertAlmostEqual(free["mean"] / (counts.NODES * (1 - none)), 1, 2)
        self.assertAlmostEqual(free["rows"], counts.CHOICES * (1 - 1 / counts.NODES), 1)
        for allowed in (1, 2, 4):
            found = counts.route(allowed)
            self.assertEqual(found["most"], allowed)
            self.assertLess(found["once"], free["once"])
            self.assertAlmostEqual(found["rows"] / free["rows"], 1, 1)


class Beside(unittest.TestCase):
    def test_what_the_page_says_of_the_mixture_beside_the_dense_model(self):
        found = data("beside")
        losses = {name: [dict(map(tuple, own["val_loss"])) for own in balance.runs_of(found, name)]
                  for name in balance.BESIDE}

        def of(name, step):
            return sorted(own[step] for own in losses[name])
        for step in (100, 200):  # behind in every seed
            for dense, mixture in zip(losses["dense"], losses["mixture"]):
                self.assertGreater(mixture[step], dense[step])
        for step in (800, 900):  # apart
            self.assertLess(of("mixture", step)[-1], of("dense", step)[0])
        self.assertGreater(of("mixture", 1000)[-1], of("dense", 1000)[0])  # they overlap
        ahead = [of("dense", step)[1] - of("mixture", step)[1] for step in (800, 900)]
        page = (ROOT / "ch06_expert/README.md").read_text(encoding="utf-8")
        told = re.search(r"median loss is ([\d.]+\d) lower", " ".join(page.split()))
        self.assertEqual({f"{value:.2f}" for value in ahead}, {told[1]})


class Speed(unittest.TestCase):
    def test_a_token_meets_as_much_as_in_the_dense_layer(self):
        for name, config in speed.MODELS.items():
            self.assertEqual(bench.active_width(config), bench.CONFIGS[name]["ffn_hidden_size"])
        for dtype in bench.DTYPES:
            for kind, ranks, flags in speed._cases("A", dtype, Path()).values():
                self.assertEqual(bench.active_width(flags), bench.CONFIGS["A"]["ffn_hidden_size"])
                self.assertEqual(ranks * flags["micro_batch_size"],
                                 bench.CONFIGS["A"]["micro_batch_size"])
                self.assertEqual(kind == "mixture", "num_experts" in flags)

    def test_the_bound_is_that_of_the_dense_layer(self):
        with mock.patch.object(bench.limits, "op_bench", return_value={"bound_ms": 2.0}) as asked:
            bench._bound(speed.MODELS["A"], "f32")
        asked.assert_called_once_with("bound", **bench.CONFIGS["A"], dtype="f32")

    def test_random_tokens_are_of_16_bits_as_the_flags_say(self):
        # As bytes they are no text, and a run of the bench is refused.
        with tempfile.TemporaryDirectory() as folder:
            folder = Path(folder)
            speed.write_random_tokens(folder)
            for flags in (case[2] for case in speed._cases("A", "f32", folder).values()
                          if "data" in case[2]):
                self.assertEqual(flags["token_dtype"], "uint16")
                data = Path(flags["data"]).read_bytes()
        ids = struct.unpack(f"<{len(data) // 2}H", data)
        self.assertEqual(set(ids), set(range(speed.VOCABULARY)))

    def test_load_of_experts_and_of_ranks(self):
        self.assertEqual(speed.over_mean([6, 1, 1, 0]), 3)
        self.assertEqual(speed.of_ranks([6, 1, 1, 0]), [7, 1])

    def test_ratios_are_of_each_round(self):
        def turn(dense, experts):
            return {"dense": {"layer_ms": dense, "tokens_per_s": 100},
                    "text": {"layer_ms": experts, "tokens_per_s": 80}}
        own = {"rounds": [turn(8, 10), turn(9, 10), turn(20, 40)]}
        self.assertEqual(speed.layer_ratio(own, "text"), {"median": 0.8, "min": 0.5, "max": 0.9})
        self.assertEqual(speed.step_ratio(own, "text", "dense")["median"], 0.8)

    def test_the_page_says_what_measures_it_before_there_is_a_record(self):
        self.assertIn("./book bench ch06", speed.page({}))
        case = {"layer_ms": 1, "tokens_per_s": 1, "load": 1.5, "load_of_rank": 1.25}
        cases = {name: case for name in speed._cases("A", "f32", Path())}
        record = {"experts": [{"config": "A", "dtype": "f32", "rounds": [cases]}], "commit": "0" * 40,
                  "date": "2026-01-02", "machine": {"cpu": "A CPU", "threads": 2, "isa": ["avx2"]}}
        ratio = "1.00 (1.00–1.00)"
        self.assertIn(f"| A f32 | {' | '.join([ratio] * 5)} | 1.25 |\n", speed.page(record))
        self.assertIn(f"| A f32 | 1.0 | 1.0 | {ratio} | 1.5 | {ratio} | 1.5 | {ratio} |",
                      speed.lines(record))
        self.assertEqual(len(list(speed.text(record))), 4)


class Records(unittest.TestCase):
    def test_the_load_of_a_step(self):
        record = {"experts": [{"tokens": [4, 0, 0, 0]}, {"tokens": [1, 1, 1, 1]}]}
        self.assertEqual(balance._load(record), (4 + 1) / 2)

    def test_late_steps_alone(self):
        own = {"load": [4.0] * (balance.STEPS // balance.EVERY)}
        own["load"][-balance.LATE // balance.EVERY:] = [1.5] * (balance.LATE // balance.EVERY)
        self.assertEqual(balance.late_load(own), 1.5)

    def test_a_layout_that_differs_breaks_the_claim(self):
        def row(last):
            cases = [{"balance": name, "steps": [[2.0, 1.0]]} for name in counts.BALANCES]
            return claims._same({"losses": [*cases, *({**case, "steps": [[2.0, last]]}
                                                      for case in cases)]})
        self.assertEqual(row(1.0)[2], "yes")
        self.assertIn("no", row(1.0 + 1e-9)[2])

    def test_bytes_beside_the_formula_break_the_claim(self):
        def row(**more):
            own = {"k": 8, "ep": 4, "calls": 8, "bytes": counts.message_bytes(4, 8), **more}
            return claims._messages({"messages": [own]})[2]
        self.assertEqual(row(), "yes")
        self.assertIn("no", row(bytes=counts.message_bytes(4, 8) + 4))
        self.assertIn("no", row(calls=12))


def data(name):
    """What was measured for a page."""
    return json.loads((ROOT / "ch06_expert/figures" / f"{name}.json").read_text(encoding="utf-8"))


def cells_of(text):
    """The rows of a table, as lists of their cells."""
    return [[cell.strip() for cell in line.strip("|").split("|")]
            for line in text.splitlines()[2:] if line.startswith("|")]


class Ratio(unittest.TestCase):
    """Of the rows' way to the experts' work."""

    def test_it_is_messages_over_products_and_tokens_cancel(self):
        flops, bandwidth = 1e12, 1e10
        for ep, tokens, k, h, width in ((2, 10, 1, 8, 20), (8, 1000, 4, 64, 7)):
            rows = tokens * k
            message = 4 * rows * h * (ep - 1) / ep * 2 / bandwidth
            forward = 3 * 2 * rows * h * width
            self.assertAlmostEqual(hiding.ratio(ep, width, flops, bandwidth),
                                   message / (3 * forward / flops))

    def test_the_books_is_that_of_two_matrices_with_one_expert_on_each_rank(self):
        flops, bandwidth = 1e12, 1e10
        for ep, h in ((2, 64), (8, 512)):
            work = 3 * 2 * 2 * h * (4 * h)  # of a row; forward, and twice backward
            ours = 4 * h * (ep - 1) / ep * 2 / bandwidth / (work / flops)
            self.assertAlmostEqual(hiding.of_book(ep, ep, h, flops, bandwidth), ours)
            self.assertAlmostEqual(hiding.of_book(ep, 8 * ep, h, flops, bandwidth), ours / 8)
            self.assertEqual(work / (4 * h), hiding.PLAIN * 4 * h)

    def test_copies_in_place_of_rows_leave(self):
        found = {way: (own, book) for model, count, _, way, own, book
                 in hiding.large([{"allowed": 8, "once": 4.0}, {"allowed": 4, "once": 2.0}])
                 if model == "DeepSeek-V3" and count == 8}
        self.assertEqual(len(found), 3)
        direct, free, few = (found[way] for way in ("direct", "by_node, M = 8", "by_node, M = 4"))
        self.assertAlmostEqual(free[0] / direct[0], (4 / 8) / (7 / 8))
        self.assertAlmostEqual(few[0] / free[0], 1 / 2)
        self.assertEqual(few[1], direct[1])

    def test_that_of_runs_follows_from_its_row(self):
        measured = data("ways")["ratio"]
        self.assertEqual([(own["ranks"], own["experts"], own["k"], own["width"])
                          for own in measured["cases"]], list(hiding.CASES))
        for own, row in zip(measured["cases"], cells_of(hiding.ratios_table(measured))):
            bandwidth, h = 1e9 * measured["gb_per_s"], hiding.SHAPE["hidden_size"]
            leaves = (own["ranks"] - 1) / own["ranks"]
            ours, reached = (leaves * 4 * 1e9 * own[rate] / (4.5 * own["width"] * bandwidth)
                             for rate in ("matmul_gflops", "products_gflops"))
            book = (own["ranks"] - 1) * 1e9 * own["matmul_gflops"] / (
                12 * own["experts"] * h * bandwidth / 4)
            found = own["comm_ms"] / own["compute_ms"]
            self.assertEqual(row[4:6] + row[8:], [f"{value:.3f}" for value in (
                book, ours, reached, found)])
            if own["k"] == own["experts"]:  # even loads: both are made of the same bytes and work
                self.assertAlmostEqual(found / reached, 1, 2)
            else:
                self.assertGreater(found / reached, 0.99)

    def test_that_of_ones_own_machine(self):
        with contextlib.redirect_stdout(io.StringIO()) as said:
            self.assertEqual(hiding.main(["989", "450", "8", "2048"]), 0)
        self.assertEqual(said.getvalue(), "t_comm / t_compute: 0.417\n")
        for wrong in ([], ["1", "1", "1", "1"], ["x", "1", "2", "1"], ["1", "1", "2", "0"]):
            with contextlib.redirect_stderr(io.StringIO()) as said:
                self.assertEqual(hiding.main(wrong), 2)
            self.assertIn("try 989 450 8 2048", said.getvalue())


def trace_of(steps):
    """A trace of one rank: steps of 10 ms; in each, rows travel for 4 ms and are waited for 1 ms, and
    gradients 2 ms."""
    rank = Rank()
    for step in range(steps):
        begin = 10000.0 * step
        rank.spans.append(Span("train_step", "phase", begin, 10000.0, 0, 5000.0, step, 0, 0))
        for group, duration, exposed in ((1, 4000.0, 1000.0), (2, 3000.0, 2000.0)):
            name = {1: "ep", 2: "dp"}[group]
            rank.waits.append(Wait(begin + 5000, exposed, 0, 0, step, group, "all_to_all", step, -1,
                                   exposed, 0.0))
            rank.communications.append(Communication(
                1, begin, duration, step, group, name, "all_to_all", step, -1, 10**6, 10**6, 0, 0))
    return SimpleNamespace(ranks=[rank], group=lambda _, number: SimpleNamespace(
        name={1: "ep", 2: "dp"}[number]))


class OnTheirWay(unittest.TestCase):
    """How much of the rows' way shows, and how much crosses nodes."""

    def test_rows_are_told_from_other_messages(self):
        self.assertEqual(ways.of_rows(trace_of(8)), (4.0, 1.0, 2.0))
        self.assertEqual([ways.is_of_rows(name) for name in (
            "ep", "ep_counts", "ep_rail", "edp", "dp", "pp", "mirror")], 3 * [True] + 4 * [False])

    def test_what_is_hidden_follows_from_its_row(self):
        measured = data("ways")
        self.assertEqual([own["way"] for own in measured["ways"]], list(ways.WAYS))
        for own, row in zip(measured["ways"], cells_of(ways.ways_table(measured))):
            share = 100 * (1 - own["rows_exposed_ms"] / own["rows_ms"])
            self.assertEqual(row[2:5], [f"{own['rows_ms']:.0f}", f"{own['rows_exposed_ms']:.0f}",
                                        f"{share:.0f} %"])

    def test_whose_rows_are_left(self):
        recorded = trace_of(8)
        for step in range(8):  # two passes in turns, of which one is over; and one with none beside
            begin = 10000.0 * step
            for name, start, end in (("forward", 4000, 5500), ("backward", 4500, 9000)):
                recorded.ranks[0].spans.append(
                    Span(name, "phase", begin + start, end - start, 0, 0, step, 0, 0))
            for start, group in ((6000, 1), (7000, 3)):
                recorded.ranks[0].waits.append(Wait(begin + start, 500.0, 0, 0, step, group,
                                                    "all_to_all", step, -1, 500.0, 0.0))
        names = {1: "ep", 2: "dp", 3: "ep_counts"}
        recorded.group = lambda _, number: SimpleNamespace(name=names[number])
        self.assertEqual(ways.left_of(recorded), [0.5, 0.5, 1.0])

    def test_a_faster_link(self):
        self.assertEqual(ways.faster("node=100,0.15", 4), "node=100,0.6")
        for own in data("ways")["ways"]:
            first, *others = own["faster"]
            self.assertEqual(len(others), len(ways.FASTER) - 1)
            self.assertEqual({name: first[name] for name in first if name in own},
                             {name: own[name] for name in first if name in own})
            for case in own["faster"]:  # medians of parts beside the median of their sum
                self.assertAlmostEqual(sum(case["left_ms"]) / case["rows_exposed_ms"], 1, delta=0.15)
            for slow, fast in zip(own["faster"], others):
                self.assertLess(fast["rows_ms"], slow["rows_ms"])

    def test_shared_experts_hide_some_and_turns_most(self):
        hidden = {own["way"]: ways.hidden(own) for own in data("ways")["ways"]}
        for less, more in (("plain_2", "shared_2"), ("plain_4", "shared_4"),
                           ("one_by_one", "turns"), ("shared_4", "turns")):
            self.assertLess(hidden[less] + 0.1, hidden[more], (less, more))

    def test_steps_with_and_without_turns_have_the_same_work(self):
        (ranks, one), (others, turns) = ways.WAYS["one_by_one"], ways.WAYS["turns"]
        self.assertEqual((ranks, {**one, "overlap_dispatch": None}), (others, turns))
        samples = {way: flags["grad_acc_steps"] * ranks // flags.get("pp_size", 1)
                   for way, (ranks, flags) in ways.WAYS.items() if ranks == 4}
        self.assertEqual(len(set(samples.values())), 1, samples)

    def test_what_is_drawn_has_a_title(self):
        drawn = [own["way"] for own in data("timelines")["ways"]]
        self.assertEqual(drawn, list(ways.DRAWN))

    def test_bytes_between_nodes_are_the_formulas(self):
        counted = data("nodes")["nodes"]
        for own in counted["found"]:
            self.assertEqual((own["between"], own["inside"]),
                             (own["between_formula"], own["inside_formula"]), own)
        self.assertNotIn("(", "".join(map("".join, cells_of(nodes.nodes_table(counted)))))

    def test_the_slow_links_time_follows_from_its_bytes(self):
        steps = data("nodes")["steps"]
        for own, row in zip(steps, cells_of(nodes.steps_table(steps))):
            self.assertEqual(row[4], f"{1e3 * own['between'] / (nodes.NET[1] * 1e9):.1f}")
            self.assertGreater(own["rows_ms"], 0.9 * nodes.slow_link_ms(own))

    def test_what_the_example_prints_is_read(self):
        said = ("4 nodes of 2 ranks, 64 experts, 8 of a token; KiB\nhead\n"
                "          1   direct         60.5         61.5          7.0          8.0\n")
        self.assertEqual(nodes.read(said), {
            "nodes": 4, "node_size": 2, "experts": 64, "k": 8, "found": [{
                "route_nodes": 1, "dispatch": "direct", "between": 60.5, "between_formula": 61.5,
                "inside": 7.0, "inside_formula": 8.0}]})

    def test_the_claims_follow_from_the_data(self):
        def rows(one=90.0, turns=5.0, few=1.0, comm=4.0):
            counted = {"nodes": 4, "found": [
                {"dispatch": way, "route_nodes": number, "between": size}
                for way, sizes in (("direct", (5.0, 5.0)), ("by_node", (few, 4.0)))
                for number, size in zip((1, 4), sizes)]}
            case = {"ranks": 2, "experts": 2, "products_gflops": 1.0, "comm_ms": comm,
                    "compute_ms": 1.0}
            measured = {"ways": [{"way": "one_by_one", "rows_ms": 100.0, "rows_exposed_ms": one},
                                 {"way": "turns", "rows_ms": 100.0, "rows_exposed_ms": turns}],
                        "ratio": {"gb_per_s": 1.0, "cases": [case]}}
            return cells_of(claims.dispatch_table(measured, counted))
        self.assertEqual([row[4] for row in rows()],
                         ["`direct` **no**, `by_node` yes", "yes", "**no**"])
        self.assertEqual(rows(few=4.0)[0][4], "`direct` **no**, `by_node` **no**")
        self.assertEqual(rows(turns=40.0)[1][4], "**no**")
        book = hiding.of_book(2, 2, hiding.SHAPE["hidden_size"], 1e9, 1e9, hiding.VALUE_BYTES)
        self.assertEqual(rows(comm=book)[2][3:5], ["1.0 to 1.0", "yes"])

    def test_the_page_has_its_figures(self):
        page = (ROOT / "ch06_expert/dispatch.md").read_text(encoding="utf-8")
        for name in (*draw_dispatch.FIGURES, "classes.svg", "timelines.svg", "timelines_turns.svg"):
            self.assertIn(f"](figures/{name})", page)
        self.assertLess(set(draw_dispatch.FIGURES), set(make.SCHEMATICS))


class Drawings(unittest.TestCase):
    def test_every_expert_of_the_token_is_reached(self):
        for by_node in (False, True):
            found = draw_dispatch.copies(by_node)
            reached = {draw_dispatch.HOME}
            for start, end in found:  # in the order of the way
                self.assertIn(start, reached)
                reached.add(end)
            self.assertLessEqual(set(draw_dispatch.CHOSEN), reached)
        far = [rank for rank in draw_dispatch.CHOSEN if draw_dispatch.node_of(rank) > 0]
        self.assertEqual(len(draw_dispatch.crossing(draw_dispatch.copies(False))), len(far))
        self.assertEqual(len(draw_dispatch.crossing(draw_dispatch.copies(True))), 1)

    def test_a_rank_waits_for_what_nothing_hides(self):
        def widths(boxes, wanted):
            return sum(width for kind, _, width in boxes if kind == wanted)
        alone, shared, turns = draw_dispatch.FORWARD
        self.assertEqual(widths(alone[1], "wait"), widths(alone[2], "message"))
        self.assertLess(widths(shared[1], "wait"), widths(alone[1], "wait"))
        self.assertEqual(widths(turns[1], "wait"), 0)

    def test_every_rank_is_in_one_group_of_each_kind(self):
        inner, outer = draw_experts.groups_of(4)
        self.assertEqual(inner, [[0, 1, 2, 3], [4, 5, 6, 7]])
        self.assertEqual(outer, [[0, 4], [1, 5], [2, 6], [3, 7]])
        self.assertEqual(draw_experts.experts_at(1, 4, 8), "E2, E3")

    def test_the_token_goes_to_the_highest_scores(self):
        picked = draw_experts.chosen()
        self.assertEqual(len(picked), draw_experts.CHOICES)
        left_out = [score for expert, score in enumerate(draw_experts.SCORES) if expert not in picked]
        self.assertGreater(min(draw_experts.SCORES[expert] for expert in picked), max(left_out))
        self.assertAlmostEqual(sum(draw_experts.SCORES), 1)
        ranks = {expert // draw_experts.HERE for expert in picked}
        self.assertEqual(ranks, set(range(draw_experts.WAY_RANKS)))  # one stays, one travels
        for expert in picked:
            self.assertIn(f"{draw_experts.SCORES[expert]:.2f} E{expert}(x)", draw_experts.way())


class Latent(unittest.TestCase):
    """Formulas of the second page against what programs counted, and against sums by hand."""

    @classmethod
    def setUpClass(cls):
        cls.found = read_json(ROOT / "ch06_expert" / "figures" / "latent.json")

    def test_the_models_parameters_are_the_authors(self):
        estimated = read_json(ROOT / "ch06_expert" / "figures" / "memory.json")["problem"]
        own = next(case for case in estimated if case["case"] == "256 experts, DeepSeek-V3's")
        shape = memory.DEEPSEEK
        h, heads = shape["hidden_size"], shape["num_heads"]
        attention = h * 1536 + 1536 * heads * 192 + h * 576 + 512 * heads * 256 + heads * 128 * h
        mlps = 3 * 3 * h * 18432 + 58 * (257 * 3 * h * 2048 + 256 * h)
        norms = 61 * (2 * h + 1536 + 512) + h
        parameters = 61 * attention + mlps + norms + 2 * 129280 * h
        self.assertEqual(own["weights"], 2 * parameters)
        self.assertAlmostEqual(parameters / 1e9, 671.0, 1)
        active = memory.active_parameters(shape, parameters)
        self.assertAlmostEqual((active - 129280 * h) / 1e9, 36.6, 1)  # without the embedding

    def test_caches_are_the_formulas(self):
        for own in self.found["caches"]:
            self.assertEqual(own["bytes"], latent.cache_bytes(own["kind"],
                                                              latent.MODELS[own["model"]]), own)
        for own in self.found["over_tp"]:
            self.assertEqual(own["bytes"], latent.cache_bytes(own["kind"], latent.DEEPSEEK,
                                                              tp=own["tp"]), own)
        self.assertEqual(latent.cached_numbers("MLA", latent.DEEPSEEK), 576)
        self.assertEqual(latent.cached_numbers("GQA", latent.DEEPSEEK), 2048)
        for own in self.found["counted"]:
            self.assertEqual(own["cache"], latent_runs.cache_bytes(own["kind"]), own)

    def test_activations_are_those_of_the_estimate(self):
        for own in self.found["counted"]:
            self.assertEqual(own["peak"],
                             latent.find(self.found["estimated"], kind=own["kind"])["peak"], own)

    def test_operations_are_the_formulas(self):
        cases = self.found["operations"] + self.found["curves"]
        self.assertGreater(len(cases), 30)
        for own in cases:
            for name, formula in (("absorbed", latent.absorbed), ("expanded", latent.expanded)):
                self.assertEqual(own[name], formula(own["new"], own["keys"]), (name, own))
        for own in self.found["intensity"]:
            # A query and a key, then a probability and a value: two products of each head's width.
            width = 576 if own["kind"] == "MLA" else 128
            self.assertEqual(own["operations"], 4 * latent.DEEPSEEK["num_heads"] * width, own)

    def test_where_both_ways_cost_alike(self):
        for own in self.found["crossover"]:
            new, keys = own["new"], own["keys"]
            self.assertLessEqual(latent.absorbed(new, keys), latent.expanded(new, keys))
            self.assertGreater(latent.absorbed(new + 1, keys), latent.expanded(new + 1, keys))
        most = max(own["new"] for own in self.found["crossover"])
        self.assertAlmostEqual(most / latent.limit(), 1, 1)

    def test_messages_are_the_formulas(self):
        for own in self.found["ring"]:
            self.assertEqual(sum(own["sent"].values()), latent.ring_bytes(own["kind"]), own)
        for own in self.found["tp"]:
            self.assertEqual(sum(own["sent"].values()),
                             latent.tp_bytes(own["kind"], bool(own["flags"])), own)

    def test_models_of_as_many_parameters(self):
        sizes = {own["kind"]: own["parameters"] for own in self.found["estimated"]}
        self.assertLess(max(sizes.values()) / min(sizes.values()), 1.002)
        self.assertEqual(len(self.found["runs"]), len(latent_runs.KINDS) * len(latent_runs.SEEDS))

    def test_losses_that_overlap_are_noise(self):
        def runs(shift):
            return [{"kind": kind, "val_loss": loss + shift * (kind == "MLA")}
                    for kind in latent_runs.KINDS for loss in (2.0, 2.1)]
        self.assertEqual(latent_runs.apart(runs(0.1)), {})
        others = [kind for kind in latent_runs.KINDS if kind != "MLA"]
        self.assertEqual(latent_runs.apart(runs(0.2)), {"MLA": others})


if __name__ == "__main__":
    unittest.main()
