"""What the assembler's report of a CUDA kernel has to say, and may not.

    python3 tests/course/test_ptxas.py
"""
import contextlib
import io
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools" / "cmake"))

import ptxas  # noqa: E402

REPORT = """ptxas info    : 0 bytes gmem
{said}ptxas info    : Compiling entry function '_Z11some_kernelPf' for 'sm_90a'
ptxas info    : Function properties for _Z11some_kernelPf
    {stack} bytes stack frame, {stores} bytes spill stores, {loads} bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers, 128 bytes smem
ptxas info    : Compile time = 12.5 ms
"""
SERIALIZED = ("ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions "
              "are serialized due to non wgmma instructions defining accumulator registers\n")
WAITED = ("ptxas info    : (C7517) warpgroup.wait is injected in around line 447 by compiler to "
          "allow use of registers defined by GMMA in function '_Z11some_kernelPf'\n")


class Table(unittest.TestCase):
    def table(self, said="", stack=0, stores=0, loads=0):
        """(exit code, the table, what is wrong)"""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "some.cu.o")
            Path(f"{path}.ptxas").write_text(
                REPORT.format(said=said, stack=stack, stores=stores, loads=loads), encoding="utf-8")
            output = Path(folder, "kernels.txt")
            wrong = io.StringIO()
            with contextlib.redirect_stderr(wrong):
                code = ptxas.main(["table", str(output), str(path)])
            return code, output.read_text(encoding="utf-8"), wrong.getvalue()

    def test_a_kernel_without_faults_is_a_line(self):
        code, table, wrong = self.table()
        self.assertEqual((code, wrong), (0, ""))
        self.assertEqual(table.splitlines()[1].split(),
                         ["some.cu", "some_kernel", "sm_90a", "168", "128", "0", "0"])

    def test_spills_and_local_memory_fail(self):
        code, _, wrong = self.table(stack=16, stores=8, loads=4)
        kernel = "some.cu: some_kernel on sm_90a"
        self.assertEqual((code, wrong), (1, f"{kernel} spills 12 bytes\n"
                                            f"{kernel} has local memory of 16 bytes\n"))

    def test_what_the_assembler_changed_fails(self):
        for said in (SERIALIZED, WAITED):
            code, _, wrong = self.table(said)
            self.assertEqual((code, wrong), (1, f"some.cu: the assembler changed it: {said}"))

    def test_all_of_the_report_is_kept_from_the_screen(self):
        for line in REPORT.format(said=SERIALIZED, stack=0, stores=0, loads=0).splitlines():
            self.assertTrue(ptxas.is_report(line), line)


if __name__ == "__main__":
    unittest.main()
