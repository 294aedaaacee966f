"""The documentation site: built strictly, every link and anchor followed, and looked at in a browser."""

import functools
import http.server
import importlib.util
import os
import re
import subprocess
import sys
import threading
from html.parser import HTMLParser
from urllib.parse import unquote, urljoin, urlsplit

import pytest
import yaml

from tests.browser import Browser, needs_chromium
from tests.harness import FILES, ROOT

ON_THE_SITE_ONLY = {"contributing.md", "changelog.md"}  # the files beside the README


def load_hooks():
    spec = importlib.util.spec_from_file_location("hooks", ROOT / "docs" / "theme" / "hooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


HOOKS = load_hooks()


@pytest.fixture(scope="session")
def site(tmp_path_factory, request):
    """The folder of the site, built once for all workers, and what was said while it was built."""
    shared = hasattr(request.config, "workerinput")
    folder = (tmp_path_factory.getbasetemp().parent if shared else tmp_path_factory.getbasetemp()) / "site"
    log = folder.with_suffix(".log")
    try:
        folder.with_suffix(".lock").mkdir()
    except FileExistsError:  # another worker builds it
        for _ in range(600):
            if log.exists():
                break
            threading.Event().wait(0.2)
    else:
        command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder]
        environment = os.environ | {"NO_MKDOCS_2_WARNING": "1", "PYTHONWARNINGS": "ignore"}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        log.with_suffix(".tmp").write_text(f"{done.returncode}\n{done.stdout}{done.stderr}")
        log.with_suffix(".tmp").rename(log)
    return folder, log.read_text()


class Page(HTMLParser):
    """The anchors of a page, where its links lead, and what it loads."""

    def __init__(self, path):
        super().__init__()
        self.anchors, self.links, self.loads, self.lines, self.line = set(), [], [], {}, None
        self.feed(path.read_text())

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.anchors |= {attributes[name] for name in ("id", "name") if name in attributes and tag != "meta"}
        if tag == "a" and attributes.get("href"):
            self.links.append(attributes["href"])
        elif tag == "link" and attributes.get("rel") not in ("canonical", "prev", "next"):
            self.loads.append(attributes["href"])
        elif attributes.get("src"):
            self.loads.append(attributes["src"])
        if tag == "span" and attributes.get("class") == "line":
            self.line = self.lines.setdefault(attributes["id"], [])

    def handle_endtag(self, tag):
        if tag == "code" and self.line is not None:  # a line ends with its code
            self.line = None

    def handle_data(self, data):
        if self.line is not None:
            self.line.append(data)


@pytest.fixture(scope="session")
def pages(site):
    return {path.relative_to(site[0]).as_posix(): Page(path) for path in sorted(site[0].rglob("*.html"))}


def nav_of(entries):
    for entry in entries:
        value = next(iter(entry.values())) if isinstance(entry, dict) else entry
        yield from nav_of(value) if isinstance(value, list) else [value]


def nav():
    text = (ROOT / "mkdocs.yml").read_text()
    return list(nav_of(yaml.safe_load(text)["nav"]))


def test_every_page_is_in_the_nav():
    there = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")} | ON_THE_SITE_ONLY
    missing = sorted(there - set(nav()))
    assert not missing, f"not in the nav of mkdocs.yml: {', '.join(f'docs/{page}' for page in missing)}"
    assert sorted(nav()) == sorted(set(nav())), "twice in the nav"


def test_builds_strictly(site):
    """No page, link, anchor or explanation is missing: the last line says how many are."""
    folder, log = site
    complaints = [line for line in log.splitlines() if re.match(r"WARNING|ERROR", line)]
    assert not complaints and log.startswith("0\n"), "\n".join(complaints) or log
    assert (folder / "index.html").exists() and (folder / "search" / "search_index.json").exists()


def test_links_and_anchors(site, pages):
    broken, followed = [], 0
    for name, page in pages.items():
        for link in page.links + page.loads if name != "404.html" else ():  # whose links start at the root of the server
            target = urlsplit(urljoin(f"http://site/{name}", link))
            path, anchor = unquote(target.path).lstrip("/"), unquote(target.fragment)
            path += "index.html" if path.endswith("/") or not path else ""
            if target.netloc != "site":
                continue
            followed += 1
            if not (site[0] / path).is_file():
                broken.append(f"{name}: there is no {link}")
            elif anchor and path in pages and anchor not in pages[path].anchors:
                broken.append(f"{name}: there is no anchor {link}")
    assert broken == []
    assert followed > 10_000


