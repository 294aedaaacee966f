"""The web page of rlops: one file that needs no network.

Jinja2 escapes what comes from run folders; the page's policy lets no script run but its own.
"""

import base64
import hashlib
import json
import os
from pathlib import Path
from urllib.parse import quote

import jinja2
import numpy as np

from cleanrl_utils.errors import plain
from cleanrl_utils.rlops import report

HERE = Path(__file__).parent
LARGEST_VIDEO, LARGEST_SUM = 8 * 2**20, 64 * 2**20  # bytes that go into the page; others are linked


def shorten(values):
    return [float(f"{value:.5g}") if np.isfinite(value) else None for value in values]


def make_view(x, grid, sides):
    """One chart over one axis; sides: a list of (mean, low, high, [(run, its curve)])."""
    drawn = []
    for *lines, of_runs in sides:
        mean, low, high = map(shorten, lines)
        runs = [{"counts": not run.state, "values": shorten(curve)} for run, curve in of_runs]
        drawn.append({"mean": mean, "low": low, "high": high, "runs": runs})
    return {"x": x, "from": float(grid[0]), "to": float(grid[-1]), "sides": drawn}


def make_charts(c):
    """The charts: each environment, all of them together, and the performance profile."""
    charts = []
    for env_id in c.curves["steps"]:
        views = {}
        for axis, on_axis in c.curves.items():
            grid, drawn = on_axis[env_id]
            sides = [(mean, mean - std, mean + std, runs) for runs, mean, std in drawn.values()]
            views[axis] = make_view(axis, grid, sides)
        charts.append({"title": env_id, "y": c.metric, "axes": views})
    if c.overall_curves:
        views = {}
        for axis, (grid, drawn) in c.overall_curves.items():
            views[axis] = make_view(axis, grid, [(*curves, ()) for curves in drawn.values()])
        title = f"{len(c.shared)} environments: interquartile mean score"
        charts.append({"title": title, "y": "score", "axes": views})
    if c.overall:
        sides = [(*of_side["profile"], ()) for of_side in c.overall.values()]
        views = {"score": make_view("score", c.thresholds, sides)}
        title = "Performance profile: share of runs above a score"
        charts.append({"title": title, "y": "share of runs", "axes": views})
    return charts


def link_to(path, page):
    """A link from the page to a file or folder."""
    relative = os.path.relpath(path.absolute(), page.absolute().parent)
    return quote(relative.replace(os.sep, "/"))


def is_folder(run):
    return isinstance(run.source, Path) and run.source.is_dir()


def list_runs(c, page):
    """The cells of the table of all runs, and what each run links to."""
    rows, links, env_ids = [], [], list(c.until)

    def place(run):
        return env_ids.index(run.env_id), len(run.seed), run.seed

    for label, runs in c.sides.items():
        for run in sorted(runs, key=place):
            final = report.numbers(run.final(c.window, c.ends_at(run))) if len(run.rows) else [""]
            cells = [run.name, run.env_id, label, run.seed, *final, f"{run.step:,}"]
            rows.append([*cells, run.state or "yes"])
            links.append(link_to(run.source, page) + "/" if is_folder(run) else run.link)
    return rows, links


def find_video(runs):
    """The last video of the runs that count; no link that leads out of a run folder is followed."""
    found = []
    for run in runs:
        for path in run.source.glob("videos/*.mp4") if is_folder(run) and not run.state else ():
            if path.is_file() and path.resolve().is_relative_to(run.source.resolve()):
                found.append((path.stat().st_mtime, path.name, path, run))
    return max(found)[2:] if found else None


def list_videos(c, page):
    """(address, caption) of the last video of each side on each environment."""
    shown, spent = [], 0
    for env_id in c.until:
        for label, runs in c.sides.items():
            found = find_video([run for run in runs if run.env_id == env_id])
            if not found:
                continue
            path, run = found
            address, size = link_to(path, page), path.stat().st_size
            if size <= LARGEST_VIDEO and spent + size <= LARGEST_SUM:
                spent += size
                content = base64.b64encode(path.read_bytes()).decode()
                address = f"data:video/mp4;base64,{content}"
            shown.append((address, f"{env_id}, {label}, seed {run.seed}: {plain(path.stem)}"))
    return shown


def mark(verdict):
    """The class that colours a verdict."""
    word = verdict.rpartition(": ")[2].partition(" ")[0]
    return word if word in ("better", "worse") else ""


def write_page(path, c, notes, differences):
    script = "\n" + (HERE / "page.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    data = {"sides": list(c.sides), "charts": make_charts(c)}
    data = json.dumps(data, separators=(",", ":"), allow_nan=False)
    first, *others = c.sides
    runs, links = list_runs(c, path)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    page = environment.get_template("page.html").render(
        script_hash=f"sha256-{digest}",
        title=first + (" against " + ", ".join(others) if others else ""),
        c=c,
        report=report,
        mark=mark,
        differences=[["what", *c.sides], differences],
        videos=list_videos(c, path),
        runs=runs,
        links=links,
        notes=notes,
        data=data.replace("<", "\\u003c"),  # no tag can end the script that holds it
        script=script,
    )
    path.write_text(page, encoding="utf-8")
