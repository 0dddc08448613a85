"""The mesh as a page: every slice that a click shows is the one that --mesh_show json prints.

    python3 tests/course/test_mesh.py --bin build/release/bin

The page runs in a headless Chromium; where there is none, nothing is clicked.
"""
import argparse
import contextlib
import io
import json
import re
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]

import chromium  # noqa: E402  (the path comes first)
from tools import chapters, cli  # noqa: E402
from tools.interactive import interactive  # noqa: E402
from tools.look import mesh  # noqa: E402
from tools.process import output_of  # noqa: E402
from tools.run import build, launch, mesh_page, packages, recipes  # noqa: E402

CHAPTER = chapters.resolve("ch07")
BIN = None  # folder of the programs
# Recipes, and flags beside them that leave no more ranks than a page can be clicked through.
CASES = {"laptop": [],
         "mixtral_8x7b": ["--num_layers", "4"],
         "llama3_405b_long": ["--dp_size", "2", "--cp_size", "2", "--pp_size", "3", "--pp_layers", "2,3,2",
                              "--tp_size", "4", "--num_layers", "7"]}
# Clicks through all ranks and weights; what is read of each are texts and boxes.
CLICK = """(() => {
  const boxes = (of) => [...of.querySelectorAll("rect")].map((rect) =>
      ["x", "y", "width", "height"].map((name) => Number(rect.getAttribute(name))));
  const read = (list) => Object.fromEntries([...byId(list).querySelectorAll("dd")].map((dd) =>
      [dd.id, {text: dd.firstChild.data, boxes: boxes(dd),
               size: dd.querySelector("svg")?.getAttribute("viewBox")}]));
  const found = [];
  for (const button of document.querySelectorAll("#mesh button")) {
    button.click();
    const own = {title: byId("rank").textContent, takes: read("takes"), holds: {}, marked: {},
                 groups: [...byId("groups").rows].map((row) => [...row.cells].map((c) => c.textContent))};
    for (const option of byId("weight").options) {
      byId("weight").value = option.value;
      byId("weight").dispatchEvent(new Event("change"));
      own.holds[option.value] = read("holds");
      own.marked[option.value] = [...document.querySelectorAll("#mesh .copy")].map((b) => Number(b.dataset.rank));
    }
    found.push(own);
  }
  return JSON.stringify(found);
})()"""
AXES = ("rows", "columns")


def flags_of(name):
    return launch.recipes.expand(["--recipe", name, *CASES[name]], recipes.load(CHAPTER, name))


def said_of(flags):
    text = output_of([str(BIN / CHAPTER.name), *flags, "--mesh_show", "json"], timeout=600)
    if text is None:
        raise AssertionError(f"refused: {flags}")
    return json.loads(text)


def in_words(numbers):
    """A set of numbers as the page says it, by a way of its own: "0 to 3, 8"."""
    text = "".join("1" if i in numbers else "0" for i in range(max(numbers, default=-1) + 1))
    return ", ".join(str(found.start()) if len(found[0]) == 1 else f"{found.start()} to {found.end() - 1}"
                     for found in re.finditer("1+", text))


def filled(boxes):
    """The numbers that boxes of a strip cover."""
    return [i for x, y, width, height in boxes for i in range(x, x + width) if (y, height) == (0, 1)]


