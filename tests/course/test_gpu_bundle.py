"""What ./book gpu-bundle packs, unpacked where there is glibc and nothing else: it starts, and two ranks train.

    python3 tests/course/test_gpu_bundle.py        builds the bundle: needs nvcc, and chroot as root
"""
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tools.gpu import gpu_bundle, gpu_part  # noqa: E402
from tools.process import descendants  # noqa: E402
from tools.run import gpu  # noqa: E402

SKIPPED = 77  # as ctest has it
# A chapter asks the kernel for cores and processes; nothing of the system's files is seen else.
ENTER = """
root=$1; shift
for folder in proc sys dev; do
  mkdir -p "$root/$folder" && mount --rbind "/$folder" "$root/$folder" || exit 77
done
exec chroot "$root" "$@"
"""


def why_not():
    """Why this test cannot run here, "" if it can."""
    if gpu.find_tool("nvcc") is None:
        return "there is no nvcc"
    probe = ["unshare", "-m", "sh", "-c", "mount --rbind /proc /proc && chroot / true"]
    try:
        allowed = subprocess.run(probe, stderr=subprocess.DEVNULL, check=False).returncode == 0
    except OSError:
        allowed = False
    return "" if allowed else "chroot is not allowed"


class BareRoot(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        scratch = tempfile.TemporaryDirectory(prefix="test_gpu_bundle_")
        cls.addClassCleanup(scratch.cleanup)
        cls.root = Path(scratch.name) / "root"
        cls.root.mkdir()
        file = Path(scratch.name) / "bundle.tar.xz"
        subprocess.run([sys.executable, str(ROOT / "book"), "gpu-bundle", str(file), "--no-install"],
                       check=True)
        cls.size = file.stat().st_size
        with tarfile.open(file) as archive:
            archive.extractall(cls.root)
        cls.bundle = cls.root / gpu_bundle.TOP
        cls.add_glibc()

    @classmethod
    def add_glibc(cls):
        """The loader where programs look for it, glibc's libraries in a folder of their own."""
        (cls.root / "glibc").mkdir()
        for program in (cls.bundle / "bin").iterdir():
            text = subprocess.run(["ldd", str(program)], stdout=subprocess.PIPE, text=True,
                                  check=True).stdout
            for path in re.findall(r"(/\S+) \(0x", text):
                if gpu_bundle.GLIBC.match(os.path.basename(path)):
                    in_place = cls.root / path.lstrip("/")
                    folder = in_place.parent if "ld-linux" in path else cls.root / "glibc"
                    folder.mkdir(parents=True, exist_ok=True)
                    shutil.copy(path, folder)

    def run_inside(self, *command):
        """(output, exit code) of a program of the bundle in the bare root; it has a minute."""
        top = f"/{gpu_bundle.TOP}"
        env = {"PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin", "OMP_NUM_THREADS": "1",
               "OMP_WAIT_POLICY": "passive", **gpu_part.ONE_MACHINE,
               "LD_LIBRARY_PATH": f"{top}/lib:{top}/lib/gcc:/glibc"}  # on the machine, nowhere
        child = subprocess.Popen(["unshare", "-m", "sh", "-c", ENTER, "sh", str(self.root),
                                  f"{top}/bin/{command[0]}", *command[1:]], env=env,
                                 stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                 stderr=subprocess.STDOUT, text=True, start_new_session=True)
        try:
            return child.communicate(timeout=60)[0], child.returncode
        finally:
            if child.poll() is None:  # ranks are in sessions of their own
                for pid in [*descendants(child.pid), child.pid]:
                    os.kill(pid, signal.SIGKILL)
                child.communicate()

    def test_two_ranks_train_on_the_cpu(self):
        top = f"/{gpu_bundle.TOP}"
        text, code = self.run_inside(
            "mpiexec", "-n", "2", f"{top}/bin/ch02_data_parallel", "--data", f"{top}/data/corpus.txt",
            "--steps", "3", "--micro_batch_size", "4", "--sample_tokens", "0", "--run_dir", "/run")
        self.assertEqual(code, 0, text)
        self.assertIn("2 ranks x 1 thread", text)
        lines = (self.root / "run/metrics.jsonl").read_text().splitlines()
        self.assertEqual([json.loads(line)["step"] for line in lines], [1, 2, 3])

    def test_the_emulated_gpu_counts(self):
        text, code = self.run_inside("gpu_counts_emulated")
        self.assertEqual(code, 0, text)
        self.assertIn('"kernel": "add_kernel", "per_load": 16', text)

    def test_without_a_driver_programs_for_gpus_say_so(self):
        if gpu.find_gpus():
            self.skipTest("there is a driver")
        text, code = self.run_inside("ch01_single_gpu", "--device", "cuda", "--run_dir", "/none")
        self.assertEqual(code, 2, text)
        self.assertIn("there is no NVIDIA driver here", text)
        self.assertEqual(self.run_inside("test_kernels_gpu")[1], SKIPPED)

    def test_nothing_of_this_machine_is_needed(self):
        """All that programs load lies in the bundle, in glibc or in CUDA."""
        self.assertLessEqual(self.size, gpu_bundle.LIMIT_MB * gpu_bundle.MB)
        names = {path.name for path in (self.bundle / "lib").glob("*.so*")}
        self.assertIn("libmpich.so.12", names)
        self.assertEqual([name for name in names if gpu_bundle.OF_CUDA.match(name)], [])

    def test_the_check_says_that_there_is_no_gpu(self):
        if gpu.find_gpus():
            self.skipTest("there is one")
        result = subprocess.run([str(self.bundle / "gpu-check")], cwd=self.root, check=False,
                                stderr=subprocess.PIPE, text=True)
        self.assertEqual(result.returncode, 2)
        self.assertRegex(result.stderr, "^error: there is no GPU here: .*\n$")


if __name__ == "__main__":
    reason = why_not()
    if reason:
        print(f"skipped: {reason}")
        sys.exit(SKIPPED)
    unittest.main()
