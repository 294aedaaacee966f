"""Rebuild the tables and plots of the docs from the data in results/.

    python scripts/build_results.py              # all of them, and the overview docs/results.md
    python scripts/build_results.py ppo dqn      # those of two folders of results/

scripts/results.toml says which folder makes which table and plot. Tables are written into the page,
between <!-- results: FOLDER --> and <!-- end of results -->.

As in CleanRL v1's tables, the return of a run is the mean of its last 100 training episodes. A mean
is of finished runs only, with the sample standard deviation and a 95% interval (Student's t); runs
that were stopped early stand apart. A row is compared with CleanRL v1's published number or, where
there is none, with a peer: another library that scripts/train_peers.py trained. A point of a plot
is the mean of the last 100 episodes, or of an eighth of the run's where that is fewer. Its line is
the mean of the runs, the band their sample standard deviation, and the dashed line CleanRL v1's
published mean.
"""

import csv
import json
import re
import sys
import tomllib
from pathlib import Path

import matplotlib
import numpy as np
from scipy import stats

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.lines import Line2D

ROOT = Path(__file__).resolve().parent.parent
sys.path += [str(ROOT), str(ROOT / "scripts")]  # so that this runs from any folder
import report_ablations  # noqa: E402

from cleanrl_utils.rlops.scores import running_mean  # noqa: E402

RESULTS = ROOT / "results"
DOCS = ROOT / "docs" / "rl-algorithms"
PLAN = tomllib.loads((ROOT / "scripts" / "results.toml").read_text(encoding="utf-8"))
HEADS = "environment | steps | return, mean ± SD | 95% interval | each seed"
HEADS += " | v1 (upstream) or peer, mean ± SD | status"
PEERS = {"sb3": "SB3", "sbx": "SBX", "rejax": "rejax"}  # other libraries in results/speed.json
TABLES = {folder: about for folder, about in PLAN.items() if "kind" not in about}


def read(folder, name=None):
    """{env_id: {seed: array of rows (step, episodic_return, seconds)}} of results/name.

    A CSV that runs.json does not name is left out, if there is a runs.json."""
    data = {env_id: {} for env_id in PLAN[folder]["v1"]}
    about = RESULTS / (name or folder) / "runs.json"
    known = json.loads(about.read_text()) if about.exists() else None
    for path in sorted(about.parent.glob("*.csv")):
        if known is not None and path.stem not in known:
            continue
        env_id, seed = path.stem.split("__")
        if env_id not in data:
            raise SystemExit(f"scripts/results.toml has no {env_id} in [{folder}.v1]: {path}")
        with path.open() as file:
            data[env_id][int(seed)] = np.array(list(csv.reader(file))[1:], dtype=float)
    return {env_id: dict(sorted(runs.items())) for env_id, runs in data.items()}


def summarize(folder):
    """For each environment of a folder: the returns of finished runs, and what was stopped."""
    path = RESULTS / folder / "runs.json"
    about = json.loads(path.read_text()) if path.exists() else {}
    for env_id, runs in read(folder).items():
        finished, stopped, planned = {}, {}, 0
        for seed, rows in runs.items():
            run = about.get(f"{env_id}__{seed}", {})
            planned = run.get("args", {}).get("total_timesteps", round(rows[-1, 0]))
            steps = run.get("steps", planned)
            final = rows[-100:, 1].mean()
            if steps < 0.99 * planned:
                stopped[seed] = final, steps
            else:
                finished[seed] = final
        if runs:
            values = np.array(list(finished.values()))
            other = PLAN[folder]["v1"][env_id]
            status = judge(values, published(other))
            if theirs := returns_of_peer(folder, env_id):
                other = f"{PLAN[folder]['peer'][env_id]}: {describe(theirs)[0]}"
                status = judge(values, moments(theirs), "on par")
            yield env_id, planned, finished, stopped, other, status


def returns_of_peer(folder, env_id):
    """Of three runs or more of another library, if they are what the row is compared with."""
    if env_id not in PLAN[folder].get("peer", {}):
        return []
    runs = read(folder, f"{folder}_peer")[env_id].values()
    num_rows = 1 if logs_means(f"{folder}_peer") else 100
    return [rows[-num_rows:, 1].mean() for rows in runs] if len(runs) >= 3 else []


