"""Documents that a file of tokens names are the documents of --document_mask.

  test_documents.py --binary build/release/bin/ch04_context [unittest arguments]
"""

import json
import os
import random
import struct
import subprocess
import tempfile
import unittest
from pathlib import Path

import binary

BINARY = None  # set by main()
SEPARATOR = 7
FLAGS = ["--hidden_size", "16", "--num_layers", "2", "--num_heads", "2", "--num_kv_heads", "2",
         "--ffn_hidden_size", "24", "--vocab_size", "256", "--seq_len", "32", "--micro_batch_size",
         "4", "--steps", "3", "--eval_interval", "3", "--sample_tokens", "0", "--dtype", "f64",
         "--trace_steps", "0"]


class Documents(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="test_documents_")
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        rng = random.Random(5)
        self.documents = [[rng.randrange(8, 64) for _ in range(rng.randrange(1, 40))] + [SEPARATOR]
                          for _ in range(60)]
        self.tokens = [token for document in self.documents for token in document]

    def train(self, name, *flags):
        """Losses and norms of every step, as the text that stands in the file."""
        subprocess.run([BINARY, *FLAGS, "--data", self.folder / name, "--run_dir",
                        self.folder / "run", "--overwrite", *flags], check=True, timeout=120,
                       stdout=subprocess.DEVNULL, env=dict(os.environ, OMP_NUM_THREADS="1"))
        return [(step["loss"], step["grad_norm"], step.get("val_loss")) for step in
                (json.loads(line, parse_float=str)
                 for line in (self.folder / "run/metrics.jsonl").read_text().splitlines())]

    def write(self, name, tokens):
        data = struct.pack(f"<{len(tokens)}H", *tokens)
        (self.folder / name).write_bytes(data)
        return len(data)

    def test_an_estimate_has_one_document_a_sample_which_is_the_most_work(self):
        """It reads no data, so it knows none of the others."""
        def rows(*flags):
            text = subprocess.run([BINARY, *FLAGS, "--estimate", "--world_size", "2", "--cp_size", "2", *flags],
                                  check=True, timeout=120, capture_output=True, text=True).stdout
            return [line for line in text.splitlines() if "activations" in line or "FLOPs" in line]
        self.assertEqual(rows("--document_mask"), rows())
        self.assertGreater(len(rows()), 2)

    def test_an_index_names_the_documents_that_a_separator_would(self):
        self.write("plain.bin", self.tokens)
        by_separator = self.train("plain.bin", "--document_mask", "--document_separator",
                                  str(SEPARATOR))
        self.assertNotEqual(by_separator, self.train("plain.bin"))
        self.write("m.bin", self.tokens)
        lengths, count = [len(document) for document in self.documents], len(self.documents)
        begins = [2 * sum(lengths[:i]) for i in range(count)]
        (self.folder / "m.idx").write_bytes(
            b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, count, count + 1)
            + struct.pack(f"<{count}i{count}q{count + 1}q", *lengths, *begins, *range(count + 1)))
        self.assertEqual(self.train("m.bin", "--document_mask"), by_separator)
        self.assertEqual(self.train("m.idx", "--document_mask"), by_separator)

    def test_lines_of_json_are_documents(self):
        texts = ["".join(chr(token + 32) for token in document) for document in self.documents]
        (self.folder / "t.jsonl").write_text(
            "".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(texts)))
        (self.folder / "t.txt").write_bytes(b"".join(text.encode() + b"\0" for text in texts))
        self.assertEqual(self.train("t.jsonl", "--document_mask"),
                         self.train("t.txt", "--document_mask", "--document_separator", "0"))


def main():
    global BINARY
    BINARY, rest = binary.parse(__doc__)
    unittest.main(argv=[__file__] + rest)


if __name__ == "__main__":
    main()
