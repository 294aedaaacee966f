"""The documentation site: built strictly, all links and anchors followed, shown in a browser."""

import functools
import http.server
import importlib.util
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import threading
import tomllib
from html.parser import HTMLParser
from urllib.parse import unquote, urljoin, urlsplit

import gymnasium as gym
import numpy as np
import pytest
import scipy.stats
import tyro
import yaml
from torch.utils.tensorboard import SummaryWriter

from tests.browser import Browser, needs_chromium
from tests.harness import FILES, ROOT, only_run, train, weights

ON_THE_SITE_ONLY = {
    "contributing.md",
    "changelog.md",
    "tutorials/notebook.md",
}  # made of other files


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


HOOKS = load(ROOT / "docs" / "theme" / "hooks.py")
VIDEOS = load(ROOT / "scripts" / "film_agents.py")
FILMED = json.loads(VIDEOS.DATA.read_text())


@pytest.fixture(scope="session")
def site(tmp_path_factory, request):
    """The folder of the site, built once for all workers, and what was said while it was built."""
    shared = hasattr(request.config, "workerinput")
    folder = (
        tmp_path_factory.getbasetemp().parent if shared else tmp_path_factory.getbasetemp()
    ) / "site"
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
        self.anchors |= {
            attributes[name] for name in ("id", "name") if name in attributes and tag != "meta"
        }
        if tag == "a" and attributes.get("href"):
            self.links.append(attributes["href"])
        elif tag == "link" and attributes.get("rel") not in ("canonical", "prev", "next"):
            self.loads.append(attributes["href"])
        elif attributes.get("src"):
            self.loads.append(attributes["src"])
        if tag == "span" and attributes.get("class") == "line" and "id" in attributes:
            self.line = self.lines.setdefault(attributes["id"], [])

    def handle_endtag(self, tag):
        if tag == "code" and self.line is not None:  # a line ends with its code
            self.line = None

    def handle_data(self, data):
        if self.line is not None:
            self.line.append(data)


@pytest.fixture(scope="session")
def pages(site):
    return {
        path.relative_to(site[0]).as_posix(): Page(path) for path in sorted(site[0].rglob("*.html"))
    }


def nav_of(entries):
    for entry in entries:
        value = next(iter(entry.values())) if isinstance(entry, dict) else entry
        yield from nav_of(value) if isinstance(value, list) else [value]


def nav():
    text = (ROOT / "mkdocs.yml").read_text()
    return list(nav_of(yaml.safe_load(text)["nav"]))


def test_every_page_is_in_the_nav():
    there = {
        path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")
    } | ON_THE_SITE_ONLY
    missing = sorted(there - set(nav()))
    assert not missing, (
        f"not in the nav of mkdocs.yml: {', '.join(f'docs/{page}' for page in missing)}"
    )
    assert sorted(nav()) == sorted(set(nav())), "twice in the nav"


def test_the_repository_of_the_site():
    for origin in ("git@host.org:me/rl.git", "https://token@host.org/me/rl.git"):
        assert HOOKS.repository({}, origin) == "https://host.org/me/rl"
    actions = {"GITHUB_SERVER_URL": "https://github.com", "GITHUB_REPOSITORY": "me/rl"}
    assert HOOKS.repository(actions, "/a/folder") == "https://github.com/me/rl"
    assert HOOKS.repository({}, "/a/folder") is None and HOOKS.repository({}, "") is None


def test_hyperparameters_are_those_of_the_file():
    pages = HOOKS.algorithm_pages
    for name in FILES:
        shared, own = ([flag["name"] for flag in flags] for flags in pages.read_flags(name))
        args = runpy.run_path(str(FILES[name]))["Args"] if name == "ppo" else None
        if args:
            assert [*shared, *own] == [*vars(args())]
        assert "seed" in shared and "env_id" in own
        assert f"| `--{own[0].replace('_', '-')}` |" in pages.hyperparameters(name)


