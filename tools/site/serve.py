"""Serves the site to this machine alone."""
import functools
import http.server

from tools.base import BookError, say

ADDRESS = "127.0.0.1"


class _Handler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_arguments):
        """A line for every file of a page says nothing."""


def server(folder, port):
    """A server of the folder, bound to the loopback address; port 0: a free one."""
    handler = functools.partial(_Handler, directory=str(folder))
    try:
        return http.server.ThreadingHTTPServer((ADDRESS, port), handler)
    except (OSError, OverflowError) as error:
        raise BookError(f"cannot serve on {ADDRESS}:{port}: {error}; try --port 0, which takes a "
                        "free one", 2)


def serve(folder, port):
    """Serves until Ctrl-C."""
    with server(folder, port) as running:
        say(f"book: http://{ADDRESS}:{running.server_address[1]}/ shows the site; Ctrl-C ends it")
        running.serve_forever()
