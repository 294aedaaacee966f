"""The web page of rlops: one file that needs no network.

All that comes from run folders is escaped, and the page's policy lets no script run but its own.
"""

import base64
import hashlib
import json
import os
import re
from html import escape
from pathlib import Path
from urllib.parse import quote

import numpy as np

from cleanrl_utils.rlops import report

HERE = Path(__file__).parent
LARGEST_VIDEO, LARGEST_SUM = 8 * 2**20, 64 * 2**20  # bytes that go into the page; others are linked


def shorten(values):
    return [float(f"{value:.5g}") if np.isfinite(value) else None for value in values]


def make_charts(told):
    """The charts: each environment, all of them together, and the performance profile."""
    views, overall = told["curves"], told["overall_curves"]
    charts = []
    for env_id in views["steps"]:
        axes = {}
        for name, drawn in views.items():
            grid, of_sides = drawn[env_id]
            axes[name] = {"x": name, "from": 0, "to": float(grid[-1]), "sides": []}
            for curves, mean, std in of_sides.values():
                runs = [
                    {"counts": not run.state, "values": shorten(curve)} for run, curve in curves
                ]
                lines = {
                    "mean": shorten(mean),
                    "low": shorten(mean - std),
                    "high": shorten(mean + std),
                    "runs": runs,
                }
                axes[name]["sides"].append(lines)
        charts.append({"title": env_id, "y": "episodic return", "axes": axes})

    def without_runs(x, grid, drawn):
        lines = [
            dict(zip(("mean", "low", "high"), map(shorten, curves), strict=True))
            for curves in drawn
        ]
        return {
            "x": x,
            "from": float(grid[0]),
            "to": float(grid[-1]),
            "sides": [line | {"runs": []} for line in lines],
        }

    if overall:
        axes = {
            name: without_runs(name, grid, drawn.values())
            for name, (grid, drawn) in overall.items()
        }
        title = f"{len(told['shared'])} environments: interquartile mean score"
        charts.append({"title": title, "y": "score", "axes": axes})
    if told["overall"]:
        profiles = [of_side["profile"] for of_side in told["overall"]["sides"].values()]
        axes = {"score": without_runs("score", told["overall"]["thresholds"], profiles)}
        charts.append(
            {
                "title": "Performance profile: share of runs above a score",
                "y": "share of runs",
                "axes": axes,
            }
        )
    return charts


def make_table(header, lines):
    """A table of cells that are HTML already."""
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    body = []
    for line in lines:
        cells = [
            f'<td data-name="{escape(name)}">{cell}</td>'
            for name, cell in zip(header, line, strict=True)
        ]
        body.append(f"<tr>{''.join(cells)}</tr>")
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"


def make_text_table(header, lines):
    return make_table(header, [[escape(cell) for cell in line] for line in lines])


def mark(verdict):
    """The class that colours a verdict."""
    return (
        "better" if verdict.startswith("better") else "worse" if verdict.startswith("worse") else ""
    )


def make_link(run, page):
    if run.folder:
        target = (
            quote(
                os.path.relpath(run.folder.absolute(), page.absolute().parent).replace(os.sep, "/")
            )
            + "/"
        )
    else:
        target = run.link
    return f'<a href="{escape(target)}">{escape(run.name)}</a>' if target else escape(run.name)


def find_video(runs):
    """The last video of these runs; links that lead out of a run folder are not followed."""
    found = []
    for run in runs:
        for path in run.folder.glob("videos/*.mp4") if run.folder else ():
            if path.is_file() and path.resolve().is_relative_to(run.folder.resolve()):
                found.append((path.stat().st_mtime, path.name, path, run))
    return max(found)[2:] if found else None


def make_videos(told, sides, page):
    shown, spent = [], 0
    for env_id in told["env_ids"]:
        for label, runs in sides.items():
            found = find_video([run for run in runs if run.env_id == env_id])
            if not found:
                continue
            path, run = found
            size = path.stat().st_size
            if size <= LARGEST_VIDEO and spent + size <= LARGEST_SUM:
                spent += size
                source = "data:video/mp4;base64," + base64.b64encode(path.read_bytes()).decode()
            else:
                source = quote(
                    os.path.relpath(path.absolute(), page.absolute().parent).replace(os.sep, "/")
                )
            words = f"{env_id}, {label}, seed {run.seed}: {report.plain(path.stem)}"
            attributes = f'controls muted playsinline preload="metadata" src="{escape(source)}"'
            video = f"<video {attributes}></video>"
            shown.append(f"<figure>{video}<figcaption>{escape(words)}</figcaption></figure>")
    return f'<h2>Videos</h2><div class="videos">{"".join(shown)}</div>' if shown else ""


def write_page(path, told, sides, notes, differences):
    first, *others = told["sides"]
    header, lines = report.table(told)
    for line, row in zip(lines, told["rows"], strict=True):
        line[:] = map(escape, line)
        line[-1] = (
            f'<span class="{mark(row["verdict"])}">{line[-1]}</span>' if row.get("verdict") else ""
        )
    rows = []
    for label, runs in sides.items():
        for run in sorted(runs, key=lambda run: (run.env_id, len(run.seed), run.seed)):
            final = report.numbers(run.final(told["window"]))[0] if len(run.rows) else ""
            cells = [run.env_id, label, run.seed, final, f"{run.step:,}"]
            rows.append([make_link(run, path), *map(escape, cells), escape(run.state or "yes")])
    changed = make_text_table(
        ["what", *told["sides"]], [[name, *values] for _, name, values in differences]
    )
    script = "\n" + (HERE / "page.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    data = json.dumps(
        {"sides": told["sides"], "charts": make_charts(told)},
        separators=(",", ":"),
        allow_nan=False,
    )
    said = [
        f'<li class="{mark(line.rpartition(": ")[2])}">{escape(line)}</li>'
        for line in report.sentences(told)
    ]
    listed = "".join(f"<li>{escape(note)}</li>" for note in notes)
    parts = {
        "policy": "default-src 'none'; style-src 'unsafe-inline'; "
        f"media-src data: file: 'self'; script-src 'sha256-{digest}'",
        "title": escape(first + (" against " + ", ".join(others) if others else "")),
        "first": escape(first),
        "window": str(told["window"]),
        "verdicts": "".join(said),
        "returns": make_table(header, lines),
        "scores": make_text_table(*report.overall_table(told)),
        "scale": escape(report.scale_words(told)),
        "differences": changed
        if differences
        else "<p>None: the sides have the same settings and versions.</p>",
        "videos": make_videos(told, sides, path),
        "runs": make_table(
            ["run", "environment", "side", "seed", "final return", "steps", "counts"], rows
        ),
        "count": str(len(rows)),
        "open": "open" if len(rows) <= 20 else "",
        "notes": f"<h2>Notes</h2><ul>{listed}</ul>" if notes else "",
        "data": data.replace("<", "\\u003c"),  # no tag can end the script that holds it
        "script": script,
    }
    page = (HERE / "page.html").read_text(encoding="utf-8")
    path.write_text(
        re.sub(r"\{\{(\w+)\}\}", lambda name: parts[name[1]], page), encoding="utf-8"
    )  # in one go: no text is filled twice