def test_details_open_one_by_one():
    text = """1. **One.** It
   is so.
   ([line 5](../../cleanrl/ppo.py#L5 "core 1"), [`test_core_1_a`](../../tests/test_ppo.py))
2. **Two** things.
   ([line 9](../../cleanrl/ppo.py#L9 "core 2"), [`test_core_2_b`](../../tests/test_ppo.py),
   [`test_core_2_c`](../../tests/test_ppo.py))

After.
"""
    told = HOOKS.algorithm_pages.fold_details(text)
    assert told.count("<details") == told.count("</details>") == 2 and "After." in told
    assert 'id="core-1" markdown' in told and "\n\nIt\nis so.\n\nTest: [`test_core_1_a`]" in told
    assert "\n\n**Two** things.\n\nTest:" in told and "[`test_core_2_c`]" in told


def test_every_extra_is_on_the_page():
    told = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs" / "installation.md").read_text(), re.M)
    assert sorted(told) == sorted(
        tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    )


def test_lists_of_github_are_lists_of_markdown():
    text = (
        "1. one\n   more\n\n   ```bash\n   a\n     b\n   ```\n\n2. two\n\n```text\n  x\n```\n  - y"
    )
    wanted = "1. one\n    more\n\n    ```bash\n    a\n      b\n    ```\n\n2. two\n"
    wanted += "\n```text\n  x\n```\n    - y"
    assert HOOKS.indent_lists(text) == wanted


def test_builds_strictly(site):
    """No page, link, anchor or explanation is missing: the last line says how many are."""
    folder, log = site
    complaints = [line for line in log.splitlines() if re.match(r"WARNING|ERROR", line)]
    assert not complaints and log.startswith("0\n"), "\n".join(complaints) or log
    assert (folder / "index.html").exists() and (folder / "search" / "search_index.json").exists()


def test_links_and_anchors(site, pages):
    broken, followed = [], 0
    for name, page in pages.items():
        for link in (
            page.links + page.loads if name != "404.html" else ()
        ):  # whose links start at the root of the server
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
    outside = {
        load for page in pages.values() for load in page.loads if re.match(r"(https?:)?//", load)
    }
    assert outside == set()
    for path in site[0].rglob("*.css"):
        assert not re.findall(r"(?:url\(|@import\s*)['\"]?(?:https?:)?//", path.read_text()), path


@pytest.mark.parametrize("name", FILES)
def test_annotated_file_is_the_file(pages, name):
    """Each line of the file is on its page once, in order, with its details' notes beside it."""
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
        beside |= {int(n): note for n in re.findall(r'id="L(\d+)"', code)}
    lines = FILES["ppo"].read_text().splitlines()
    for number, words in {
        5: "exponentially weighted mean",
        11: "outlier minibatch",
        13: "share no parameters",
    }.items():
        line = next(
            n
            for n, line in enumerate(lines, 1)
            if re.search(rf"\[core {number}\]", line) and n > 40
        )
        assert words in re.sub(r"\s+", " ", beside[line]), number
        assert re.search(rf"test_core_{number}_\w+", beside[line]), number
    assert "you can skip it" in re.sub(r"\s+", " ", html)  # of docs/anatomy.md


@pytest.mark.parametrize("name", FILES)
def test_every_file_has_a_parent_and_a_diff(site, name):
    parent = HOOKS.parent(name)
    assert (parent is None) == (name == "ppo")
    if parent:
        html = (site[0] / "diff" / name / "index.html").read_text()
        shown = len(re.findall(r'<tr class="(?:removed|changed|same)">', html))
        assert shown == len(FILES[parent].read_text().splitlines())
        assert f"{parent}.py → {name}.py" in html and re.search(
            r'<tr class="(?:added|changed)">', html
        )


@pytest.fixture(scope="module")
def address(site):
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Quiet, directory=site[0])
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()


def go(browser, url):
    browser("Page.navigate", url=url)
    browser.wait_for(f"document.readyState === 'complete' && location.href === {url!r}")


def fetched(browser, address):
    return [
        url for url in browser.requests if not url.startswith((address, "data:", "blob:", "about:"))
    ]


