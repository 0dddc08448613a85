"""What the assembler says of CUDA kernels: registers, shared memory, spills, and what it changed.

  ptxas.py compile COMMAND...         runs nvcc; its report goes beside the object that -o names
  ptxas.py table OUTPUT OBJECTS...    one line a kernel and GPU; fails where one is wrong

A kernel spills where it needs more registers than a thread can have: then numbers go to memory and
come back, unseen in the source. So they do where an array has no place in registers (local
memory). Where a thread touches accumulators that wgmma has under way, the assembler waits for them,
or runs products one after another, and says so as information alone (C7510, C7517 and others like
them). All of these are wrong. Exit code: the command's, or 1.
"""
import re
import subprocess
import sys
from pathlib import Path

ENTRY = re.compile(
    r"Compiling entry function '(?P<name>\w+)' for '(?P<gpu>\w+)'.*?"
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, "
    r"(?P<loads>\d+) bytes spill loads.*?Used (?P<registers>\d+) registers(?P<rest>[^\n]*)", re.S)
CHANGED = re.compile(r"^.*\bC75\d\d\b.*$", re.M)


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
    """[(mangled name, GPU, registers, bytes of static shared memory, of local memory, spilled)]"""
    found = []
    for entry in ENTRY.finditer(text):
        shared = re.search(r"(\d+) bytes smem", entry["rest"])
        found.append((entry["name"], entry["gpu"], int(entry["registers"]),
                      int(shared[1]) if shared else 0, int(entry["stack"]),
                      int(entry["stores"]) + int(entry["loads"])))
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
    """The lines of the table, and what is wrong."""
    reports = {Path(path).name.removesuffix(".o"): Path(path + ".ptxas").read_text()
               for path in objects}
    rows = [(file, *kernel) for file, text in reports.items() for kernel in kernels(text)]
    names = readable(sorted({row[1] for row in rows}))
    rows = sorted((file, names[name], *rest) for file, name, *rest in rows)
    width = max((len(row[1]) for row in rows), default=0)
    lines = [f"{'file':24} {'kernel':{width}} {'GPU':8} {'registers':>9} {'shared':>7} "
             f"{'local':>7} {'spilled':>7}"]
    lines += [f"{file:24} {name:{width}} {gpu:8} {registers:9} {shared:7} {local:7} {spilled:7}"
              for file, name, gpu, registers, shared, local, spilled in rows]
    wrong = [f"{file}: {name} on {gpu} {what} {count} bytes"
             for file, name, gpu, *_, local, spilled in rows
             for what, count in (("spills", spilled), ("has local memory of", local)) if count]
    wrong += [f"{file}: the assembler changed it: {line.strip()}" for file, text in reports.items()
              for line in CHANGED.findall(text)]
    return lines, wrong


def main(arguments):
    if arguments[0] == "compile":
        return compile_with(arguments[1:])
    lines, wrong = table(arguments[2:])
    Path(arguments[1]).write_text("\n".join(lines) + "\n")
    print("\n".join(wrong), end="\n" if wrong else "", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
