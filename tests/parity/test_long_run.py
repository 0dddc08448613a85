"""A rank of a long run keeps as much after many steps as after few.

  test_long_run.py --bin build/release/bin [--chapter ch06_expert]

After the first 2,000 of 20,000 tiny steps neither the memory of its own that a rank's process has in
use nor the number of its open files grows: on one rank, and on two with data parallelism, with a
pipeline, or with experts, one of these in turn.
"""
import os
import sys
import time
from pathlib import Path

import test_ranks
from test_ranks import UNTRACED, RankTest, environment, ranks_alive, records

from tools.test.testing import in_turn

LEVEL, END = 2_000, 20_000
MOST_KIB = 192  # 11 bytes a step
# Else what a run keeps would lie in memory that its start has left free, and not be seen.
RETURNS_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "16384", "MALLOC_TRIM_THRESHOLD_": "16384"}
SHAPE = ["--num_layers", "2", "--hidden_size", "8", "--num_heads", "2", "--num_kv_heads", "1",
         "--ffn_hidden_size", "8", "--seq_len", "8", "--micro_batch_size", "1"]
# {layout: (ranks, flags)}
LAYOUTS = {
    "one rank": (1, []),
    "data parallelism": (2, ["--dp_size", "2", "--zero_stage", "2"]),
    "a pipeline": (2, ["--pp_size", "2", "--grad_acc_steps", "2"]),
    "experts": (2, ["--dp_size", "2", "--ep_size", "2", "--num_experts", "2", "--num_experts_per_tok", "1",
                    "--moe_ffn_hidden_size", "8"]),
}


def held(pid):
    """(KiB of memory that no file holds, open files) of a process."""
    status = (Path("/proc") / str(pid) / "status").read_text()
    kib = next(line.split()[1] for line in status.splitlines() if line.startswith("RssAnon:"))
    return int(kib), len(os.listdir(f"/proc/{pid}/fd"))


def parent(pid):
    return int((Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])


class LongRun(RankTest):
    def steps_done(self):
        try:
            return (self.run_dir / "metrics.jsonl").read_bytes().count(b"\n")
        except FileNotFoundError:
            return 0

    def held_after(self, process, ranks, steps):
        """What each rank holds when so many steps are done."""
        deadline = time.monotonic() + 300
        while self.steps_done() < steps:
            self.assertIsNone(process.poll(), "the run has ended")
            self.assertLess(time.monotonic(), deadline, f"{self.steps_done()} steps in 300 s")
            time.sleep(0.05)
        return [held(pid) for pid in self.pids(ranks)]

    def pids(self, ranks):
        """Of the ranks, by their flight records; one rank keeps none, and has a child of the same program."""
        if ranks > 1:
            return [records(self.run_dir)[rank][0]["pid"] for rank in range(ranks)]
        own = [pid for pid in ranks_alive(self.run_dir)
               if os.path.basename(os.readlink(f"/proc/{pid}/exe")) == test_ranks.CHAPTER]
        return [pid for pid in own if parent(pid) not in own]

    def test_memory_and_files_are_level_after_the_first_steps(self):
        for layout in in_turn(LAYOUTS):
            ranks, flags = LAYOUTS[layout]
            self.run_dir = self.folder / layout.replace(" ", "_")
            with self.subTest(layout):
                self.check_level(ranks, *flags)

    def check_level(self, ranks, *flags):
        process = self.start(ranks, test_ranks.CHAPTER, *SHAPE, *UNTRACED, "--steps", "1000000", *flags,
                             "--eval_interval", "500", "--eval_samples", "2", "--checkpoint_interval", "5000",
                             env=environment(**RETURNS_MEMORY))
        try:
            before = self.held_after(process, ranks, LEVEL)
            after = self.held_after(process, ranks, END)
        finally:
            process.terminate()
            self.finish(process)
        for rank, ((kib, files), (kib_later, files_later)) in enumerate(zip(before, after)):
            self.assertLess(kib_later - kib, MOST_KIB,
                            f"KiB of rank {rank} after {LEVEL} steps: {kib}, after {END}: {kib_later}")
            self.assertEqual(files_later, files, f"open files of rank {rank}")
        self.assertEqual(ranks_alive(self.run_dir), [])


if __name__ == "__main__":
    sys.exit(test_ranks.main())
