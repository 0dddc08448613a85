"""The chapter's trainer against reference.py: the same flags, the same numbers at every step.

  test_reference.py --binary build/release/bin/ch01_single_gpu [unittest arguments]

Needs a Python with NumPy; without one it exits with 77, which ctest reports as skipped.
"""

import importlib.util
import json
import math
import os
import random
import struct
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

import binary

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tools.gpu.tolerances import TOLERANCES  # noqa: E402

REFERENCE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "reference.py")
BINARY = None  # set by main()

# Relative tolerances by dtype and quantity; the reference always computes in float64.
# Rounding moves f64 by 1e-12 at most, and f32 on LOW_PRECISION by 1e-7; there the smallest fault
# looked at, a wrong RoPE sign, moves the loss by 2.5e-4 and the norm by 2.8e-3. bf16 rounds the
# loss by 3e-4 and the norm by 2e-3, so its case sees coarse faults only (a mask off by one:
# 2.8e-3 and 4.5e-2); the finer ones are left to f32 and f64.
TOLERANCE = {
    dtype: {"loss": TOLERANCES["loss"][dtype], "val_loss": TOLERANCES["loss"][dtype],
            "grad_norm": TOLERANCES["grad_norm"][dtype], "lr": 1e-10 if dtype == "f64" else 1e-6}
    for dtype in ("f64", "f32", "bf16")}

BASE = {
    "hidden_size": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "ffn_hidden_size": 48,
    "vocab_size": 61, "rope_theta": 10000, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    "steps": 5, "seq_len": 16, "micro_batch_size": 4, "grad_acc_steps": 2,
    "lr": 0.003, "min_lr_ratio": 0.1, "warmup_steps": 2, "adam_beta1": 0.9, "adam_beta2": 0.95,
    "adam_eps": 1e-8, "weight_decay": 0.1, "grad_clip": 1.0, "seed": 1,
    "data": "vocab61.uint16.bin", "token_dtype": "uint16", "data_order": "shuffled",
    "val_fraction": 0.1, "eval_samples": 3,
}

# Each differs from BASE as stated. "clipped": whether every step's norm exceeds grad_clip.
CONFIGS = {
    # Two query heads share a kv head; 8 samples a step over 84 windows: no epoch ends.
    "gqa_untied_shuffled": {},
    # No size is a multiple of a vector or a block; the seed needs more than 32 bits.
    "odd_sizes": {
        "hidden_size": 24, "num_layers": 3, "ffn_hidden_size": 40, "seq_len": 13,
        "micro_batch_size": 3, "seed": 2**40 + 12345, "rope_theta": 100, "rms_norm_eps": 0.01},
    # 11 windows and 8 samples a step: epochs end inside steps, offsets make samples wrap.
    "many_epochs": {"data": "short.uint16.bin", "val_fraction": 0, "eval_samples": 0},
    # 40 samples of 16 tokens pass the end of 460 training tokens, inside a sample.
    "tied_sequential_text": {
        "tie_word_embeddings": True, "vocab_size": 256, "data": "text.txt",
        "token_dtype": None,
        "data_order": "sequential", "num_heads": 2, "val_fraction": 0.25},
    "one_kv_head": {"num_kv_heads": 1, "rope_theta": 500000, "tie_word_embeddings": True},
    "wide_heads_linear_rope": {"head_dim": 12, "rope_type": "linear", "rope_factor": 3},
    # The waves of head_dim 8 and theta 100 are 6, 20, 63 and 199 long: kept, blended, stretched.
    "llama3_rope": {
        "rope_theta": 100, "rope_type": "llama3", "rope_factor": 8, "rope_low_freq_factor": 1,
        "rope_high_freq_factor": 4, "rope_original_max_position_embeddings": 64},
    # One pair as it is, two blended, one stretched; the amplitude of cosines is 0.95.
    "yarn_rope": {
        "rope_theta": 100, "rope_type": "yarn", "rope_factor": 4, "rope_beta_fast": 4,
        "rope_mscale": 0.7, "rope_mscale_all_dim": 1.2,
        "rope_original_max_position_embeddings": 64},
    # Long enough for several key blocks, with a remainder.
    "long_sequence": {
        "hidden_size": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "seq_len": 150,
        "micro_batch_size": 1, "ffn_hidden_size": 24, "val_fraction": 0.35},
    # Every norm is above grad_clip, which therefore sets the first moments.
    "clipping_active": {"grad_clip": 0.01, "adam_eps": 1e-3, "clipped": True},
    "clipping_inactive": {"grad_clip": 1e6, "adam_eps": 1e-3, "clipped": False},
    # The weights leave their start far behind: the loss moves by more than half a nat.
    "large_lr": {
        "lr": 0.03, "warmup_steps": 0, "min_lr_ratio": 0.5, "weight_decay": 0.5, "grad_clip": 1e6,
        "adam_beta1": 0.8, "adam_beta2": 0.9, "min_loss_change": 0.5},
    # The warm-up is longer than the run.
    "warmup_only": {"warmup_steps": 9, "num_kv_heads": 4, "grad_acc_steps": 1},
    # Token ids above 2^15 and, in uint32, above 2^16.
    "wide_uint16": {
        "hidden_size": 8, "num_layers": 1, "num_heads": 2, "ffn_hidden_size": 12, "seq_len": 8,
        "micro_batch_size": 1, "vocab_size": 50000, "data": "vocab50000.uint16.bin"},
    "wide_uint32": {
        "hidden_size": 8, "num_layers": 1, "num_heads": 2, "ffn_hidden_size": 12, "seq_len": 8,
        "micro_batch_size": 1, "vocab_size": 70000, "data": "vocab70000.uint32.bin",
        "token_dtype": "uint32", "tie_word_embeddings": True},
}

