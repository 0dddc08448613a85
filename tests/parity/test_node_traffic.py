"""The example that counts what experts on several nodes are sent: its ledgers say what its formula says.

  test_node_traffic.py --binary build/release/bin/ch06_expert_node_traffic [unittest arguments]
"""
import subprocess
import sys
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import binary  # noqa: E402  (the path comes first)

from ch06_expert.figures import nodes  # noqa: E402

BINARY = None
FLAGS = ("--tokens_of_rank", "64", "--num_experts", "32", "--num_experts_per_tok", "4")


def run(*flags):
    return subprocess.run([str(BINARY), *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          text=True, timeout=120, check=False)


class NodeTraffic(unittest.TestCase):
    def test_counted_bytes_are_the_formulas(self):
        for size, count in ((2, 4), (4, 2), (1, 8)):
            done = run(*FLAGS, "--node_size", str(size))
            self.assertEqual(done.returncode, 0, done.stderr)
            found = nodes.read(done.stdout)
            self.assertEqual((found["nodes"], found["node_size"], found["experts"], found["k"]),
                             (count, size, 32, 4))
            self.assertEqual(len(found["found"]), 2 * count)
            for own in found["found"]:
                self.assertEqual(own["between"], own["between_formula"], own)
                self.assertEqual(own["inside"], own["inside_formula"], own)

    def test_few_nodes_save_where_each_gets_one_copy(self):
        found = nodes.read(run(*FLAGS).stdout)
        direct, by_node = ([own["between"] for own in nodes.of_way(found, way)]
                           for way in ("direct", "by_node"))
        self.assertEqual(by_node, sorted(by_node))
        self.assertLess(max(direct) / min(direct), 1.1)
        # k choices, all on one of n nodes: a copy in place of k, which has k choices and gates, too.
        self.assertLess(by_node[0] / direct[0], 1 / 3)
        self.assertGreater(by_node[0] / direct[0], 1 / 4)

    def test_nodes_of_different_sizes_are_refused(self):
        refused = run("--node_size", "3")
        self.assertEqual((refused.returncode, refused.stdout), (2, ""))
        self.assertIn("node_size of ep_size: 3 must divide 8; try 1, 2, 4 or 8", refused.stderr)


def main():
    global BINARY
    BINARY, rest = binary.parse(__doc__)
    unittest.main(argv=[sys.argv[0]] + rest)


if __name__ == "__main__":
    main()
