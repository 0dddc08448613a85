"""`--mesh_page FILE.html`: writes a layout as a page to click on; starts nothing."""
import shlex
from pathlib import Path

from tools.base import BookError, say, show_path, write_whole
from tools.look import mesh
from tools.run import bridge

QUESTION = ("--mesh_show", "json")


def check_flags(chapter, chapters, flags, name):
    """BookError (2) where the chapter's program cannot say who holds what, is asked for something else
    besides, or the file cannot be written."""
    bridge.check_question(chapter, chapters, flags, "--mesh_page", "who holds what", "writes a page", ("--as",))
    if not name.endswith(".html"):
        raise BookError(f"--mesh_page needs a file to write, not {name!r}; try --mesh_page mesh.html", 2)
    if not Path(name).parent.is_dir():
        raise BookError(f"--mesh_page {name}: there is no folder {show_path(Path(name).parent)}; try "
                        f"--mesh_page {Path(name).name}", 2)


def write(program, flags, path, title=""):
    """Writes the page of these flags; the exit code. The program says itself why it refuses them."""
    code, layout = bridge.answer(program, flags, QUESTION)
    if layout is None:
        return code
    words = shlex.join(flags) or "every flag at its default"
    write_whole(path, mesh.page_of(layout, f"{title}: {words}" if title else words))
    say(f"book: wrote {show_path(path)}; a browser opens it")
    return 0