@unittest.skipIf(chromium.why_not(), chromium.why_not())
class Clicks(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.browser = chromium.Page(chromium.find())
        cls.addClassCleanup(cls.browser.close)

    def test_every_slice_of_three_recipes(self):
        for name in CASES:
            with self.subTest(name), tempfile.TemporaryDirectory(prefix="test_mesh_") as scratch:
                found = said_of(flags_of(name))
                path = Path(scratch) / "mesh.html"
                path.write_text(mesh.page_of(found, name), encoding="utf-8")
                self.browser.size(1280)
                self.browser.open(path.as_uri())
                shown = json.loads(self.browser.run(CLICK))
                self.assertEqual(self.browser.errors, [])
                self.assertEqual(len(shown), len(found["ranks"]))
                compared = 0
                for rank, own in enumerate(shown):
                    self.assertRegex(own["title"], rf"^Rank {rank}\b")
                    self.batch(found, rank, own["takes"])
                    self.numbers(found, rank, own["takes"])
                    self.groups(found, rank, own["groups"])
                    compared += self.weights(found, rank, own)
                self.assertGreaterEqual(compared, 10 * len(shown))

    def batch(self, found, rank, takes):
        own, batch = found["batch"]["ranks"][rank], found["batch"]
        for what in ("samples", "tokens", "rows"):
            numbers = {i for begin, end in own[what] for i in range(begin, end)}
            if what == "rows" and len(numbers) == batch["rows"]:
                self.assertNotIn("rows", takes)
                continue
            words = takes[what]["text"].split(" of ")[0].removeprefix(what + " ")
            self.assertEqual(words, in_words(numbers), f"{what} of {rank}")
            self.assertEqual(sorted(filled(takes[what]["boxes"])), sorted(numbers), f"{what} of {rank}")
            self.assertEqual(takes[what]["size"], f"0 0 {batch[what]} 1")

    def numbers(self, found, rank, takes):
        for what in ("layers", "experts"):
            of = [int(own[1]) for each in found["parameters"] if rank in each["ranks"]
                  for own in [re.search(rf"\.{what}\.(\d+)\.", each["name"])] if own]
            if what == "experts" and ".experts." not in str(found["parameters"]):
                self.assertNotIn(what, takes)
                continue
            self.assertEqual(sorted(filled(takes[what]["boxes"])), sorted(set(of)), f"{what} of {rank}")
            self.assertTrue(takes[what]["text"].startswith(in_words(set(of)) or "none"), takes[what]["text"])

    def groups(self, found, rank, rows):
        wanted = []
        for kind in found["groups"]:
            members = next((group for group in kind["ranks"] if rank in group), [])
            nodes = {member // (found["node_size"] or len(found["ranks"])) for member in members}
            wanted.append([kind["name"], in_words(set(members)), str(len(nodes))])
        self.assertEqual(rows, wanted)

    def weights(self, found, rank, own):
        """How many slices were compared: of each kind those of the rank's parameters."""
        kinds, marked = {}, {}
        for each in found["parameters"]:
            kind = re.sub(r"\.\d+\.", ".*.", each["name"]).removeprefix("model.").removesuffix(".weight")
            kinds.setdefault(kind, []), marked.setdefault(kind, set())
            if rank in each["ranks"]:
                kinds[kind].append(each)
                marked[kind] |= set(each["ranks"])
        self.assertEqual(list(own["holds"]), list(kinds))
        compared = 0
        for kind, held in kinds.items():
            shown = own["holds"][kind]
            self.assertEqual(own["marked"][kind], sorted(marked[kind]), kind)
            if not held:
                self.assertEqual(shown["slice"]["text"], "none: it lies on other ranks")
                continue
            slices = {key: value for key, value in shown.items() if key.startswith("slice")}
            wanted = [self.box(each) for each in held]
            for value in slices.values():
                self.assertIn((value["boxes"][0], value["size"]), wanted, f"{kind} of rank {rank}")
            for each in held:
                compared += 1
                text, size = self.box(each)
                key = next((key for key, value in slices.items() if (value["boxes"][0], value["size"]) ==
                            (text, size) and self.speaks_of(value["text"], each)), None)
                self.assertIsNotNone(key, f"{each['name']} of rank {rank}: {slices}")
                self.assertEqual(slices[key]["text"].rpartition(": ")[2], self.cut(each))
                number = key.removeprefix("slice")
                others = set(each["ranks"]) - {rank}
                self.assertEqual(shown[f"copies{number}"]["text"], f"ranks {in_words(others)}" if others else "none")
                for name in ("sharded_over", "copied_over", "gradient_summed_over"):
                    self.assertEqual(shown[name + number]["text"], ", ".join(each[name]) or "no group")
        return compared

    @staticmethod
    def box(each):
        """([x, y, width, height], the drawing's size) of a parameter's slice."""
        shape = each["shape"]
        rows, columns = ([0, 1] if len(shape) == 1 else [0, shape[0]]), [0, shape[-1]]
        for axis, offset, length in each["slices"]:
            (columns if axis == len(shape) - 1 else rows)[:] = [offset, length]
        return ([columns[0], rows[0], columns[1], rows[1]],
                f"0 0 {shape[-1]} {1 if len(shape) == 1 else shape[0]}")

    @staticmethod
    def cut(each):
        found = []
        for axis, offset, length in sorted(each["slices"]):
            if length < each["shape"][axis]:
                name = "elements" if len(each["shape"]) == 1 else AXES[axis]
                found.append(f"{name} {in_words(set(range(offset, offset + length)))}")
        return ", ".join(found) or "all of it"

    @staticmethod
    def speaks_of(text, each):
        """Whether the numbers of the parameter's layer and expert are among those named."""
        for what in ("layers", "experts"):
            number = re.search(rf"\.{what}\.(\d+)\.", each["name"])
            named = re.search(rf"{what} ([\d, to]+):", text)
            if (number is None) != (named is None):
                return False
            if number and not any(int(low) <= int(number[1]) <= int(high or low)
                                  for low, high in re.findall(r"(\d+)(?: to (\d+))?", named[1])):
                return False
        return True


class Page(unittest.TestCase):
    def test_the_page_of_this_repository_shows_what_the_program_says(self):
        self.assertEqual(interactive.block(mesh.PAGE, "layout"), interactive.layout_text(BIN),
                         "run python3 tools/interactive/interactive.py --bin build/release/bin")

    def test_a_title_cannot_end_the_block(self):
        found = said_of(flags_of("laptop"))
        page = mesh.page_of(found, "</script><b>")
        self.assertEqual(page.count("</script>"), 2)
        self.assertEqual(json.loads(re.search(r'id="layout">\n(.*?)</script>', page, re.S)[1])["title"],
                         "</script><b>")


class Launcher(unittest.TestCase):
    def run_book(self, *arguments):
        with mock.patch.object(packages, "ensure"), mock.patch.object(build, "prepare"), \
                mock.patch.object(launch, "known_flags", return_value={"--dp_size": "INT"}), \
                mock.patch.object(recipes, "check_flags"), \
                mock.patch.object(mesh_page, "write", return_value=0) as write, \
                mock.patch.object(launch, "_run_and_judge", side_effect=AssertionError), \
                contextlib.redirect_stderr(io.StringIO()) as error, \
                contextlib.redirect_stdout(io.StringIO()) as output:
            code = cli._run_command(list(arguments))
        return code, error.getvalue() + output.getvalue(), write

    def test_it_writes_the_page_of_a_recipe_and_starts_nothing(self):
        code, _, write = self.run_book("run", "ch07", "--ranks", "8", "--", "--recipe", "laptop", "--mesh_page",
                                       "mesh.html")
        self.assertEqual(code, 0)
        _, flags, path, title = write.call_args[0]
        self.assertEqual(path, Path("mesh.html"))
        self.assertEqual(flags[-2:], ["--world_size", "8"])
        self.assertNotIn("--mesh_page", flags)
        self.assertEqual(title, recipes.load(CHAPTER, "laptop").title)

    def test_what_is_refused(self):
        for words, part in ((["--mesh_page"], "try --mesh_page mesh.html"),
                            (["--mesh_page", "mesh"], "not 'mesh'"),
                            (["--mesh_page", "/not/there/mesh.html"], "there is no folder /not/there"),
                            (["--mesh_page", "m.html", "--as", "megatron"], "without --as"),
                            (["--mesh_page=m.html", "--plan_rows", "t.csv"], "without --plan_rows"),
                            (["--mesh_page=m.html", "--help"], "without --help"),
                            (["--mesh_page=m.html", "--estimate"], "without --estimate")):
            code, said, write = self.run_book("run", "ch07", "--", *words)
            self.assertEqual((code, write.called), (2, False), words)
            self.assertIn(part, said)
        code, said, _ = self.run_book("run", "ch02", "--", "--mesh_page", "mesh.html")
        self.assertEqual(code, 2)
        self.assertIn("try ch07", said)


def main():
    global BIN
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    folder = parser.add_mutually_exclusive_group(required=True)
    folder.add_argument("--bin", type=Path, help="folder of the programs")
    folder.add_argument("--binary", type=Path, help="the program, as a seeded fault names it")
    args, rest = parser.parse_known_args()
    BIN = (args.bin or args.binary.parent).resolve()
    result = unittest.main(argv=[sys.argv[0], *rest], exit=False).result
    return 0 if result.wasSuccessful() else 1


if __name__ == "__main__":
    sys.exit(main())
