"""Tests of ./book layout: what it says of a run is what the run's ledger and report have.

    test_layout.py --bin build/release/bin [unittest arguments]
    test_layout.py --binary build/release/bin/ch07_5d NAME        # as a seeded fault asks
"""
import contextlib
import io
import json
import sys
import tempfile
import unittest
from collections import defaultdict
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.parity import binary  # noqa: E402
from tools import chapters  # noqa: E402
from tools.base import BookError  # noqa: E402
from tools.book import short_runs  # noqa: E402
from tools.look import layout  # noqa: E402
from tools.look import trace as traces  # noqa: E402

CHAPTER = chapters.resolve("ch07")
PROGRAM = None  # set below
STEPS = 3
# Every dimension, of which some groups lie on nodes of four ranks and some do not.
FLAGS = {"hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "ffn_hidden_size": 48, "num_layers": 2, "seq_len": 32,
         "micro_batch_size": 1, "grad_acc_steps": 2, "num_experts": 4, "ep_size": 2, "dp_size": 1, "cp_size": 2,
         "pp_size": 2, "tp_size": 2, "sequence_parallel": None, "zero_stage": 1, "mesh_order": "tp,dp,pp,cp",
         "node_size": 4, "dtype": "f32", "steps": STEPS, "trace_steps": STEPS}


class Groups(unittest.TestCase):
    def test_every_group_belongs_to_a_dimension(self):
        for dimension, groups in (("dp", ("dp", "dp_cp", "edp")), ("tp", ("tp", "tp_kv")), ("ep", ("ep", "ep_counts")),
                                  ("cp", ("cp", "cp_ring", "cp_ring_gradients", "cp_heads")),
                                  ("pp", ("pp", "embedding", "mirror")), ("all", ("world", "stage", "copies"))):
            self.assertEqual({layout.dimension_of(group) for group in groups}, {dimension})

    def test_formulas_are_those_of_the_report(self):
        report = ("| gradients sent | 12 bytes a step by rank 0, buckets: 3; by formula 12 |\n"
                  "| activations sent over tp | 7 bytes a step by rank 0, by formula 8, mean of all stages |\n"
                  "| rows sent over ep | 5 bytes a step by rank 0, with even load 6 |\n| peak memory | 10.5 MiB |\n")
        self.assertEqual(layout.declared(report), {"dp": (12, 12), "tp": (7, 8), "ep": (5, 6)})

    def test_a_trace_of_one_step_is_refused(self):
        with tempfile.TemporaryDirectory(prefix="test_layout_") as folder:
            for name, text in (("ledger.json", "{}"), ("report.md", "")):
                (Path(folder) / name).write_text(text)
            with mock.patch.object(traces, "load"), mock.patch.object(traces, "steps", return_value={1: []}):
                with self.assertRaisesRegex(BookError, "fewer than two steps.*--trace_steps 3") as caught:
                    layout.read(folder)
            self.assertEqual(caught.exception.code, 2)

    def test_a_run_that_has_not_ended_is_refused(self):
        with tempfile.TemporaryDirectory(prefix="test_layout_") as folder:
            with self.assertRaisesRegex(BookError, "ledger.json is missing") as caught:
                layout.read(folder)
            self.assertEqual(caught.exception.code, 2)


class Alone(unittest.TestCase):
    """A run on one rank."""

    def test_that_nothing_was_sent_is_a_sentence(self):
        flags = {**FLAGS, **{name: 1 for name in ("ep_size", "cp_size", "pp_size", "tp_size")}, "node_size": 0, "zero_stage": 0}
        del flags["sequence_parallel"]
        with contextlib.redirect_stdout(io.StringIO()) as said:
            self.assertEqual(short_runs.look_into(PROGRAM, 1, layout.show, **flags), 0)
        self.assertIn("This run had one rank, which sends nothing; ", said.getvalue())
        self.assertNotIn("messages", said.getvalue())


class Run(unittest.TestCase):
    """A run on eight ranks."""

    @classmethod
    def setUpClass(cls):
        def look(run_dir):
            return (layout.read(run_dir)[0], json.loads((run_dir / "ledger.json").read_text(encoding="utf-8")),
                    traces.exposed_by_group(traces.load(run_dir / traces.RECORDED)))

        rows, cls.ledger, cls.exposed = short_runs.look_into(PROGRAM, 8, look, **FLAGS)
        cls.rows = {row.dimension: row for row in rows}

    def test_there_is_a_row_for_every_dimension(self):
        self.assertEqual(list(self.rows), list(layout.ORDER))

    def test_bytes_are_those_of_the_ledger(self):
        sent = defaultdict(lambda: [0, 0])
        for name, entry in self.ledger.items():
            own = sent[layout.dimension_of(name.split(".")[0])]
            own[0] += entry["wire_bytes"] - entry["net_bytes"]
            own[1] += entry["net_bytes"]
        for dimension in ("dp", "tp", "cp", "pp"):  # over ep goes what routers choose, another number in each step
            row = self.rows[dimension]
            for found, expected in zip((row.inside, row.outside), sent[dimension]):
                # Beside its steps, a group is connected, and some report a few bytes.
                self.assertAlmostEqual(STEPS * found, expected, delta=5e-3 * expected, msg=dimension)

    def test_bytes_are_those_that_the_report_counts(self):
        for dimension in ("dp", "tp", "cp", "pp"):
            row = self.rows[dimension]
            self.assertIsNotNone(row.declared, dimension)
            self.assertAlmostEqual((row.inside + row.outside) / row.declared[0], 1, delta=2e-3, msg=dimension)

    def test_links_are_those_of_the_groups(self):
        self.assertEqual(self.rows["tp"].inside, 0)  # the slowest axis
        self.assertGreater(self.rows["tp"].outside, 0)
        self.assertEqual(self.rows["cp"].outside, 0)  # the fastest
        self.assertGreater(self.rows["cp"].inside, 0)

    def test_waits_of_all_dimensions_are_those_of_the_trace(self):
        means = [sum(map(sum, groups.values())) / 8 for groups in list(self.exposed.values())[:-1]]
        self.assertAlmostEqual(sum(row.exposed_mean for row in self.rows.values()), sum(means) / len(means), places=3)


if __name__ == "__main__":
    PROGRAM = binary.given(CHAPTER.name)
    unittest.main()
