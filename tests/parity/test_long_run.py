"""A rank of a long run keeps as much after many steps as after few.

  test_long_run.py --bin build/release/bin [--chapter ch06_expert]

After the first 2,000 of 20,000 tiny steps neither the memory that a rank's process has in use nor
the number of its open files grows.
"""
import os
import sys
import time
from pathlib import Path

import test_ranks
from test_ranks import UNTRACED, RankTest, ranks_alive, records

LEVEL, END = 2_000, 20_000
MOST_KIB = 1024  # 60 bytes a step
SHAPE = ["--num_layers", "1", "--hidden_size", "8", "--num_heads", "2", "--num_kv_heads", "1",
         "--ffn_hidden_size", "8", "--seq_len", "8", "--micro_batch_size", "1"]


def held(pid):
    """(KiB of memory in use, open files) of a process."""
    status = (Path("/proc") / str(pid) / "status").read_text()
    kib = next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS:"))
    return int(kib), len(os.listdir(f"/proc/{pid}/fd"))


class LongRun(RankTest):
    def steps_done(self):
        try:
            return (self.run_dir / "metrics.jsonl").read_bytes().count(b"\n")
        except FileNotFoundError:
            return 0

    def held_after(self, process, steps):
        """What each rank holds when so many steps are done."""
        deadline = time.monotonic() + 300
        while self.steps_done() < steps:
            self.assertIsNone(process.poll(), "the run has ended")
            self.assertLess(time.monotonic(), deadline, f"{self.steps_done()} steps in 300 s")
            time.sleep(0.05)
        return [held(records(self.run_dir)[rank][0]["pid"]) for rank in range(2)]

    def test_memory_and_files_are_level_after_the_first_steps(self):
        process = self.start(2, test_ranks.CHAPTER, *SHAPE, *UNTRACED, "--steps", "1000000",
                             "--dp_size", "2", "--zero_stage", "2", "--eval_interval", "500",
                             "--eval_samples", "2", "--checkpoint_interval", "5000")
        try:
            before = self.held_after(process, LEVEL)
            after = self.held_after(process, END)
        finally:
            process.terminate()
            self.finish(process)
        for rank, ((kib, files), (kib_later, files_later)) in enumerate(zip(before, after)):
            self.assertLess(kib_later - kib, MOST_KIB, f"rank {rank}: {kib} KiB, then {kib_later}")
            self.assertEqual(files_later, files, f"open files of rank {rank}")
        self.assertEqual(ranks_alive(self.run_dir), [])


if __name__ == "__main__":
    sys.exit(test_ranks.main())