# Wide and fast enough for faults to stand out from the rounding of f32.
LOW_PRECISION = {"hidden_size": 64, "ffn_hidden_size": 96, "lr": 0.01}


def write_data(folder):
    """The token files of CONFIGS: skewed, so that there is something to learn."""
    rng = random.Random(7)
    for vocab, count, token_dtype, name in (
            (61, 1501, "uint16", "vocab61"), (61, 187, "uint16", "short"),
            (50000, 601, "uint16", "vocab50000"), (70000, 601, "uint32", "vocab70000")):
        tokens = [int(vocab * rng.random() ** 4) for _ in range(count - 1)] + [vocab - 1]
        rng.shuffle(tokens)
        with open(os.path.join(folder, f"{name}.{token_dtype}.bin"), "wb") as f:
            f.write(struct.pack("<%d%s" % (count, {"uint16": "H", "uint32": "I"}[token_dtype]),
                                *tokens))
    words = "a step of the schedule is a step of the ring, caf\u00e9 or not: ".split(" ")
    text = " ".join(rng.choice(words) for _ in range(400)).encode()[:613]
    with open(os.path.join(folder, "text.txt"), "wb") as f:
        f.write(text)


def command_flags(flags):
    result = []
    for name, value in flags.items():
        if value is not False and value is not None:
            result += ["--" + name] if value is True else ["--" + name, str(value)]
    return result


def run(command):
    """Standard output of a command that has to succeed."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=300,
                          universal_newlines=True)
    if done.returncode != 0:
        raise AssertionError("exit code %d: %s\n%s%s" % (
            done.returncode, " ".join(command), done.stdout[-2000:], done.stderr[-2000:]))
    return done.stdout


def differences(got, want, tolerance):
    """What differs, as lines of text; a NaN on either side differs."""
    lines = []
    if len(got) != len(want):
        lines.append(f"the binary wrote {len(got)} steps, the reference {len(want)}")
    for step, (a, b) in enumerate(zip(got, want)):
        for key in b:
            x, y = float(a.get(key, math.nan)), float(b[key])  # "nan" and "inf" are strings
            limit = 0 if key == "step" else tolerance[key] * abs(y)
            if not abs(x - y) <= limit:
                relative = abs(x - y) / abs(y) if y else math.inf
                lines.append(f"step {step}, {key}: binary {x!r}, reference {y!r}, "
                             f"relative difference {relative:.3g}, allowed {tolerance.get(key, 0)}")
    return lines


class Comparison(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        write_data(cls.folder.name)

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    def flags(self, changes):
        flags = dict(BASE, **changes)
        flags["data"] = os.path.join(self.folder.name, flags["data"])
        return flags

    def reference(self, flags):
        return [json.loads(line) for line in
                run([sys.executable, REFERENCE] + command_flags(flags)).splitlines()]

    def binary(self, flags, dtype, attention):
        with tempfile.TemporaryDirectory() as run_dir:
            run([BINARY] + command_flags(flags) + [
                "--dtype", dtype, "--attention", attention, "--device", "cpu",
                "--eval_interval", "1", "--sample_tokens", "0", "--run_dir", run_dir])
            with open(os.path.join(run_dir, "metrics.jsonl")) as f:
                return [json.loads(line) for line in f]

    def compare(self, flags, want, dtype, attentions=("naive", "blockwise")):
        for attention in attentions:
            with self.subTest(dtype=dtype, attention=attention):
                lines = differences(self.binary(flags, dtype, attention), want, TOLERANCE[dtype])
                if lines:
                    self.fail("\n  ".join([f"{len(lines)} differences, the first:"] + lines[:6]
                                          + ["flags: " + " ".join(command_flags(flags))]))

    def check_config(self, changes):
        """f64, and that the configuration still exercises what it is there for."""
        changes = dict(changes)
        clipped, min_loss_change = changes.pop("clipped", None), changes.pop("min_loss_change", 0)
        flags = self.flags(changes)
        want = self.reference(flags)
        self.assertEqual(len(want), flags["steps"])
        for record in want:
            self.assertEqual("val_loss" in record, flags["eval_samples"] > 0)
            if clipped is not None:
                self.assertEqual(record["grad_norm"] > flags["grad_clip"], clipped)
        self.assertGreaterEqual(abs(want[-1]["loss"] - want[0]["loss"]), min_loss_change)
        self.compare(flags, want, "f64")


class Parity(Comparison):
    def test_the_reference_passes_its_own_test(self):
        run([sys.executable, REFERENCE, "--self_test"])

    def test_float32(self):
        flags = self.flags(LOW_PRECISION)
        self.compare(flags, self.reference(flags), "f32")

    def test_bfloat16(self):
        flags = self.flags(LOW_PRECISION)
        self.compare(flags, self.reference(flags), "bf16")


def add_config_test(name, changes):
    setattr(Parity, "test_float64_" + name, lambda self: self.check_config(changes))


for config_name, config_changes in CONFIGS.items():
    add_config_test(config_name, config_changes)


def main():
    global BINARY
    BINARY, rest = binary.parse(__doc__)
    if importlib.util.find_spec("numpy") is None:
        print("skipped: the reference needs NumPy (on Debian and Ubuntu: apt install "
              "python3-numpy)", file=sys.stderr)
        sys.exit(77)
    unittest.main(argv=[sys.argv[0]] + rest)


if __name__ == "__main__":
    main()