def test_nothing_comes_from_elsewhere(site, pages):
    outside = {load for page in pages.values() for load in page.loads if re.match(r"(https?:)?//", load)}
    assert outside == set()
    for path in site[0].rglob("*.css"):
        assert not re.findall(r"(?:url\(|@import\s*)['\"]?(?:https?:)?//", path.read_text()), path


@pytest.mark.parametrize("name", FILES)
def test_annotated_file_is_the_file(pages, name):
    """Each line of the file is on its page once, in order, and each detail's paragraph is in the note beside its line."""
    page = pages[f"code/{name}/index.html"]
    source = FILES[name].read_text().splitlines()
    shown = ["".join(text).removeprefix(str(n)) for n, text in enumerate(page.lines.values(), 1)]
    assert [line.rstrip() for line in shown] == [line.rstrip() for line in source]
    assert list(page.lines) == [f"L{n}" for n in range(1, len(source) + 1)]


def test_a_detail_is_explained_beside_its_line(site):
    html = (site[0] / "code" / "ppo" / "index.html").read_text()
    beside = {}
    for section in re.findall(r"<section>(.*?)</section>", html, re.S):
        note, code = section.split('<div class="highlight source">')
        beside |= {int(n): note for n in re.findall(r'id="L(\d+)"', code)[:1]}
    lines = FILES["ppo"].read_text().splitlines()
    for number, words in {5: "exponentially weighted mean", 11: "one strange minibatch", 13: "share nothing"}.items():
        line = next(n for n, line in enumerate(lines, 1) if re.search(rf"\[core {number}\]", line) and n > 40)
        assert words in re.sub(r"\s+", " ", beside[line]), number
        assert re.search(rf"test_core_{number}_\w+", beside[line]), number
    assert "Whatever is wrong is told in one line" in re.sub(r"\s+", " ", html)  # of docs/anatomy.md


@pytest.mark.parametrize("name", FILES)
def test_every_file_has_a_parent_and_a_diff(site, name):
    parent = HOOKS.parent(name)
    assert (parent is None) == (name == "ppo")
    if parent:
        html = (site[0] / "diff" / name / "index.html").read_text()
        shown = len(re.findall(r'<tr class="(?:removed|changed|same)">', html))
        assert shown == len(FILES[parent].read_text().splitlines())
        assert f"{parent}.py → {name}.py" in html and re.search(r'<tr class="(?:added|changed)">', html)


@pytest.fixture(scope="module")
def address(site):
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=site[0]))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()


def go(browser, url):
    browser("Page.navigate", url=url)
    browser.wait_for(f"document.readyState === 'complete' && location.href === {url!r}")


def fetched(browser, address):
    return [url for url in browser.requests if not url.startswith((address, "data:", "blob:", "about:"))]


@needs_chromium
def test_home_in_a_browser(address):
    """Light: less than 1 MB in all, nothing from elsewhere, and the search finds a page by a word in it."""
    with Browser(address) as browser:
        browser.wait_for("performance.getEntriesByType('resource').length > 3")
        entries = "[...performance.getEntriesByType('navigation'), ...performance.getEntriesByType('resource')]"
        assert 20_000 < browser.evaluate(f"{entries}.reduce((sum, entry) => sum + entry.transferSize, 0)") < 1_000_000
        assert browser.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        browser.evaluate("document.querySelector('.md-search__input').focus()")
        browser("Input.insertText", text="bootstrapped truncated")
        browser.wait_for("document.querySelectorAll('.md-search-result__link').length > 0")
        found = browser.evaluate("[...document.querySelectorAll('.md-search-result__link')].map(link => link.href)")
        assert any("rl-algorithms/ppo/" in link for link in found), found
        assert fetched(browser, address) == [] and browser.errors == []


@needs_chromium
@pytest.mark.parametrize("dark", [False, True])
def test_pages_on_a_phone(address, dark):
    """No page is wider than the screen or complains in the console; dark is dark."""
    names = [*(re.sub(r"(index)?\.md$", "", page) for page in nav()), "code/ppo", "diff/dqn", "source/tests/test_ppo.py"]
    with Browser(address, width=375, height=800, dark=dark) as browser:
        for name in names:
            go(browser, f"{address}{name}/".replace("//", "/").replace(":/", "://") if name else address)
            width = browser.evaluate("document.documentElement.scrollWidth")
            assert width <= 375, f"{name} is {width} wide"
            light = browser.evaluate(
                "getComputedStyle(document.body).backgroundColor.match(/[0-9]+/g).slice(0, 3).map(Number)"
            )
            assert (max(light) < 80) == dark, f"{name}: {light}"
        assert browser.errors == [] and fetched(browser, address) == []
