"""A headless Chromium for tests of pages, driven over a pipe by the Chrome DevTools Protocol; no port is opened."""

import base64
import contextlib
import json
import os
import queue
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

SECONDS: Final = 30.0  # Longest time in seconds for an answer of the browser, or for a condition of a page

_OPTIONS: Final = ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run")
_QUIET: Final = ("--disable-background-networking", "--disable-component-update", "--disable-sync", "--mute-audio")
_PROBLEMS: Final = ("Log.entryAdded", "Runtime.exceptionThrown", "Runtime.consoleAPICalled")


class Browser:
    """One browser with one page. `problems` has all console messages, exceptions and violations of the policy."""

    def __init__(self, program: str, profile: Path) -> None:
        read_commands, self._commands = os.pipe()
        self._answers, write_answers = os.pipe()
        options = " ".join((*_OPTIONS, *_QUIET, f"--user-data-dir={profile}", "--remote-debugging-pipe", "about:blank"))
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec "$0" {options} 3<&{read_commands} 4>&{write_answers}', program],
            pass_fds=(read_commands, write_answers),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read_commands)
        os.close(write_answers)
        self._messages: queue.Queue[dict[str, Any]] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        self._number = 0
        self._session: str | None = None
        self.problems: list[str] = []
        self.events: list[dict[str, Any]] = []  # of the domain Tracing
        self.window = ""
        self.use(self.new_window())

    def new_window(self) -> str:
        """Open another window, which is visible as the others are, and return its session for `use`."""
        target = self.call("Target.createTarget", url="about:blank", newWindow=True)["targetId"]
        session: str = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        return session

    def use(self, window: str) -> None:
        """Let the next calls be about a window."""
        self.window = self._session = window
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._commands)
        self._process.terminate()
        self._process.wait(SECONDS)
        os.close(self._answers)

    def _read(self) -> None:
        rest = b""
        with contextlib.suppress(OSError):
            while part := os.read(self._answers, 1 << 16):
                *whole, rest = (rest + part).split(b"\0")
                for message in whole:
                    self._messages.put(json.loads(message))

    def call(self, method: str, **parameters: Any) -> Any:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None and not method.startswith(("Target.", "Browser.")):
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._commands, data) :]
        while True:
            answer = self._receive(SECONDS)
            if answer.get("id") == self._number:
                assert "error" not in answer, answer["error"]
                return answer["result"]

    def _receive(self, seconds: float) -> dict[str, Any]:
        answer = self._messages.get(timeout=seconds)
        if answer.get("method") in _PROBLEMS:
            self.problems.append(json.dumps(answer["params"])[:600])
        if str(answer.get("method")).startswith("Tracing."):
            self.events.append(answer)
        return answer

    def drain(self, seconds: float) -> None:
        """Receive the messages of the next `seconds`."""
        until = time.monotonic() + seconds
        with contextlib.suppress(queue.Empty):
            while (left := until - time.monotonic()) > 0:
                self._receive(left)

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def run(self, script: str) -> Any:
        """Return the value of a JavaScript expression; a promise is awaited."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, condition: str, seconds: float = SECONDS) -> Any:
        """Return the value of `condition` as soon as it is true. An element of the page is returned as true."""
        until = time.monotonic() + seconds
        while True:
            with contextlib.suppress(AssertionError):  # the page is being replaced
                if found := self.run(f"((found) => (found instanceof Node ? true : found))({condition})"):
                    return found
            assert time.monotonic() < until, f"not true within {seconds:g} s: {condition}"
            self.drain(0.05)

    def click(self, selector: str) -> None:
        """Click the middle of the first visible element of `selector`, as a pointer does."""
        self.click_at(*self.place(selector))

    def place(self, selector: str, across: float = 0.5, down: float = 0.5) -> tuple[float, float]:
        """Return a place in the first visible element of `selector`, as shares of its width and height."""
        found = f"[...document.querySelectorAll({json.dumps(selector)})].find((one) => one.checkVisibility())"
        self.wait(f"{found} && ({found}.scrollIntoView({{block: 'center'}}), true)")
        left, top, width, height = self.run(
            f"(({{x, y, width, height}}) => [x, y, width, height])({found}.getBoundingClientRect())"
        )
        return left + across * width, top + down * height

    def click_at(self, x: float, y: float, *, to: tuple[float, float] | None = None) -> None:
        """Press at a place of the window, move to another one if it is given, and release."""
        at = to or (x, y)
        for kind, (left, top) in (("Moved", (x, y)), ("Pressed", (x, y)), ("Moved", at), ("Released", at)):
            button = {} if kind == "Moved" and to is None else {"button": "left", "clickCount": 1, "buttons": 1}
            self.call("Input.dispatchMouseEvent", type=f"mouse{kind}", x=left, y=top, **button)

    def point(self, x: float, y: float) -> None:
        """Move the pointer to a place of the window."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def press(self, keys: str) -> None:
        for key in keys:
            self.call("Input.dispatchKeyEvent", type="keyDown", key=key, text=key)
            self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def look(self, width: int, height: int, scheme: str = "light") -> None:
        """Set the size of the window and the preferred colour scheme."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def picture(self) -> bytes:
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])


@contextlib.contextmanager
def browser(program: str, profile: Path) -> Iterator[Browser]:
    """Run a browser in the context. `profile` is an empty folder."""
    found = Browser(program, profile)
    try:
        yield found
    finally:
        found.close()
