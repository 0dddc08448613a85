"""Names of code in prose, and the lines where they are: classes, functions, fields, flags and their
values, commands of ./book, functions of a chapter's scripts."""
import re
from collections import defaultdict

from tools.book import changes

CODE = ("*.h", "*.cuh", "*.cpp", "*.cu")
NAME = re.compile(r"(?:\w+::)*~?[A-Za-z_]\w*(?:\(\))?")
FILE = re.compile(r"[\w/]+\.(?:h|cuh|cpp|cu|py|md)")
FLAG = re.compile(r"(?<![\w-])--([a-z]\w*)")
COMMAND = re.compile(r"\./book (\w+)")
BOUND = re.compile(r'\bbind\(\s*"(\w+)",\s*[\w.>-]+,\s*(\{[^}]*\})?')
CLASS = re.compile(r"^\s*(?:class|struct|enum class|enum) ((?:\w+::)*\w+)\b(?!.*;\s*$)")
DEFINED = re.compile(r"^(?![\s#}]|using\b|namespace\b)[^(;=]*?\b((?:\w+::)*~?\w+)\((?!.*\);$)")
FIELD = re.compile(r"^\s+(?!return\b|using\b)[\w:<>, ]*[\w>&*] (\w+)(?: = [^;()]*|\{[^;]*\})?;")
IN_SCRIPT = re.compile(r"^(?:def|class) (\w+)")
CLI = "tools/cli.py"


class Symbols:
    """What the sources of a project define; read when first asked for."""

    def __init__(self, root):
        self.root, self._read = root, {}

    def find(self, text, chapter, near=""):
        """(file, line) of what a piece of code names on a page of a chapter, None if there is no
        one place. near: the file that the page has named before it. LookupError with the name if
        the sources do not have it."""
        command, flags = COMMAND.match(text), FLAG.findall(text)
        if command:
            return self._of_command(command[1], flags)
        sources = [self._of(folder) for folder in (chapter, "common")]
        if flags:
            return [_first(flag, sources) for flag in flags][0]
        if FILE.fullmatch(text):
            raise LookupError(text)  # the caller knows those that are there
        if not NAME.fullmatch(text):
            return None
        name = text.removesuffix("()")
        if any(name in source.values for source in sources):
            flags = {flag for source in sources for flag in source.values[name]}
            return _first(*flags, sources) if len(flags) == 1 else None
        places = [place for source in sources for place in source.places[name]]
        if places:  # of functions and classes rather than of fields
            return min(places, key=lambda place: (place[0] != near, place[2]))[:2]
        if name != text or not any(name in source.words for source in sources):
            raise LookupError(text)
        return None  # such as a parameter

    def _of(self, folder):
        if folder not in self._read:
            self._read[folder] = Sources(self.root, folder)
        return self._read[folder]

    def _of_command(self, command, flags):
        path = self.root / CLI
        lines = path.read_text(encoding="utf-8").split("\n") if path.is_file() else []
        found = [number for number, line in enumerate(lines, 1)
                 if line.startswith(f"def _{command}(")]
        if not found:
            raise LookupError(f"./book {command}")
        for flag in flags:
            if not any(f'"--{flag}"' in line for line in lines):
                raise LookupError(f"./book {command} --{flag}")
        return CLI, found[0]


def _first(flag, sources):
    for source in sources:
        if flag in source.flags:
            return source.flags[flag]
    raise LookupError(f"--{flag}")


class Sources:
    """The names of a chapter, or of common/.

    places: {name, with its class or without: [(file, line, is it a field?)]}, definitions first;
    flags: {flag: (file, line)}; values: {value: flags}; words: all of the code.
    """

    def __init__(self, root, folder):
        self.root, self.places, self.flags = root, defaultdict(list), {}
        self.values, self.words = defaultdict(set), set()
        for path, text in self._files(folder, CODE):
            self._read_flags(path, text)
            code = [line.split("//")[0] for line in text.split("\n")]
            self.words.update(re.findall(r"\w+", "\n".join(code)))
            if path.endswith((".h", ".cuh")):
                self._read_header(path, text, code)
            else:
                self._read_definitions(path, code, (CLASS, DEFINED))
        for path, text in self._files(f"{folder}/figures", ("*.py",)):
            self._read_definitions(path, text.split("\n"), (IN_SCRIPT,))
        for places in self.places.values():
            places.sort(key=lambda place: place[0].endswith((".h", ".cuh")))

    def _files(self, folder, patterns):
        for pattern in patterns:
            for path in sorted((self.root / folder).rglob(pattern)):
                if "exercises" not in path.parts:
                    yield path.relative_to(self.root).as_posix(), path.read_text(encoding="utf-8")

    def _add(self, name, path, line, is_field=False):
        outer, _, bare = name.rpartition("::")
        if bare == outer.rpartition("::")[2]:
            return  # a constructor
        for known in {name, bare}:
            self.places[known].append((path, line, is_field))

    def _read_flags(self, path, text):
        for match in BOUND.finditer(text):
            self.flags.setdefault(match[1], (path, 1 + text.count("\n", 0, match.start())))
            for value in re.findall(r'"(\w+)"', match[2] or ""):
                self.values[value].add(match[1])

    def _read_definitions(self, path, code, patterns):
        for number, line in enumerate(code, 1):
            match = next(filter(None, (pattern.match(line) for pattern in patterns)), None)
            if match:
                self._add(match[1], path, number)

    def _read_header(self, path, text, code):
        """The classes, functions and fields that it declares."""
        begins = {}
        for number, line in enumerate(code):
            found = CLASS.match(line)
            if found:
                begins.setdefault(found[1], number)
        for kind_and_name, _ in changes.declarations(text):
            name = kind_and_name.split()[-1]
            outer, _, bare = name.rpartition("::")
            pattern = re.compile(rf"(?<!\w){re.escape(bare)}(?!\w)")
            begin = begins.get(outer.rpartition("::")[2], -1) + 1
            at = begins[bare] if " " in kind_and_name and bare in begins else next(
                (i for i in range(begin, len(code)) if pattern.search(code[i])), None)
            if at is not None:
                self._add(name, path, at + 1)
        for number, line in enumerate(code, 1):
            field = FIELD.match(line)
            if field:
                self._add(field[1], path, number, is_field=True)
