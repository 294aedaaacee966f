"""Debian's Chromium, headless, driven through its debugging pipe: a page as its reader sees it."""

import base64
import json
import os
import shutil
import subprocess
import tempfile

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
needs_chromium = pytest.mark.skipif(
    not CHROMIUM, reason="needs Debian's chromium, which .ci/run installs"
)


class Browser:
    """with Browser(url, width=375, dark=True) as page: page.evaluate("document.title")"""

    def __init__(self, url, width=1200, height=900, dark=False):
        self.profile, self.last, self.requests, self.errors = tempfile.mkdtemp(), 0, [], []
        read_by_it, self.to = os.pipe()
        self.of, written_by_it = os.pipe()
        flags = "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage"
        flags += f" --user-data-dir={self.profile} --remote-debugging-pipe"
        command = f"exec {CHROMIUM} {flags} about:blank 3<&{read_by_it} 4>&{written_by_it}"
        self.process = subprocess.Popen(
            ["bash", "-c", command],
            pass_fds=(read_by_it, written_by_it),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read_by_it)
        os.close(written_by_it)
        self.answers, self.session = os.fdopen(self.of, "rb"), None
        (target,) = [x for x in self("Target.getTargets")["targetInfos"] if x["type"] == "page"]
        self.session = self("Target.attachToTarget", targetId=target["targetId"], flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self(f"{domain}.enable")
        self(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 700,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self("Emulation.setEmulatedMedia", features=[scheme])
        self("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete' && location.href !== 'about:blank'")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        self.answers.close()
        os.close(self.to)
        shutil.rmtree(self.profile, ignore_errors=True)

    def __call__(self, method, **params):
        self.last += 1
        message = {"id": self.last, "method": method, "params": params} | (
            {"sessionId": self.session} if self.session else {}
        )
        os.write(self.to, json.dumps(message).encode() + b"\0")
        while True:
            answer = bytearray()
            while not answer.endswith(b"\0"):
                byte = self.answers.read(1)
                assert byte, "Chromium went away"
                answer += byte
            answer = json.loads(answer[:-1])
            if answer.get("id") == self.last:
                assert "error" not in answer, answer
                return answer["result"]
            if answer.get("method") == "Network.requestWillBeSent":
                self.requests.append(answer["params"]["request"]["url"])
            if answer.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.errors.append(answer["params"])

    def evaluate(self, expression):
        result = self("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait_for(self, expression):
        for _ in range(200):
            if self.evaluate(expression):
                return
            self(
                "Runtime.evaluate",
                expression="new Promise(done => setTimeout(done, 50))",
                awaitPromise=True,
            )
        raise AssertionError(f"never true: {expression}")

    def move_to(self, x, y):
        self("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def screenshot(self, path, whole=True):
        shot = self("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))