def logs_means(folder):
    """Whether a row is the mean of the last 100 episodes, as Brax logs it, instead of one."""
    path = RESULTS / folder / "runs.json"
    runs = json.loads(path.read_text()).values() if path.exists() else ()
    return any(run.get("rows") == "means of 100 episodes" for run in runs)


def published(v1):
    """Mean, standard deviation and number of seeds of a number in scripts/results.toml, or None."""
    return None if v1 == "none" else (*map(float, v1.split(" ± ")), 3)


def moments(values):
    """Mean, sample standard deviation and number of values."""
    return np.mean(values), np.std(values, ddof=1), len(values)


def judge(values, other, as_good="reproduced"):
    """The status of a row; other is mean, standard deviation and number of seeds, or None."""
    if len(values) < 3:
        return "partial"
    if other is None:
        return "no published number"
    ours, (mean, std, _) = moments(values), other
    p_value = stats.ttest_ind_from_stats(*ours, *other, equal_var=False).pvalue
    if p_value < 0.05:  # Welch's t-test; not a number where neither side varies
        return "better" if ours[0] > mean else "below"
    return as_good if ours[0] >= mean - std else "inconclusive"


def describe(values):
    """Mean ± sample standard deviation, and from three values on the 95% interval of the mean."""
    if len(values) < 2:
        return "".join(f"{value:.2f}" for value in values), ""
    mean, std = np.mean(values), np.std(values, ddof=1)
    if len(values) < 3:
        return f"{mean:.2f} ± {std:.2f}", ""
    half = stats.t.ppf(0.975, len(values) - 1) * std / len(values) ** 0.5
    return f"{mean:.2f} ± {std:.2f}", f"{mean - half:.1f} to {mean + half:.1f}"


def in_short(steps):
    return f"{steps / 1e6:.3g}M" if steps >= 1e6 else f"{steps / 1e3:.3g}k"


def table(folder):
    """Final returns, without the columns that are empty; and how far the other runs are."""
    rows, in_progress = [HEADS.split(" | ")], []
    for env_id, planned, finished, stopped, v1, status in summarize(folder):
        seeds = ", ".join(f"{final:.1f}" for final in finished.values())
        values = describe(list(finished.values()))
        rows.append([env_id, in_short(planned), *values, seeds, v1, status])
        for seed, (final, steps) in stopped.items():
            how_far = f"{in_short(steps)} of {in_short(planned)}"
            in_progress.append(f"| {env_id} | {seed} | {how_far} | {final:.1f} |")
    columns = [column for column in zip(*rows, strict=True) if any(column[1:])]
    lines = [f"| {' | '.join(row)} |" for row in zip(*columns, strict=True)]
    lines.insert(1, "|" + "---|" * len(columns))
    if in_progress:
        lines += ["", "In progress, not included in the means:", ""]
        lines += ["| environment | seed | steps | return so far |", "|---|---|---|---|"]
    return "\n".join(lines + in_progress)


def stem_of(folder):
    """The algorithm file that made the runs of a folder of results/."""
    stems = [path.stem for path in (ROOT / "cleanrl").glob("*.py")]
    return max((stem for stem in stems if folder.startswith(stem)), key=len)


def page_of(stem):
    """The page of an algorithm file: its heading ends with the file's name."""
    pages = sorted((ROOT / "docs" / "rl-algorithms").glob("*.md"))
    heads = {path.name: path.read_text(encoding="utf-8").split("\n", 1)[0] for path in pages}
    return next(name for name, head in heads.items() if head.endswith(f"({stem}.py)"))


def evidence(folder, env_id):
    """Links to the data of a row, the command that makes the runs, their commits and a video."""
    links = [f"[data](../results/{folder})"]
    if (ROOT / "benchmark" / f"{folder}.sh").exists():
        links.append(f"[command](../benchmark/{folder}.sh)")
    about = RESULTS / folder / "runs.json"
    runs = json.loads(about.read_text()) if about.exists() else {}
    of_row = [run for name, run in runs.items() if name.rpartition("__")[0] == env_id]
    commits = sorted({run["commit"][:7] for run in of_row if run.get("commit")})
    links += [f"`{commit}`" for commit in commits]
    film = f"rl-algorithms/videos/{stem_of(folder)}__{env_id}.mp4"
    if folder == stem_of(folder) and (ROOT / "docs" / film).exists():
        links.append(f"[video]({film})")
    return ", ".join(links)


