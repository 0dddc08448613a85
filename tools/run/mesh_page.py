"""`--mesh_page FILE.html`: writes a layout as a page to click on; starts nothing."""
import json
import shlex
import subprocess
from pathlib import Path

from tools.base import BookError, say, show_path, write_whole
from tools.look import mesh
from tools.run import bridge

QUESTION = ("--mesh_show", "json")


def check_flags(chapter, chapters, flags, name):
    """BookError (2) where the chapter's program cannot say who holds what, is asked for something else
    besides, or the file cannot be written."""
    able = [other for other in chapters if (other.folder / "composition").is_dir()]
    if chapter not in able:
        raise BookError(f"--mesh_page: {chapter.short} says of no layout who holds what; try "
                        f"{able[0].short}, which takes its flags, too", 2)
    if not name.endswith(".html"):
        raise BookError(f"--mesh_page needs a file to write, not {name!r}; try --mesh_page mesh.html", 2)
    if not Path(name).parent.is_dir():
        raise BookError(f"--mesh_page {name}: there is no folder {show_path(Path(name).parent)}; try "
                        f"--mesh_page {Path(name).name}", 2)
    for flag in flags:
        if flag.partition("=")[0] in (*bridge.ASKING, "--as"):
            raise BookError(f"--mesh_page writes a page and starts nothing: ./book run takes it, without {flag}", 2)


def write(program, flags, path, title=""):
    """Writes the page of these flags; the exit code. The program says itself why it refuses them."""
    answer = subprocess.run([str(program), *flags, *QUESTION], stdin=subprocess.DEVNULL,
                            stdout=subprocess.PIPE, check=False)
    if answer.returncode != 0:
        return answer.returncode
    words = shlex.join(flags) or "every flag at its default"
    write_whole(path, mesh.page_of(json.loads(answer.stdout), f"{title}: {words}" if title else words))
    say(f"book: wrote {show_path(path)}; a browser opens it")
    return 0
