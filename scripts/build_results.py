"""Rebuild the tables and plots of the docs from the data in results/.

    python scripts/build_results.py              # all of them
    python scripts/build_results.py ppo dqn      # those of two folders of results/

scripts/results.toml says which folder makes which table and plot. Tables are written into the page,
between <!-- results: FOLDER --> and <!-- end of results -->.

As in the published tables, a run counts with the mean return of its last 100 episodes; a table has
the mean ± standard deviation of the runs. A point of a plot is the mean of the last 100 episodes,
or of an eighth of the run's where that is fewer. Over steps, the line is the mean of the runs and
the band their standard deviation; over seconds, each run has a line of its own.
"""

import csv
import json
import re
import sys
import tomllib
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parent.parent
sys.path += [str(ROOT), str(ROOT / "scripts")]  # so that this runs from any folder
import report_ablations  # noqa: E402

from cleanrl_utils.rlops.scores import running_mean  # noqa: E402

RESULTS = ROOT / "results"
DOCS = ROOT / "docs" / "rl-algorithms"
PLAN = tomllib.loads((ROOT / "scripts" / "results.toml").read_text(encoding="utf-8"))
TABLES = {folder: about for folder, about in PLAN.items() if "kind" not in about}


def read(folder):
    """{env_id: {seed: array of rows (step, episodic_return, seconds)}}"""
    data = {env_id: {} for env_id in PLAN[folder]["v1"]}
    for path in sorted((RESULTS / folder).glob("*.csv")):
        env_id, seed = path.stem.split("__")
        with path.open() as file:
            data[env_id][int(seed)] = np.array(list(csv.reader(file))[1:], dtype=float)
    return data


def how_far(env_id, seeds, about):
    """{seed: (steps made, steps planned)} of the runs that were stopped early."""
    stopped = {}
    for seed in seeds:
        run = about.get(f"{env_id}__{seed}", {})
        if "steps" in run and run["steps"] < 0.99 * run["args"]["total_timesteps"]:
            stopped[seed] = run["steps"], run["args"]["total_timesteps"]
    return stopped


def table(folder):
    path = RESULTS / folder / "runs.json"
    about = json.loads(path.read_text()) if path.exists() else {}
    lines = ["| environment | ours, mean ± std | each seed | public v1 |", "|---|---|---|---|"]
    for env_id, runs in read(folder).items():
        if not runs:
            continue
        stopped = how_far(env_id, runs, about)
        notes = {
            seed: f"the first {steps / 1e6:.2f}M of {planned / 1e6:g}M steps"
            for seed, (steps, planned) in stopped.items()
        }
        name = env_id
        if len(stopped) == len(runs):
            fewest, most = min(stopped.values()), max(stopped.values())
            if most[0] < 1.1 * fewest[0]:  # all stopped together: one note for all
                name = f"{env_id}, {notes[min(stopped, key=stopped.get)]}"
                notes = {}
        finals = {seed: rows[-100:, 1].mean() for seed, rows in runs.items()}
        seeds = ", ".join(
            f"{final:.1f} ({notes[seed]})" if seed in notes else f"{final:.1f}"
            for seed, final in finals.items()
        )
        values = list(finals.values())
        spread = f"± {np.std(values):.2f}" if len(values) > 1 else "(one seed)"
        v1 = PLAN[folder]["v1"][env_id]
        lines.append(f"| {name} | {np.mean(values):.2f} {spread} | {seeds} | {v1} |")
    return "\n".join(lines)


def write_table(folder):
    """Replace the table between the two marks on its page."""
    page = DOCS / PLAN[folder]["page"]
    start, end = f"<!-- results: {folder} -->", "<!-- end of results -->"
    block = re.compile(re.escape(start) + r".*?" + re.escape(end), re.S)
    text = page.read_text(encoding="utf-8")
    if len(block.findall(text)) != 1:
        raise SystemExit(f"{page} must have {start} and {end} once")
    new = f"{start}\n\n{table(folder)}\n\n{end}"
    page.write_text(block.sub(lambda _: new, text), encoding="utf-8")


