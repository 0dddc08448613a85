"""A headless Chromium, driven over the DevTools protocol through a pipe. No test; tests use it."""
import functools
import itertools
import json
import os
import select
import shutil
import subprocess
import tempfile
import time

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
TIMEOUT_S = 30.0
WIDE = "document.documentElement.scrollWidth"
WIDE_LATER = f"new Promise(done => setTimeout(() => done({WIDE}), 300))"
FLAGS = ("--headless=new", "--no-sandbox", "--remote-debugging-pipe", "--disable-gpu",
         "--no-first-run", "--hide-scrollbars", "--disable-extensions", "--mute-audio",
         "--disable-background-networking", "--disable-dev-shm-usage", "about:blank")


def find():
    """The path of a Chromium, None if there is none."""
    return next((path for path in map(shutil.which, NAMES) if path), None)


@functools.lru_cache(maxsize=None)
def why_not():
    """Why no page can be shown here, "" if one can: there is no Chromium, or it does not start,
    which is tried once."""
    binary = find()
    if binary is None:
        return "there is no Chromium here"
    try:
        Page(binary).close()
    except (OSError, RuntimeError) as error:
        return f"{binary} does not start: {error}"
    return ""


class Page:
    """A tab of a browser of its own. What goes wrong in a page is in `errors`."""

    def __init__(self, binary):
        self._profile = tempfile.mkdtemp(prefix="chromium_")
        to_child, self._send = os.pipe()
        self._receive, from_child = os.pipe()
        # The protocol wants file descriptors 3 and 4. A shell puts them there, whatever they are.
        command = ["sh", "-c", f'exec 3<&{to_child} 4>&{from_child} "$0" "$@"', binary, *FLAGS,
                   f"--user-data-dir={self._profile}"]
        self._process = subprocess.Popen(command, pass_fds=(to_child, from_child),
                                         stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(to_child)
        os.close(from_child)
        self._numbers, self._buffer, self.errors = itertools.count(1), b"", []
        self._events, self._session = [], None
        try:
            self._attach()
        except (OSError, RuntimeError):
            self.close()
            raise

    def _attach(self):
        """Opens a tab and listens to it."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target,
                                  flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def close(self):
        for end in (self._send, self._receive):
            os.close(end)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self._profile, ignore_errors=True)

    def call(self, method, **parameters):
        """The result of a method of the protocol."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._send, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]
            self._note(answer)

    def _next(self):
        deadline = time.monotonic() + TIMEOUT_S
        while b"\0" not in self._buffer:
            left = deadline - time.monotonic()
            if left < 0 or not select.select([self._receive], [], [], left)[0]:
                raise TimeoutError("the browser does not answer")
            more = os.read(self._receive, 1 << 20)
            if not more:
                raise RuntimeError("the browser has ended")
            self._buffer += more
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def _note(self, event):
        method, values = event.get("method"), event.get("params", {})
        self._events.append(method)
        if method == "Runtime.exceptionThrown":
            details = values["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Runtime.consoleAPICalled" and values["type"] in ("error", "assert"):
            self.errors.append(" ".join(str(a.get("value", "")) for a in values["args"]))
        elif method == "Log.entryAdded" and values["entry"]["level"] == "error":
            self.errors.append(f"{values['entry']['text']} {values['entry'].get('url', '')}")
        elif method == "Network.requestWillBeSent":
            url = values["request"]["url"]
            if not url.startswith(("file:", "data:", "about:", "blob:")):
                self.errors.append(f"loads {url}")

    def open(self, url):
        """Shows an address and waits until it has loaded; `errors` are those of this page."""
        self.errors, self._events = [], []
        answer = self.call("Page.navigate", url=url)
        if answer.get("errorText"):
            raise RuntimeError(f"{url}: {answer['errorText']}")
        while "Page.loadEventFired" not in self._events:
            self._note(self._next())

    def size(self, width, height=900):
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height,
                  deviceScaleFactor=1, mobile=width < 600)

    def page_width(self, width):
        """How wide the page is in a window of this width. A page may lay itself out anew: one that
        seems too wide is asked again a moment later."""
        self.size(width)
        found = self.run(WIDE)
        return found if found <= width else self.run(WIDE_LATER)

    def scheme(self, value):
        """The mode that the reader's system asks for: light or dark."""
        self.call("Emulation.setEmulatedMedia",
                  features=[{"name": "prefers-color-scheme", "value": value},
                            {"name": "prefers-reduced-motion", "value": "reduce"}])

    def run(self, script):
        """The value of a JavaScript expression."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True,
                           awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"]["exception"]["description"])
        return answer["result"].get("value")

    def press(self, key, code=None):
        for kind in ("rawKeyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=code or key,
                      windowsVirtualKeyCode={"Tab": 9, "Enter": 13, "Escape": 27,
                                             "ArrowDown": 40}.get(key, 0))

    def type(self, text):
        self.call("Input.insertText", text=text)

    def picture(self, whole=False):
        """A PNG in base64: what is seen, or the whole page."""
        return self.call("Page.captureScreenshot", captureBeyondViewport=whole)["data"]