def ratios(told, peer):
    """Of each round; those that were kept without the digits to compute them are in the entry."""
    if peer in told.get("ratios", {}):
        return told["ratios"][peer]
    return [figures["ours"] / figures[peer] for figures in told["rounds"] if peer in figures]


def speed(folder, env_id):
    """How many times as fast as a library a file is, where docs/speed.md compares the two."""
    for told in json.loads((RESULTS / "speed.json").read_text(encoding="utf-8")):
        if (told["file"], told["env_id"]) == (folder, env_id):
            peers = [peer for peer in PEERS if peer in told["rounds"][0]]
            return ", ".join(f"{np.median(ratios(told, x)):.2f}x {PEERS[x]}" for x in peers)
    return ""


def overview():
    """A row for each file and environment; files without data of their own are not run."""
    lines = [
        "| file | environment | steps | seeds | return, mean ± SD | 95% interval "
        "| v1 (upstream) or peer, mean ± SD | paper | status | speed | evidence |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    stems = sorted(path.stem for path in (ROOT / "cleanrl").glob("*.py"))
    shown = set()
    for folder in sorted(TABLES):
        shown.add(stem_of(folder))
        name = f"[{folder}](rl-algorithms/{PLAN[folder]['page']})"
        for env_id, planned, finished, _, v1, status in summarize(folder):
            values = " | ".join(describe(list(finished.values())))
            row = f"{name} | {env_id} | {in_short(planned)} | {len(finished)} | {values}"
            paper = PLAN[folder].get("paper", {}).get(env_id, "")
            told = f"{v1} | {paper} | {status} | {speed(folder, env_id)}"
            lines.append(f"| {row} | {told} | {evidence(folder, env_id)} |")
    for stem in stems:
        if stem not in shown:
            status = "Elo ratings" if stem in PLAN else "not run"
            name = f"[{stem}](rl-algorithms/{page_of(stem)})"
            lines.append(f"| {name} |  |  | 0 |  |  |  |  | {status} |  |  |")
    return "\n".join(lines)


def is_judged(row):
    return row[-1] not in ("partial", "no published number")


def tally():
    """How many results are as good as what they are compared with, and of how many files."""
    rows = [(folder, row) for folder in TABLES for row in summarize(folder)]
    judged = [(folder, row) for folder, row in rows if is_judged(row)]
    of_peers = [row[-1] for folder, row in judged if row[0] in PLAN[folder].get("peer", {})]
    of_v1 = [row[-1] for folder, row in judged if row[0] not in PLAN[folder].get("peer", {})]
    stems = {path.stem for path in (ROOT / "cleanrl").glob("*.py")}
    compared = {stem_of(folder) for folder, _ in judged}
    atari = {stem for stem in stems if "_atari" in stem}
    done = {stem_of(folder) for folder, row in rows if row[-1] != "partial"} & atari
    counted = f"{len(done)} of {len(atari)} Atari files have" if done else "No Atari file has"
    return (
        f"{count(of_v1)} results with three or more finished seeds match or exceed "
        f"CleanRL v1's published number{the_others(of_v1)}.\n"
        f"Where v1 has none, {count(of_peers)} match or exceed another library that was trained "
        f"with the same settings and steps, on the same seeds or the first three of them"
        f"{the_others(of_peers)}.\n"
        f"**{len(compared)} of {len(stems)} files** have such a comparison. "
        f"**{counted} three finished seeds yet**: Atari's 10M-step runs are partial or not run."
    )


def count(judged):
    good = sum(status in ("better", "reproduced", "on par") for status in judged)
    return f"**{good} of {len(judged)}**"


def the_others(judged):
    others = [f"{judged.count(x)} {x}" for x in ("inconclusive", "below") if x in judged]
    return "; " * bool(others) + " and ".join(others)


def highlights():
    """For the README: the tally, and the first result of each file that matches v1."""
    lines = []
    for folder in sorted(TABLES):
        peers = PLAN[folder].get("peer", {})
        rows = [row for row in summarize(folder) if row[-2] != "none" and row[0] not in peers]
        for env_id, _, finished, _, v1, status in rows:
            if status in ("better", "reproduced"):
                values, _ = describe(list(finished.values()))
                cells = f"`{folder}.py` | {env_id} | {len(finished)} | {values} | {v1} | {status}"
                lines.append(f"| {cells} |")
                break
    return "\n".join(
        [
            f"{tally()} One result of each reproduced file:",
            "",
            "| file | environment | seeds | return, mean ± SD | v1 (upstream), mean ± SD "
            "| status |",
            "|---|---|---|---|---|---|",
            *lines,
        ]
    )


def write(page, name, text):
    """Replace what stands between the two marks of a page."""
    start, end = f"<!-- results: {name} -->", "<!-- end of results -->"
    block = re.compile(re.escape(start) + r".*?" + re.escape(end), re.S)
    old = page.read_text(encoding="utf-8")
    if len(block.findall(old)) != 1:
        raise SystemExit(f"{page} must have {start} and {end} once")
    new = f"{start}\n\n{text}\n\n{end}"
    page.write_text(block.sub(lambda _: new, old), encoding="utf-8")


def plot(folder, path):
    data = {env_id: runs for env_id, runs in read(folder).items() if runs}
    beside = dict(PLAN[folder].get("beside", {}))
    if any(returns_of_peer(folder, env_id) for env_id in data):
        beside[f"{folder}_peer"] = ", ".join(sorted(set(PLAN[folder]["peer"].values())))
    size = (4 * len(data), 3.2)
    figure, axes = plt.subplots(1, len(data), figsize=size, squeeze=False, layout="constrained")
    for i, (axis, (env_id, runs)) in enumerate(zip(axes[0], data.items(), strict=True)):
        others = {name: read(folder, name).get(env_id, {}) for name in beside}
        lengths = [len(rows) for group in (runs, *others.values()) for rows in group.values()]
        # with 100 episodes, short runs would be all mean and no curve
        window = min(100, *(1 + length // 8 for length in lengths))
        plot_curves(axis, runs.values(), window, f"C{i}")
        others = {name: other for name, other in others.items() if other}
        colors = [f"C{i}", *("0.45", "0.72")[: len(others)]]
        for color, (name, other) in zip(colors[1:], others.items(), strict=True):
            plot_curves(axis, other.values(), 1 if logs_means(name) else window, color)
        if others:
            handles = [Line2D([], [], color=color) for color in colors]
            own = PLAN[folder].get("label", f"{stem_of(folder)}.py")
            axis.legend(handles, [own, *(beside[name] for name in others)], fontsize=8)
        v1 = PLAN[folder]["v1"][env_id]
        if v1 != "none":
            published = dict(color="black", linestyle="--", linewidth=0.9, label="CleanRL v1")
            axis.axhline(float(v1.split(" ± ")[0]), **published)
            axis.legend(fontsize="small", framealpha=0.6)
        axis.set(title=env_id, xlabel="environment steps")
        axis.grid(alpha=0.3)
    axes[0, 0].set_ylabel("episodic return")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def plot_curves(axis, runs, window, color="C0"):
    """Each run, their mean and their standard deviation, as far as all of them go."""
    thin = dict(alpha=0.35, linewidth=0.8) if len(runs) > 1 else {}
    for rows in runs:
        own = np.linspace(0, rows[-1, 0], 300)
        curve, seen = running_mean(rows, own, 0, window)
        axis.plot(own[seen], curve[seen], color=color, **thin)
    axis.xaxis.set_major_formatter(thousands)
    if len(runs) == 1:
        return
    grid = np.linspace(0, min(rows[-1, 0] for rows in runs), 300)
    averaged = [running_mean(rows, grid, 0, window) for rows in runs]
    seen = np.all([seen for _, seen in averaged], axis=0)
    curves = np.array([curve[seen] for curve, _ in averaged])
    mean, std = curves.mean(0), curves.std(0, ddof=1)
    axis.plot(grid[seen], mean, color=color)
    band = dict(color=color, alpha=0.15, linewidth=0)
    axis.fill_between(grid[seen], mean - std, mean + std, **band)


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
    write(DOCS / about["page"], folder, table(folder))
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
    write(DOCS.parent / "results.md", "tally", tally())
    write(DOCS.parent / "results.md", "overview", overview())
    write(DOCS.parent.parent / "README.md", "highlights", highlights())
