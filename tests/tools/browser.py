"""Chromium, headless, by its debugging protocol over a pipe: it needs no port and no network. And pictures as arrays.

    python tests/tools/browser.py docs/planner.png        # makes the picture of the planner's page anew"""

from __future__ import annotations

import base64
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path
from types import TracebackType
from typing import Any, Optional, Type

import numpy as np

SIZE = (1140, 1240)
_OPTIONS = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-dev-shm-usage",
            "--no-first-run", "--disable-background-networking", "--disable-extensions", "--disable-sync",
            "--force-device-scale-factor=1", "--remote-debugging-pipe")


class Browser:
    """One page. Inputs are those that a user's mouse gives, which the browser sends to what lies at their place."""

    def __init__(self) -> None:
        program = shutil.which("chromium") or "/usr/bin/chromium"
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        # The protocol is on descriptors 3 and 4.
        command = f'exec 3<&{theirs_in} 4>&{theirs_out}; exec "$0" "$@"'
        self._process = subprocess.Popen(
            ["bash", "-c", command, program, *_OPTIONS, f"--user-data-dir={self._folder.name}", "about:blank"],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            pass_fds=(theirs_in, theirs_out))
        os.close(theirs_in)
        os.close(theirs_out)
        self._left, self._number, self._session = b"", 0, ""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.call("Page.enable")
        self.resize(*SIZE)

    def open(self, path: Path) -> None:
        self.call("Page.navigate", url=path.resolve().as_uri())
        while self._message().get("method") != "Page.loadEventFired":
            pass

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, kind: Optional[Type[BaseException]], error: Optional[BaseException],
                 trace: Optional[TracebackType]) -> None:
        os.close(self._out)  # it ends then
        os.close(self._in)
        self._process.wait()
        self._folder.cleanup()

    def _message(self) -> Any:
        while b"\0" not in self._left:
            got = os.read(self._in, 1 << 20)
            if not got:
                raise RuntimeError(f"chromium ended with {self._process.wait()}")
            self._left += got
        text, _, self._left = self._left.partition(b"\0")
        return json.loads(text)

    def call(self, method: str, **arguments: Any) -> Any:
        self._number += 1
        request = {"id": self._number, "method": method, "params": arguments}
        if self._session:
            request["sessionId"] = self._session
        os.write(self._out, json.dumps(request).encode() + b"\0")
        while True:
            answer = self._message()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]

    def resize(self, width: int, height: int) -> None:
        """The window; the page's listeners have been called when it returns."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.value("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(0))))")

    def value(self, script: str) -> Any:
        """Of an expression in the page, or of its promise."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise RuntimeError(f"{script}: {result['exceptionDetails']['exception']['description']}")
        return result["result"].get("value")

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def picture(self) -> bytes:
        """A PNG of the page's window."""
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])


def pixels(png: bytes) -> "np.ndarray[Any, Any]":
    """Rows, columns, and red, green and blue of a PNG with 8 bits a colour."""
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    packed, at, width, height, channels = b"", 8, 0, 0, 0
    while at < len(png):
        length, kind = struct.unpack(">I4s", png[at : at + 8])
        data = png[at + 8 : at + 8 + length]
        if kind == b"IHDR":
            width, height, depth, colors, _, _, interlaced = struct.unpack(">IIBBBBB", data)
            assert depth == 8 and colors in (2, 6) and interlaced == 0
            channels = 3 if colors == 2 else 4
        packed += data if kind == b"IDAT" else b""
        at += 12 + length
    rows = np.frombuffer(zlib.decompress(packed), np.uint8).reshape(height, 1 + width * channels)
    out = np.zeros((height, width, channels), np.uint8)
    above = np.zeros((width, channels), np.uint8)
    for i, row in enumerate(rows):
        above = out[i] = _unfiltered(int(row[0]), row[1:].reshape(width, channels), above)
    return out[..., :3]


def _unfiltered(kind: int, row: "np.ndarray[Any, Any]", above: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
    """A row of a PNG: none, left, above, the mean of both, or Paeth's choice (PNG specification, section 9)."""
    if kind == 0:
        return row
    if kind == 1:
        return np.cumsum(row, axis=0, dtype=np.uint8)
    if kind == 2:
        return row + above
    out, up = [], above.astype(int).tolist()
    left = corner = [0] * row.shape[1]
    for value, over in zip(row.tolist(), up):
        if kind == 3:
            left = [(v + (a + b) // 2) & 255 for v, a, b in zip(value, left, over)]
        else:
            left = [(v + min((a, b, c), key=lambda near, p=a + b - c: abs(p - near))) & 255
                    for v, a, b, c in zip(value, left, over, corner)]
        corner = over
        out.append(left)
    return np.array(out, np.uint8)


def page_of_docs(recompute: bool = True) -> Any:
    """The plan that docs/planner.png shows, with its spans."""
    from libdc import plan as planner
    from libdc.plan.hugging_face import from_config

    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench" / "plan"))
    from scale import config

    model = from_config(config("8B"), "Llama-3-8B", 8192, 2)
    return planner.run(model, planner.load("h100"), planner.Options(ranks=64, recompute=recompute), traced=True)


def main() -> int:
    from libdc.plan import page

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.html"
        page.write(page_of_docs(), str(path))
        with Browser() as browser:
            browser.open(path)
            Path(sys.argv[1]).write_bytes(browser.picture())
    return 0


if __name__ == "__main__":
    sys.exit(main())
