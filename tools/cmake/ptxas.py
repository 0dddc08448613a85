"""What the assembler says of CUDA kernels: registers, shared memory, spills.

  ptxas.py compile COMMAND...         runs nvcc; its report goes beside the object that -o names
  ptxas.py table OUTPUT OBJECTS...    one line a kernel and GPU; fails where a kernel spills

A kernel spills where it needs more registers than a thread can have: then numbers go to memory and
come back, unseen in the source. Exit code: the command's, or 1 for a spill.
"""
import re
import subprocess
import sys
from pathlib import Path

ENTRY = re.compile(
    r"Compiling entry function '(?P<name>\w+)' for '(?P<gpu>\w+)'.*?"
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, "
    r"(?P<loads>\d+) bytes spill loads.*?Used (?P<registers>\d+) registers(?P<rest>[^\n]*)", re.S)


def compile_with(command):
    """Runs the command; lines of the report go into OBJECT.ptxas, all others to the screen."""
    result = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    report = [line for line in result.stderr.splitlines() if is_report(line)]
    for line in result.stderr.splitlines():
        if not is_report(line):
            print(line, file=sys.stderr)
    if result.returncode == 0 and "-o" in command:
        Path(command[command.index("-o") + 1] + ".ptxas").write_text("\n".join(report) + "\n")
    return result.returncode


def is_report(line):
    return line.startswith("ptxas info") or "bytes stack frame" in line


def kernels(text):
    """[(mangled name, GPU, registers, bytes of static shared memory, bytes spilled)]"""
    found = []
    for entry in ENTRY.finditer(text):
        shared = re.search(r"(\d+) bytes smem", entry["rest"])
        found.append((entry["name"], entry["gpu"], int(entry["registers"]),
                      int(shared[1]) if shared else 0, int(entry["stores"]) + int(entry["loads"])))
    return found


def readable(names):
    """{mangled: without namespaces, parameters and long type names}"""
    try:
        text = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True,
                              check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return {name: name for name in names}
    short = {}
    for name, line in zip(names, text.splitlines()):
        line = line.replace("(anonymous namespace)::", "").replace("usp::cuda::", "")
        short[name] = line.removeprefix("void ").split("(")[0].replace("__nv_bfloat16", "bf16")
    return short


def table(objects):
    """The lines of the table, and the kernels that spill."""
    rows = [(Path(path).name.removesuffix(".o"), *kernel) for path in objects
            for kernel in kernels(Path(path + ".ptxas").read_text())]
    names = readable(sorted({row[1] for row in rows}))
    rows = sorted((file, names[name], gpu, registers, shared, spilled)
                  for file, name, gpu, registers, shared, spilled in rows)
    width = max((len(row[1]) for row in rows), default=0)
    lines = [f"{'file':24} {'kernel':{width}} {'GPU':8} {'registers':>9} {'shared':>7} {'spilled':>7}"]
    lines += [f"{file:24} {name:{width}} {gpu:8} {registers:9} {shared:7} {spilled:7}"
              for file, name, gpu, registers, shared, spilled in rows]
    return lines, [f"{row[0]}: {row[1]} on {row[2]} spills {row[5]} bytes" for row in rows if row[5]]


def main(arguments):
    if arguments[0] == "compile":
        return compile_with(arguments[1:])
    lines, spills = table(arguments[2:])
    Path(arguments[1]).write_text("\n".join(lines) + "\n")
    print("\n".join(spills), end="\n" if spills else "", file=sys.stderr)
    return 1 if spills else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
