"""Take the pictures of the home page: parts of the site's own pages, in both schemes.

    mkdocs build --strict
    python scripts/photograph_pages.py site

Writes docs/home/page-<name>-light.png and -dark.png, with 64 colors each. It needs Chromium.
"""

import base64
import functools
import http.server
import io
import sys
import threading
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))  # so that this runs from any folder
from tests.browser import Browser  # noqa: E402

FOLDER = ROOT / "docs" / "home"
WIDTH, HEIGHT = 560, 330  # of each picture, in CSS pixels
LINES = "[...document.querySelectorAll('.line')].find(x => x.textContent.includes('{}'))"
PICTURES = {  # the page, and the element whose upper left corner is that of the picture
    "code": ("code/ppo/", LINES.format("# estimate advantages") + ".closest('section')"),
    "diff": ("diff/dqn/", "[...document.querySelectorAll('.diff tr')].find(x => "
             "x.textContent.includes('class QNetwork'))"),
    "check": ("idea-to-evidence/", "document.querySelector('img[src$=\"check.svg\"]')"),
}  # fmt: skip


def photograph(address, page, element, is_dark):
    with Browser(address + page, width=WIDTH + 40, height=900, dark=is_dark) as browser:
        browser.evaluate("document.querySelector('.md-header').remove()")
        browser.wait_for("[...document.images].every(x => x.complete || x.loading === 'lazy')")
        place = f"(x => [x.left + scrollX, x.top + scrollY])({element}.getBoundingClientRect())"
        x, y = browser.evaluate(place)
        clip = dict(x=max(0, x - 8), y=y - 4, width=WIDTH, height=HEIGHT, scale=1)
        shot = browser("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        return Image.open(io.BytesIO(base64.b64decode(shot["data"])))


def crop_report(scheme):
    """The verdicts of a comparison's page, of which docs/rlops.md has a picture."""
    with Image.open(ROOT / "docs" / "rlops" / f"page-{scheme}.png") as page:
        part = page.convert("RGB").crop((0, 0, 800, 800 * HEIGHT // WIDTH))
        return part.resize((WIDTH, HEIGHT), Image.Resampling.LANCZOS)


def save(picture, name, scheme):
    path = FOLDER / f"page-{name}-{scheme}.png"
    picture.convert("RGB").quantize(64).save(path, optimize=True)
    print(f"{path.relative_to(ROOT)}: {path.stat().st_size:,} bytes")


def main():
    if len(sys.argv) != 2:
        raise SystemExit("usage: python scripts/photograph_pages.py SITE_FOLDER")
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=sys.argv[1])
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}/"
    FOLDER.mkdir(exist_ok=True)
    for scheme in ("light", "dark"):
        save(crop_report(scheme), "rlops", scheme)
        for name, (page, element) in PICTURES.items():
            save(photograph(address, page, element, scheme == "dark"), name, scheme)


if __name__ == "__main__":
    main()