def plot(folder, path):
    data = {env_id: runs for env_id, runs in read(folder).items() if runs}
    size = (4 * len(data), 6)
    figure, axes = plt.subplots(2, len(data), figsize=size, squeeze=False, layout="constrained")
    for i, (env_id, runs) in enumerate(data.items()):
        # with 100 episodes, short runs would be all mean and no curve
        window = min(100, *(1 + len(rows) // 8 for rows in runs.values()))
        plot_over_steps(axes[0, i], runs.values(), window)
        plot_over_seconds(axes[1, i], runs.values(), window)
        axes[0, i].set(title=env_id, xlabel="environment steps")
        axes[1, i].set(xlabel="seconds")
        for axis in axes[:, i]:
            axis.grid(alpha=0.3)
    for row in axes:
        row[0].set_ylabel("episodic return")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def plot_over_steps(axis, runs, window):
    """Each run, their mean and their standard deviation, as far as all of them go."""
    for rows in runs:
        own = np.linspace(0, rows[-1, 0], 300)
        curve, seen = running_mean(rows, own, 0, window)
        axis.plot(own[seen], curve[seen], color="tab:blue", alpha=0.35, linewidth=0.8)
    grid = np.linspace(0, min(rows[-1, 0] for rows in runs), 300)
    averaged = [running_mean(rows, grid, 0, window) for rows in runs]
    seen = np.all([seen for _, seen in averaged], axis=0)
    curves = np.array([curve[seen] for curve, _ in averaged])
    mean, std = curves.mean(0), curves.std(0)
    axis.plot(grid[seen], mean, color="tab:blue")
    band = dict(color="tab:blue", alpha=0.15, linewidth=0)
    axis.fill_between(grid[seen], mean - std, mean + std, **band)
    axis.xaxis.set_major_formatter(thousands)


def plot_over_seconds(axis, runs, window):
    """Each run by itself: runs that shared a machine had to wait, so a mean would mislead."""
    for rows in runs:
        own = np.linspace(0, rows[-1, 2], 300)
        curve, seen = running_mean(rows, own, 2, window)
        axis.plot(own[seen], curve[seen], color="tab:blue", alpha=0.8, linewidth=1.2)


def thousands(steps, _):
    if steps >= 1e6:
        return f"{steps / 1e6:g}M"
    return f"{steps / 1000:.0f}k" if steps else "0"


def plot_elo(folder, path):
    """The ratings of self-play with default flags, and its points against the random player."""
    runs = json.loads((RESULTS / folder / "elo.json").read_text())
    rows = [run["rows"] for run in runs if run["flags"] == "--elo-games 32"]
    # each of shape (seeds, checkpoints)
    steps, _, ratings, points = np.moveaxis(np.array(rows), 2, 0)
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    axes[0].set(xlabel="million steps", ylabel="Elo rating; 0 is the random player")
    axes[1].set(xlabel="million steps", ylabel="points against the random player")
    for axis, curves in zip(axes, (ratings, points), strict=True):
        axis.plot(steps.T / 1e6, curves.T, color="tab:blue", alpha=0.35, linewidth=0.8)
        mean = curves.mean(0)
        axis.plot(steps[0] / 1e6, mean, color="tab:blue", marker="o", markersize=3)
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def build(folder):
    about, path = PLAN[folder], DOCS / f"{folder}.png"
    if about.get("kind") == "ablations":
        report_ablations.main()
        return
    if about.get("kind") == "elo":
        plot_elo(folder, path)
        print(f"{folder}: plot")
        return
    write_table(folder)
    if about["plot"]:
        plot(folder, path)
    print(f"{folder}: table{' and plot' if about['plot'] else ''}")


if __name__ == "__main__":
    folders = sys.argv[1:]
    if unknown := [folder for folder in folders if folder not in PLAN]:
        raise SystemExit(
            f"scripts/results.toml has no {', '.join(unknown)}; it has {', '.join(PLAN)}"
        )
    for folder in folders or PLAN:
        build(folder)
