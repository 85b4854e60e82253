"""A headless Chromium that tests drive: the DevTools protocol over a pair of pipes, nothing else.

Each command is a JSON object that ends in a zero byte, as is each answer and each event
(``--remote-debugging-pipe``; https://chromedevtools.github.io/devtools-protocol).
"""

import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from contextlib import contextmanager, suppress
from pathlib import Path

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
NONE_HERE = (
    "no Chromium here (Debian: apt-get install chromium); the page is not tested in a browser"
)
#: Without a screen, and without looking for updates.
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-dev-shm-usage"),
    *("--no-first-run", "--disable-background-networking", "--disable-component-update"),
    *("--disable-sync", "--remote-debugging-pipe"),
)
#: Seconds to wait for an answer or an event.
PATIENCE = 60.0


class Tab:
    """A page of a Chromium; ``said`` is what it wrote on its console, errors among it."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self.said, self.requests = [], []
        self._to, self._from = to_browser, from_browser
        self._events, self._rest, self._count, self._session = [], b"", 0, None
        target = self.do("Target.createTarget", url="about:blank")["targetId"]
        attached = self.do("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.do(f"{domain}.enable")
        self.do("Emulation.setScrollbarsHidden", hidden=True)

    def do(self, method, **params):
        """Send a command; returns its result."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._count:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]

    def _read(self):
        """The next message; what it tells of the page is kept."""
        end = time.monotonic() + PATIENCE
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._from], [], [], max(0.0, end - time.monotonic()))
            part = os.read(self._from, 1 << 16) if ready else b""
            assert part, f"no word from Chromium in {PATIENCE:.0f} s, or it has ended"
            self._rest += part
        text, _, self._rest = self._rest.partition(b"\0")
        message = json.loads(text)
        method, params = message.get("method"), message.get("params", {})
        if method:
            self._events.append(method)
        if method == "Runtime.consoleAPICalled":
            self.said.append(" ".join(str(arg.get("value")) for arg in params["args"]))
        elif method == "Runtime.exceptionThrown":
            self.said.append(params["exceptionDetails"].get("exception", {}).get("description"))
        elif method == "Log.entryAdded":
            self.said.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        return message

    def open(self, address: str) -> None:
        """Load a page and wait until it is there."""
        for seen in (self._events, self.said, self.requests):
            seen.clear()
        answer = self.do("Page.navigate", url=address)
        assert "errorText" not in answer, f"{address}: {answer['errorText']}"
        while "Page.loadEventFired" not in self._events:
            self._read()

    def ask(self, script: str):
        """The value of a JavaScript expression in the page."""
        answer = self.do(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, f"{script}: {answer['exceptionDetails']}"
        return answer["result"].get("value")

    def size(self, width: int, height: int = 900) -> None:
        """The window's inner size in pixels."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.do("Emulation.setDeviceMetricsOverride", **size)

    def scheme(self, name: str) -> None:
        """What the reader prefers: ``light`` or ``dark``."""
        feature = {"name": "prefers-color-scheme", "value": name}
        self.do("Emulation.setEmulatedMedia", features=[feature])

    def click_on(self, selector: str) -> None:
        """Click in the middle of the first element of a CSS selector."""
        x, y = self.middle(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self.do("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def middle(self, selector: str) -> tuple[float, float]:
        """Where in the window the middle of an element is, once it was scrolled to."""
        # The page hears of the scrolling in the next frame.
        x, y = self.ask(
            f"""new Promise(done => {{
              const element = document.querySelector({json.dumps(selector)});
              const middle = b => [b.x + b.width / 2, b.y + b.height / 2];
              element.scrollIntoView({{block: 'center'}});
              requestAnimationFrame(() => requestAnimationFrame(
                () => done(middle(element.getBoundingClientRect())))); }})"""
        )
        return x, y


@contextmanager
def chromium(folder: Path):
    """A tab of a Chromium that is started and ended here; its profile and log are in ``folder``."""
    (theirs_in, ours_out), (ours_in, theirs_out) = os.pipe(), os.pipe()
    # Above nine: Chromium wants descriptors 3 and 4, which may be among the four.
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in (theirs_in, theirs_out)]
    os.close(theirs_in), os.close(theirs_out)
    folder.mkdir(parents=True, exist_ok=True)
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={folder / 'profile'}"]
    with (folder / "log.txt").open("w") as log:
        process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{high[0]} 4>&{high[1]}', "chromium", *command],
            pass_fds=high,
            stdout=log,
            stderr=log,
        )
    for fd in high:
        os.close(fd)
    try:
        yield Tab(ours_out, ours_in)
    finally:
        # It ends when nobody can tell it anything any more.
        os.close(ours_out)
        with suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.kill()
        process.wait()
        os.close(ours_in)
