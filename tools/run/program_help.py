"""What a chapter prints for `--help`, read from its sources: that needs no compiler."""
import re

from tools.base import ROOT

COLUMN = 34  # where the help of a flag begins
KINDS = {"int64_t": "INT", "double": "FLOAT", "std::string": "TEXT", "bool": "",
         "std::vector<std::string>": "TEXT"}
HEAD = """Trains a Llama.
Usage: {program} [OPTIONS]

Options:
  -h,--help                       Print this help message and exit
  --version                       Display program version information and exit
"""
STRING = r'"(?:[^"\\]|\\.)*"'
STRUCT = re.compile(r"^struct (\w+)(?: : (\w+))? \{\n(.*?)^\};", re.M | re.S)
MEMBERS = re.compile(r"^  (?:std::optional<)?([\w:]+(?:<std::string>)?)>? (\w+[^;()]*);", re.M)
BIND = re.compile(r"^void (\w+)::(bind\w*)\(Args& args\) \{\n(.*?)^\}", re.M | re.S)
WORK = re.compile(
    r"args\.group\((?P<group>" + STRING + r")\)"
    r"|args\.bind\(\s*\"(?P<flag>\w+)\",\s*(?P<field>\w+),\s*"
    r"(?:\{(?P<choices>[^}]*)\},\s*)?(?P<help>" + STRING + r"(?:\s*" + STRING + r")*)\)"
    r"|(?:if \((?P<offered>\w+)\) )?(?P<part>\w+)\.bind\(args\)"
    r"|(?P<parts>each_part)\([^;]*;"
    r"|(?P<own>bind_\w+)\(args\)")


class Sources:
    """The structs of a program's configuration: their fields, and what their bind() does."""

    def __init__(self, chapter):
        self.structs, self.bodies, self.constants = {}, {}, {}
        for folder in (ROOT / "common", chapter.folder):
            for path in sorted([*folder.rglob("*.h"), *folder.rglob("*.cpp")]):
                self._read(re.sub(r"//.*", "", path.read_text(encoding="utf-8")))
        self.structs["RunConfig"][1]["run_dir"] = "std::string", f'"runs/{chapter.name}"'
        config = (chapter.folder / "config.h").read_text(encoding="utf-8")
        each_part = re.search(r"void each_part\(Visit visit\) \{(.*?)\n  \}", config, re.S)
        self.parts = re.findall(r"visit\(\*?(\w+)\)", each_part[1])
        self.offers = set(re.findall(r"\boffers_\w+", config))

    def _read(self, text):
        self.constants.update(re.findall(r"constexpr \w+ (k\w+) = (\d+);", text))
        for name, base, body in STRUCT.findall(text):
            fields = {}
            for kind, declared in MEMBERS.findall(body):
                for one in re.split(r", (?=\w+(?: =|$))", declared):
                    field, _, value = one.partition("=")
                    fields[field.strip().removesuffix("{}")] = (kind, value.strip())
            self.structs[name] = (base, fields)
        for struct, function, body in BIND.findall(text):
            self.bodies[struct, function] = body

    def field(self, struct, name):
        """(type, what it begins with)"""
        base, fields = self.structs[struct]
        if name not in fields:
            return self.field(base, name)
        kind, value = fields[name]
        return kind, self.constants.get(value, value)

    def body(self, struct, function):
        """What the struct's function does, or that of its base."""
        found = self.bodies.get((struct, function))
        return self.body(self.structs[struct][0], function) if found is None else found


def text_of(literals):
    """The text of string literals of C++ that stand side by side."""
    return "".join(re.sub(r"\\(.)", r"\1", word[1:-1]) for word in re.findall(STRING, literals))


def lines(sources, struct="TrainConfig", function="bind"):
    """The lines of --help for all that a struct binds, in its order."""
    for work in WORK.finditer(sources.body(struct, function)):
        if work["group"]:
            yield f"\n\n{text_of(work['group'])}:"
        elif work["flag"]:
            yield flag_line(work, *sources.field(struct, work["field"]))
        elif work["own"]:
            yield from lines(sources, struct, work["own"])
        elif not work["offered"] or work["offered"] in sources.offers:
            for part in sources.parts if work["parts"] else [work["part"]]:
                yield from lines(sources, sources.field(struct, part)[0])


def flag_line(bound, kind, value):
    """A flag as --help shows it: its kind, what it may be, and what it is where nobody says."""
    words, kind = text_of(bound["help"]), KINDS[kind]
    if kind == "INT":
        words, _, told = words.partition("; default: ")
        value = told or value
    elif kind == "FLOAT":
        value = f"{float(value):g}"
    elif kind == "TEXT":
        value = text_of(value)
    shown = f"  --{bound['flag']}"
    if kind:
        choices = [text_of(word) for word in re.findall(STRING, bound["choices"] or "")]
        shown += f" {kind}" + (":{" + ",".join(filter(None, choices)) + "}" if choices else "")
        shown += f"={value}" if value else ""
    return (shown.ljust(COLUMN) if len(shown) < COLUMN else f"{shown}\n{'':{COLUMN}}") + words


def help_text(chapter, program):
    """What `program --help` prints; None where the sources are written in another way."""
    try:
        found = list(lines(Sources(chapter)))
    except (LookupError, OSError, TypeError, ValueError):
        return None
    return HEAD.format(program=program) + "".join(f"{line}\n" for line in found) + "\n"
