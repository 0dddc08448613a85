"""The commands on the pages: what they write is nothing that git would ask about.

    python3 tests/course/test_commands.py       needs no build; git and a checkout
"""
import re
import shlex
import subprocess
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# The flags whose value is a file or a folder that the command writes.
OUTPUT_FLAGS = ("--output", "--out", "--json", "--run_dir", "--estimate_file")


def pages():
    return [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("ch[0-9][0-9]_*/*.md")]


def commands(text):
    """The words of every ./book command in the code blocks of a page."""
    found = []
    for block in re.findall(r"^(?:```|~~~~)\w*\n(.*?)^(?:```|~~~~)", text, re.M | re.S):
        for line in re.findall(r"^\./book .*", block.replace("\\\n", " "), re.M):
            try:
                found.append(shlex.split(line, comments=True))
            except ValueError:
                pass  # no command but what a program printed
    return found


def outputs(words):
    """The paths that a command writes, as it names them; not those in capitals, which a reader
    replaces."""
    found = [words[3]] if words[1:2] == ["export"] and len(words) > 3 else []
    for word, following in zip(words, [*words[1:], ""]):
        name, equals, value = word.partition("=")
        if name in OUTPUT_FLAGS:
            found.append(value if equals else following)
        if word == ">":
            found.append(following)
    return [path for path in found if not path.partition(".")[0].isupper()]


def is_known_to_git(path):
    """Is the path ignored, or a file that is committed?"""
    def succeeds(*arguments):
        return subprocess.run(["git", *arguments, "--", path], cwd=ROOT, check=False,
                              stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0
    return succeeds("check-ignore", "-q") or succeeds("ls-files", "--error-unmatch")


class Outputs(unittest.TestCase):
    def test_what_a_command_writes(self):
        text = ("```sh\n./book export runs/a my_model  # a comment\n./book run -- --run_dir=x \\\n"
                "  --estimate_file y.json\n./book tokenize DIR my.txt --output FILE.bin\n```\n"
                "`./book export a b`\n")
        self.assertEqual([outputs(words) for words in commands(text)],
                         [["my_model"], ["x", "y.json"], []])

    def test_no_page_leaves_a_reader_with_untracked_files(self):
        if subprocess.run(["git", "rev-parse"], cwd=ROOT, check=False,
                          stderr=subprocess.DEVNULL).returncode:
            self.skipTest("this is no checkout")
        written = {path: page.name for page in pages()
                   for words in commands(page.read_text(encoding="utf-8"))
                   for path in outputs(words)}
        self.assertIn("my_model", written)
        unknown = {path: page for path, page in written.items() if not is_known_to_git(path)}
        self.assertEqual(unknown, {}, "write below runs/, or name it in .gitignore")


if __name__ == "__main__":
    unittest.main()