@needs_chromium
def test_home_in_a_browser(address):
    """Less than 1 MB in all, nothing from elsewhere, and the search finds pages by their words."""
    with Browser(address) as browser:
        browser.wait_for("performance.getEntriesByType('resource').length > 3")
        entries = "[...performance.getEntriesByType('navigation'), "
        entries += "...performance.getEntriesByType('resource')]"
        assert (
            20_000
            < browser.evaluate(f"{entries}.reduce((sum, entry) => sum + entry.transferSize, 0)")
            < 1_000_000
        )
        assert (
            browser.evaluate("getComputedStyle(document.body).backgroundColor")
            == "rgb(255, 255, 255)"
        )
        browser.evaluate("document.querySelector('.md-search__input').focus()")
        browser("Input.insertText", text="bootstrapped truncated")
        browser.wait_for("document.querySelectorAll('.md-search-result__link').length > 0")
        found = browser.evaluate(
            "[...document.querySelectorAll('.md-search-result__link')].map(link => link.href)"
        )
        assert any("rl-algorithms/ppo/" in link for link in found), found
        assert fetched(browser, address) == [] and browser.errors == []


# the pages of algorithms have one form: by default, one of five is looked at
@needs_chromium
@pytest.mark.parametrize("others", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_pages_on_a_phone(address, others):
    """No page is wider than the screen or logs errors; half of them are shown in dark mode."""
    names = [re.sub(r"/?(index)?\.md$", "", page) for page in nav()]
    algorithms = [name for name in names if name.startswith("rl-algorithms/")]
    if others:
        names = [name for name in algorithms if name not in algorithms[::5]]
    else:
        names = [name for name in names if name not in algorithms or name in algorithms[::5]]
        names += ["code/ppo", "diff/dqn", "source/tests/test_ppo.py"]
    with Browser(address, width=375, height=800) as browser:
        for i, name in enumerate(names):
            scheme = {"name": "prefers-color-scheme", "value": "dark" if i % 2 else "light"}
            browser("Emulation.setEmulatedMedia", features=[scheme])
            go(browser, f"{address}{name}/" if name else address)
            width = browser.evaluate("document.documentElement.scrollWidth")
            assert width <= 375, f"{name} is {width} wide"
            color = browser.evaluate("getComputedStyle(document.body).backgroundColor")
            assert (max(map(int, re.findall(r"\d+", color)[:3])) < 80) == bool(i % 2), (
                f"{name}: {color}"
            )
        assert browser.errors == [] and fetched(browser, address) == []


def test_ablations_are_in_step():
    """Each edit fits and changes its file; core (but 12), continuous and LSTM details have one."""
    ablations, report = (
        load(ROOT / "scripts" / "run_ablations.py"),
        load(ROOT / "scripts" / "report_ablations.py"),
    )
    variants = ablations.variants()
    details = {f"core_{n}" for n in range(1, 14) if n != 12}
    details |= {f"continuous_{n}" for n in range(1, 10)} | {f"lstm_{n}" for n in range(1, 6)}
    assert {name for name in variants if not name.startswith("task_")} == details
    tasks = {
        task: (source, flags)
        for name, (task, source, flags) in variants.items()
        if name.startswith("task_")
    }
    for name in details:
        task, source, flags = variants[name]
        assert (source, flags) != tasks[task], name
        compile(source, name, "exec")
    assert report.block(report.read()) in report.PAGE.read_text(), (
        "run: python scripts/report_ablations.py"
    )


def test_ablation_curves(tmp_path, monkeypatch):
    """From runs to the numbers of the table: unfinished runs and unpaired seeds do not count."""
    ablations, report = (
        load(ROOT / "scripts" / "run_ablations.py"),
        load(ROOT / "scripts" / "report_ablations.py"),
    )
    name = f"task_{report.TASKS.index('CartPole-v1')}"
    for exp_name, seed, steps, final, total in [
        (name, 1, 1000, 9.0, 1000),
        (name, 2, 1000, 7.0, 1000),
        (name, 3, 100, 5.0, 100),  # a short try
        ("core_9", 1, 1000, 3.0, 1000),
        ("core_9", 3, 500, 1.0, 1000),
    ]:
        run = tmp_path / "runs" / f"CartPole-v1__ablation_{exp_name}__{seed}__1"
        flags = {
            "exp_name": f"ablation_{exp_name}",
            "seed": seed,
            "env_id": "CartPole-v1",
            "total_timesteps": total,
        }
        about = {
            "args": flags | {"num_envs": 1, "num_steps": 100},
            "start_time": 0,
            "commit": "",
            "device": "x",
            "packages": {},
        }
        with SummaryWriter(run) as writer:
            for step in range(10, steps + 1, 10):
                writer.add_scalar("charts/episodic_return", final if step > 900 else 0, step)
            writer.add_scalar("charts/SPS", 1, steps)
        (run / "run.json").write_text(json.dumps(about))
    planned = {name: 1000, "core_9": 1000}
    ablations.collect(planned, tmp_path / "runs", tmp_path / "data")
    monkeypatch.setattr(report, "DATA", tmp_path / "data")
    monkeypatch.setattr(report, "STEPS", 1000)
    monkeypatch.setattr(report, "PAGE", tmp_path / "page.md")
    data = report.read()
    assert {variant: sorted(runs) for variant, runs in data.items()} == {
        name: [1, 2],
        "core_9": [1],
    }
    (row,) = [line for line in report.table(data).splitlines() if line.startswith("| core 9 |")]
    assert row.endswith("| 1 | 9.0 | 3.0 |  | too few seeds |")
    shutil.rmtree(tmp_path / "runs" / f"CartPole-v1__ablation_{name}__1__1")
    shutil.rmtree(tmp_path / "runs" / f"CartPole-v1__ablation_{name}__2__1")
    ablations.collect(planned, tmp_path / "runs", tmp_path / "data")
    again = report.read()
    assert again.keys() == data.keys(), "what was not run here stays"
    np.testing.assert_array_equal(again[name][2], data[name][2])
    report.draw(next(a for a in report.PLAN["ablation"] if a["detail"] == "core 9"), data)
    assert "without" in (tmp_path / "ablations" / "core_9.svg").read_text()


def test_ablations_that_cannot_run_leave_no_data(tmp_path, monkeypatch, capfd):
    """In a folder with a space, too: the files themselves say what is wrong."""
    ablations = load(ROOT / "scripts" / "run_ablations.py")
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "my ab"
    args = dict(only=("core_9",), num_seeds=1, total_timesteps=1, folder=folder)
    with pytest.raises(SystemExit, match="the benchmark failed: no data is collected"):
        ablations.main(ablations.Args(**args))
    assert "total_timesteps is less than one rollout" in capfd.readouterr().err
    assert not (folder / "curves.csv").exists()
    _, steps = ablations.write_variants(ablations.Args(**args | {"total_timesteps": None}))
    assert steps == {"task_3": 200_000, "core_9": 200_000}


def test_verdicts_of_ablations(monkeypatch):
    """Holm's method: the smallest p-value is compared with 5% over the number of tests, the next
    with 5% over one less, until one fails."""
    report = load(ROOT / "scripts" / "report_ablations.py")
    base = np.array([1.0, 2.0, 3.0, 4.0, 5.0])

    def runs(finals):
        return {seed: np.array([[report.STEPS, 1, final]]) for seed, final in enumerate(finals)}

    task = "CartPole-v1"
    cuts = {
        "core 1": base - 2.6,  # p = 0.032: more than 5% / 2
        "core 3": base - 2.5,  # p = 0.037
        "core 6": base,  # identical
        "core 9": base[:4],  # too few seeds
    }
    monkeypatch.setitem(report.PLAN, "ablation", [dict(detail=x, task=task) for x in cuts])
    data = {x.replace(" ", "_"): runs(finals) for x, finals in cuts.items()}
    data[f"task_{report.TASKS.index(task)}"] = runs(base)
    same = "not distinguishable"
    expected = {"core 1": same, "core 3": same, "core 6": same, "core 9": "too few seeds"}
    assert report.verdicts(data) == expected
    data["core_1"] = runs(base + 100)
    expected |= {"core 1": "better without it", "core 3": "matters"}
    assert report.verdicts(data) == expected, "core 3 is now compared with 5%"
    x, y = np.array([1.0, 2.0, 4.0]), np.array([3.0, 9.0, 4.0, 5.0])
    theirs = scipy.stats.ttest_ind(x, y, equal_var=False)
    difference, half, p_value = report.welch(x, y)
    interval = theirs.confidence_interval(0.95)
    np.testing.assert_allclose([difference - half, difference + half], interval)
    np.testing.assert_allclose(p_value, theirs.pvalue)
    constant = {"core_1": runs([0] * 5), f"task_{report.TASKS.index(task)}": runs([500] * 5)}
    assert report.verdicts(data | constant)["core 1"] == "matters", "neither side varies"


@pytest.mark.parametrize("name", FILMED)
def test_film_of_a_trained_agent(name):
    """All frames are there and differ; the page tells what was recorded, by which command."""
    from moviepy import VideoFileClip

    told, stem = FILMED[name], FILMED[name]["file"].removesuffix(".py")
    python, file, *words = shlex.split(told["command"])
    assert (python, file) == ("python", f"cleanrl/{stem}.py") and len(told["returns"]) == 10
    args = tyro.cli(runpy.run_path(str(FILES[stem]))["Args"], args=words)
    assert (args.env_id, args.seed, args.total_timesteps) == (
        told["env_id"],
        told["train_seed"],
        told["of_steps"],
    )
    page = ROOT / "docs" / HOOKS.about_file(stem)[0]
    assert VIDEOS.block(name) in page.read_text(), (
        f"{page.name} has other lines than these:\n{VIDEOS.block(name)}"
    )
    with VideoFileClip(str(VIDEOS.VIDEOS / f"{name}.mp4")) as clip:
        frames = list(clip.iter_frames())
    assert (
        len(frames) == pytest.approx(told["seconds"][0] * clip.fps, abs=2)
        and clip.size[0] == VIDEOS.WIDTH
    )
    assert np.abs(frames[0].astype(int) - frames[-1]).max() > 50  # of 255


def test_films_are_light_and_pages_without_one_say_why():
    films = sorted(path.name for path in VIDEOS.VIDEOS.iterdir())
    assert films == sorted(f"{name}.{kind}" for name in FILMED for kind in ("mp4", "jpg"))
    sizes = [path.stat().st_size for path in VIDEOS.VIDEOS.iterdir()]
    assert max(sizes) < 500_000 and sum(sizes) < 6_000_000
    for name in FILES:
        page = ROOT / "docs" / HOOKS.about_file(name)[0]
        told = re.search(
            r"\]\(videos/|no video( yet| of a trained)|video of a trained agent", page.read_text()
        )
        assert told, f"{page.name} has no video of a trained agent, and does not say why"


@needs_chromium
def test_films_play_in_the_browser(address):
    """When they are asked to and not before; a still is shown until then."""
    with Browser(f"{address}rl-algorithms/ppo/") as browser:
        films = browser.evaluate(
            "(films = [...document.querySelectorAll('figure.film video')]).length"
        )
        assert films == (ROOT / "docs" / "rl-algorithms" / "ppo.md").read_text().count(".mp4)") > 0
        assert [url for url in browser.requests if url.endswith(".mp4")] == []
        for i in range(films):
            assert browser.evaluate(
                f"films[{i}].paused && films[{i}].controls && films[{i}].poster.endsWith('.jpg')"
            )
            assert "evaluation episodes" in browser.evaluate(
                f"films[{i}].nextElementSibling.textContent"
            )
            browser.evaluate(f"films[{i}].play(), 0")
            browser.wait_for(
                f"films[{i}].currentTime > 0.5 && films[{i}].videoWidth === {VIDEOS.WIDTH}"
            )
        assert browser.errors == [] and fetched(browser, address) == []


@needs_chromium
def test_results_are_sorted_and_filtered(address):
    rows = "[...document.querySelectorAll('.results tbody tr')].filter(row => !row.hidden)"
    with Browser(f"{address}results/") as browser:
        browser.wait_for("document.querySelector('.results input') !== null")
        assert browser.evaluate(f"{rows}.length") > 60
        browser.evaluate("filter = document.querySelector('.results input'), 0")
        browser.evaluate("filter.value = 'dqn Acrobot', filter.dispatchEvent(new Event('input'))")
        shown = browser.evaluate(f"{rows}.map(row => row.textContent)")
        assert len(shown) >= 2 and all("dqn" in row and "Acrobot" in row for row in shown)
        browser.evaluate("filter.value = 'CartPole', filter.dispatchEvent(new Event('input'))")
        seeds = f"{rows}.map(row => Number(row.cells[3].textContent))"
        for falling in (False, True):
            browser.evaluate("document.querySelectorAll('.results th button')[3].click()")
            found = browser.evaluate(seeds)
            assert found == sorted(found, reverse=falling) and len(set(found)) > 1
        assert browser.errors == []


@needs_chromium
def test_links_into_details_and_to_old_sections(address):
    """A link to a detail opens it; #ppo_ataripy, once a section, leads to the file."""
    with Browser(f"{address}rl-algorithms/ppo/#core-5") as browser:
        browser.wait_for("document.getElementById('core-5').open")
        assert not browser.evaluate("document.getElementById('core-4').open")
        assert browser.evaluate("movedTo('#dqn_ataripy')") == "../../code/dqn_atari/"
        assert browser.evaluate("movedTo('#core-5')") is None and browser.errors == []


GAMES = {
    "cartpole": "CartPole-v1",
    "acrobot": "Acrobot-v1",
    "mountaincar": "MountainCar-v0",
    "pendulum": "Pendulum-v1",
}


def agents(name):
    return json.loads((ROOT / "docs" / "try-it" / f"{name}.json").read_text())["checkpoints"]


@needs_chromium
def test_games_in_the_browser_are_gymnasiums(address):
    """Their physics, what the agents do, how well they play, and what a visitor sees of it."""
    rng = np.random.default_rng(0)
    with Browser(f"{address}try-it/") as browser:
        browser.wait_for("document.querySelector('.playground').dataset.game === 'cartpole'")
        assert browser.evaluate("document.querySelector('h1').firstChild.textContent") == "Try it"
        for name, env_id in GAMES.items():
            env, steps, states, seen = gym.make(env_id).unwrapped, [], [], []
            is_discrete = isinstance(env.action_space, gym.spaces.Discrete)
            for _ in range(5):
                env.reset(seed=int(rng.integers(1000)))
                for _ in range(60):
                    state = [float(x) for x in env.state]
                    action = rng.integers(env.action_space.n) if is_discrete else rng.uniform(-3, 3)
                    steps.append((state, float(action)))
                    action = action if is_discrete else np.array([action])
                    obs, reward, over, _, _ = env.step(action)
                    states.append([*env.state, reward, over])
                    seen.append(obs)
                    if over:
                        break
            found = browser.evaluate(
                f"{json.dumps(steps)}.map(([state, action]) => {{ const game = games.{name}; "
                "const [next, reward, over] = game.step(state, action); "
                "return [[...next, reward, Number(over)], game.observe(next)]; })"
            )
            mine, observed = zip(*found, strict=True)
            np.testing.assert_allclose(mine, states, rtol=0, atol=1e-9)
            np.testing.assert_allclose(observed, seen, rtol=0, atol=1e-5)  # float32

            # the agent acts as the exported network, and plays as well as in Gymnasium
            last = agents(name)[-1]
            for obs in rng.uniform(-1, 1, size=(20, len(observed[0]))):
                x = obs
                if "obs_mean" in last:
                    x = ((x - last["obs_mean"]) / last["obs_std"]).clip(-10, 10)
                for layer in last["layers"]:
                    x = np.array(layer["weight"]) @ x + layer["bias"]
                    x = {"tanh": np.tanh, "relu": lambda x: np.maximum(x, 0)}.get(
                        layer["activation"], lambda x: x
                    )(x)
                greedy = {**last, "action": "argmax"} if is_discrete else last
                action = browser.evaluate(
                    f"decide({json.dumps(greedy)}, {json.dumps(obs.tolist())}, Math.random)"
                )
                expected = x.argmax() if is_discrete else x.clip(last["low"], last["high"])[0]
                assert action == pytest.approx(expected, abs=1e-9)
            played = browser.evaluate(  # with random numbers that are the same in every test
                "(random => [...Array(20)].map(() => "
                f"playEpisode(games.{name}, {json.dumps(last)}, random)))"
                "((seed => () => (seed = seed * 48271 % 2147483647) / 2147483647)(1))"
                ".reduce((a, b) => a + b) / 20"
            )
            assert played == pytest.approx(last["mean_return"], rel=0.3, abs=40)

            # what a visitor does: another game, then the slider
            if name != "cartpole":
                browser.evaluate(f"document.querySelector('.games [name={name}]').click()")
            browser.wait_for(f"document.querySelector('.playground').dataset.game === '{name}'")
            slider = "document.querySelector('[data-part=slider]')"
            browser.evaluate(f"{slider}.value = {slider}.max")
            browser.evaluate(f"{slider}.dispatchEvent(new Event('input'))")
            step = browser.evaluate("document.querySelector('[data-part=step]').textContent")
            assert step == f"{last['step']:,}"
            browser.wait_for("Number(document.querySelector('[data-part=now]').textContent) > 3")
        assert browser.errors == [] and fetched(browser, address) == []


@pytest.mark.parametrize("name", GAMES)
def test_agents_of_the_page_have_learned(name):
    """From seed 1, with the returns that their files reach, in little data."""
    path = ROOT / "docs" / "try-it" / f"{name}.json"
    told = json.loads(path.read_text())
    assert told["seed"] == 1 and GAMES[name] in f"{told['command']} CartPole-v1"
    first, *_, last = told["checkpoints"]
    assert last["mean_return"] > first["mean_return"] and path.stat().st_size < 500_000
    assert last["mean_return"] > {"cartpole": 475, "acrobot": -100, "mountaincar": -180}.get(
        name, -250
    )


def test_exported_agent_is_the_runs(tmp_path):
    """The JSON has the weights of the snapshots, to four digits; other environments are refused."""
    try_it = load(ROOT / "scripts" / "export_try_it.py")
    train(FILES["ppo"], tmp_path, "--total-timesteps", 1024, "--checkpoint-interval", 1)
    run = only_run(tmp_path)
    (run / "snapshots").mkdir()
    for step in (512, 1024):
        shutil.copy(run / "checkpoint.pt", run / "snapshots" / f"{step}.pt")
    told = try_it.export(run, episodes=2)
    assert told["command"] == "python cleanrl/ppo.py --total-timesteps 1024"
    assert [x["step"] for x in told["checkpoints"]] == [512, 1024]
    assert all(8 <= x["mean_return"] <= 500 for x in told["checkpoints"])
    layer = told["checkpoints"][0]["layers"][2]
    np.testing.assert_allclose(layer["weight"], weights(run)["actor.4.weight"], atol=5e-5)
    about = (run / "run.json").read_text()
    (run / "run.json").write_text(about.replace('"env_id": "CartPole-v1"', '"env_id": "Taxi-v4"'))
    with pytest.raises(SystemExit, match=r"is not a run of a PyTorch file on CartPole-v1"):
        try_it.export(run)


def test_the_limit_for_lqr_works(tmp_path, monkeypatch):
    """The module of docs/troubleshooting.md: episodes are truncated after 1000 steps."""
    pytest.importorskip("dm_control", reason="dm_control has no build for Python 3.13")
    (code,) = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs" / "troubleshooting.md").read_text(), re.S
    )
    (tmp_path / "my_envs.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    env = gym.make("my_envs:Lqr-v0")
    env.reset(seed=1)
    ends = [env.step(0 * env.action_space.sample())[2:4] for _ in range(1000)]
    assert ends[-1] == (False, True) and set(ends[:-1]) == {(False, False)}
