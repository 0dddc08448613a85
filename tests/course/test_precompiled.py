"""A header precompiled with other options than a source has silently undoes the source's own.

    python3 tests/course/test_precompiled.py       needs cmake and no build: it only configures

GCC takes over how the header was compiled, -ffp-contract=off for example, and says nothing. A
source with options of its own has the property SKIP_PRECOMPILE_HEADERS, or headers that are
precompiled with the same ones.
"""
import json
import re
import shlex
import shutil
import subprocess
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HEADER = re.compile(r"(.*/cmake_pch\.hxx)(?:\.cxx)?$")


def options(words):
    """{option: its value}, of those that change what is compiled; the last one counts."""
    found = {}
    for word in words:
        match = re.fullmatch(r"-([fm])(no-)?([\w.-]+?)(?:=(.*))?", word)
        if match:
            kind, off, name, value = match.groups()
            found[f"-{kind}{name}"] = value or ("off" if off else "on")
        elif re.fullmatch(r"-O\w*|-g\d?|-std=.*", word):
            found[word[:2]] = word
    return found


def differences(compile_commands):
    """Of every source that includes a header precompiled with other options, in words."""
    commands = [(entry["file"], shlex.split(entry["command"])) for entry in compile_commands]
    headers = {HEADER.match(file)[1]: options(words) for file, words in commands
               if HEADER.match(file)}
    found = []
    for file, words in commands:
        included = [words[i + 1] for i, word in enumerate(words[:-1])
                    if word == "-include" and words[i + 1] in headers]
        for header in included if not HEADER.match(file) else ():
            own, its = options(words), headers[header]
            changed = [f"{name} {own.get(name, 'not given')}, precompiled "
                       f"{its.get(name, 'not given')}" for name in sorted(own.keys() | its.keys())
                       if own.get(name) != its.get(name)]
            if changed:
                found.append(f"{file}: {'; '.join(changed)}")
    return found


class Precompiled(unittest.TestCase):
    def test_an_option_of_a_sources_own_is_seen(self):
        def command(file, words):
            return {"file": file, "command": f"c++ {words} -c {file}"}
        usual = "-O3 -O1 -mavx2 -ffp-contract=off -fno-math-errno"
        header = command("/b/cmake_pch.hxx.cxx", usual)
        include = "-include /b/cmake_pch.hxx"
        same = command("a.cpp", f"-O1 -DX -mavx2 -ffp-contract=off -fno-math-errno {include}")
        self.assertEqual(differences([header, same]), [])
        for words, message in ((f"{usual} -O3", "-O -O3, precompiled -O1"),
                               (f"{usual} -ffp-contract=fast",
                                "-ffp-contract fast, precompiled off"),
                               (f"{usual} -mfma", "-mfma on, precompiled not given"),
                               (f"{usual} -fmath-errno", "-fmath-errno on, precompiled off")):
            self.assertEqual(differences([header, command("a.cpp", f"{words} {include}")]),
                             [f"a.cpp: {message}"])
            self.assertEqual(differences([header, command("a.cpp", words)]), [])
            self.assertEqual(differences([header, command("a.cpp", f"{words} -include b.h")]), [])

    def test_no_header_undoes_the_options_of_a_source(self):
        if shutil.which("cmake") is None:
            self.skipTest("there is no cmake here")
        for sanitize in ("", "address"):
            with tempfile.TemporaryDirectory(prefix="test_precompiled_") as folder:
                result = subprocess.run(
                    ["cmake", "-S", str(ROOT), "-B", folder, "-G", "Ninja",
                     f"-DUSP_SANITIZE={sanitize}"],
                    stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
                self.assertEqual(result.returncode, 0, result.stdout)
                commands = json.loads((Path(folder) / "compile_commands.json").read_text())
            self.assertTrue(any("-include" in entry["command"] for entry in commands))
            self.assertEqual("\n".join(sorted(set(differences(commands)))), "",
                             "give it SKIP_PRECOMPILE_HEADERS, as cpu/microkernel.cpp has it")


if __name__ == "__main__":
    unittest.main()
