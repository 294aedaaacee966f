"""Make the plots and the table of docs/rl-algorithms/ppo-details.md from results/ablations/.

    python scripts/report_ablations.py

scripts/run_ablations.py makes the runs. Only seeds that both sides of a comparison have count. A
run counts with the mean return of the episodes in its last tenth. The interval of a difference is
Welch's. With five seeds or more there is a verdict: Welch's t-test, with Holm's correction for the
number of details that are tested, at a level of 5%.
"""

import csv
import json
import re
import tomllib
from pathlib import Path

import numpy as np
from scipy import stats

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "results" / "ablations"
PAGE = ROOT / "docs" / "rl-algorithms" / "ppo-details.md"
PLAN = tomllib.loads((ROOT / "scripts" / "ablations.toml").read_text())
TASKS = [task["name"] for task in PLAN["task"]]
BLOCK = re.compile(r"(<!-- ablations -->\n).*?(\n<!-- end of ablations -->)", re.S)
STEPS = 200_000  # of every task
LEVEL = 0.05  # for all verdicts together
MIN_SEEDS = 5  # for a verdict
SMOOTH = 5  # hundredths of a run that a point of a curve is the mean of


def read():
    """{variant: {seed: array of rows (step, episodes, mean return)}}"""
    data = {}
    if (DATA / "curves.csv").exists():
        with (DATA / "curves.csv").open() as file:
            for row in csv.DictReader(file):
                run = data.setdefault(row["variant"], {}).setdefault(int(row["seed"]), [])
                run.append([float(row[name]) for name in ("step", "episodes", "mean_return")])
    return {
        name: {seed: np.array(rows) for seed, rows in runs.items()} for name, runs in data.items()
    }


def sides(ablation, data):
    """The runs with and without a detail, one of each for each seed that both have."""
    whole, cut = f"task_{TASKS.index(ablation['task'])}", ablation["detail"].replace(" ", "_")
    seeds = sorted(set(data.get(whole, {})) & set(data.get(cut, {})))
    return [data[whole][seed] for seed in seeds], [data[cut][seed] for seed in seeds]


def final(rows):
    """The mean return of the episodes in the last tenth of a run, or of its last ones."""
    last = rows[rows[:, 0] > 0.9 * STEPS]
    last = last if len(last) else rows[-1:]
    return np.average(last[:, 2], weights=last[:, 1])


def compare(ablation, data):
    """The final returns with and without a detail, and Welch's test of their difference."""
    runs = sides(ablation, data)
    finals = [np.array([final(rows) for rows in side]) for side in runs]
    is_same = bool(runs[0]) and all(map(np.array_equal, *runs))
    varies = len(runs[0]) > 1 and any(np.ptp(side) > 1e-6 for side in finals)
    return finals, welch(*finals) if varies else None, is_same


def welch(x, y):
    """The difference of the means, the half of its 95% interval, and the p-value."""
    parts = np.var(x, ddof=1) / len(x), np.var(y, ddof=1) / len(y)
    error = sum(parts) ** 0.5
    freedom = sum(parts) ** 2 / (parts[0] ** 2 / (len(x) - 1) + parts[1] ** 2 / (len(y) - 1))
    difference = np.mean(x) - np.mean(y)
    p_value = 2 * stats.t.sf(abs(difference) / error, freedom)
    return difference, stats.t.ppf(0.975, freedom) * error, p_value


def verdicts(data):
    """{detail: verdict} of those with enough seeds, by Holm's method over all of them."""
    found, p_values = {}, {}
    for ablation in PLAN["ablation"]:
        (whole, cut), test, is_same = compare(ablation, data)
        if len(whole) < MIN_SEEDS:
            found[ablation["detail"]] = "too few seeds" if len(whole) else "not run"
        elif is_same or (test is None and np.isclose(whole.mean(), cut.mean())):
            found[ablation["detail"]] = "not distinguishable"
        else:
            direction = "matters" if whole.mean() > cut.mean() else "better without it"
            p_values[ablation["detail"]] = test[2] if test else 0, direction
    still = True
    for rank, (detail, (p_value, direction)) in enumerate(sorted(p_values.items(), key=by_p)):
        still = still and p_value <= LEVEL / (len(p_values) - rank)
        found[detail] = direction if still else "not distinguishable"
    return found


def by_p(item):
    return item[1][0]


def table(data):
    lines = [
        "| detail | task | replaced by | seeds | return with | return without "
        "| difference, 95% interval | verdict |",
        "|---|---|---|---|---|---|---|---|",
    ]
    found = verdicts(data)
    for ablation in sorted(PLAN["ablation"], key=order):
        finals, test, is_same = compare(ablation, data)
        told = []
        for side in finals:
            spread = f" ± {np.std(side, ddof=1):.1f}" if len(side) > 1 else ""
            told.append(f"{np.mean(side):.1f}{spread}" if len(side) else "not run")
        difference = ""
        if is_same:
            told[1] = "identical runs"
        elif test is not None:
            middle, half, _ = test
            difference = f"{middle:.1f} ({middle - half:.1f} to {middle + half:.1f})"
        cells = [ablation["detail"], ablation["task"], ablation["without"], len(finals[0]), *told]
        cells += [difference, found[ablation["detail"]]]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    for detail, reason in PLAN["untested"].items():
        lines.append(f"| {detail} | | | | | | | not tested: {reason} |")
    return "\n".join(lines)


def order(ablation):
    family, number = ablation["detail"].split()
    return ("core", "continuous", "lstm").index(family), int(number)


def block(data):
    """What the page says between its two marks."""
    counts = {len(sides(ablation, data)[0]) for ablation in PLAN["ablation"]}
    if counts == {0}:
        return (
            "The ablations have not been run yet: `scripts/run_ablations.py` makes the runs.\n\n"
            + table(data)
        )
    counts -= {0}
    seeds = f"{min(counts)} to {max(counts)}" if len(counts) > 1 else str(counts.pop())
    about = json.loads((DATA / "runs.json").read_text())
    devices = ", ".join(sorted({run["device"] for run in about.values()}))
    protocol = f"{STEPS:,} steps, {seeds} seeds, on {devices}"
    told = f"mean ± standard deviation of the runs. A verdict needs {MIN_SEEDS} seeds."
    return f"{protocol}; {told}\n\n{table(data)}"


def smooth(rows):
    steps = rows[:, 0]
    weighted, counts = np.cumsum(rows[:, 1] * rows[:, 2]), np.cumsum(rows[:, 1])
    start = np.maximum(np.arange(len(rows)) - SMOOTH, -1)
    before = np.where(start < 0, 0, weighted[start]), np.where(start < 0, 0, counts[start])
    return steps, (weighted - before[0]) / (counts - before[1])


def draw(ablation, data):
    """Two small learning curves, on nothing: their gray reads on a light and on a dark page."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    gray = dict.fromkeys(
        ("axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color", "text.color"), "#808080"
    )
    with plt.rc_context(
        gray
        | {
            "svg.fonttype": "none",
            "svg.hashsalt": "cleanrl",
            "font.size": 9,
            "font.family": "sans-serif",
        }
    ):
        figure, axes = plt.subplots(figsize=(4.6, 2.3), layout="constrained")
        for runs, label, color in zip(
            sides(ablation, data), ("with", "without"), ("#4c8dd6", "#e0803a"), strict=True
        ):
            curves = [smooth(rows) for rows in runs]
            for steps, curve in curves:
                axes.plot(steps, curve, color=color, alpha=0.4, linewidth=0.7)
            grid = np.linspace(max(steps[0] for steps, _ in curves), STEPS, 80)
            axes.plot(
                grid,
                np.mean([np.interp(grid, *curve) for curve in curves], axis=0),
                color=color,
                linewidth=2,
                label=label,
            )
        axes.set(
            xlabel="environment steps", ylabel="return", title=ablation["task"], xlim=(0, STEPS)
        )
        axes.xaxis.set_major_formatter(lambda n, _: f"{n / 1000:.0f}k" if n else "0")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
        path = PAGE.parent / "ablations" / f"{ablation['detail'].replace(' ', '_')}.svg"
        path.parent.mkdir(exist_ok=True)
        figure.savefig(path, transparent=True, metadata={"Date": None})
        plt.close(figure)
        path.write_text(re.sub(r" d=\"[^\"]+\"", shorten, path.read_text()))


def shorten(match):
    """A line of an SVG with coordinates to a tenth of a point, on one line of text."""
    numbers = re.sub(r"\d+\.\d\d+", lambda number: f"{float(number[0]):.1f}", match[0])
    return numbers.replace("\n", " ").replace(' "', '"')


def main():
    data = read()
    drawn = [ablation for ablation in PLAN["ablation"] if sides(ablation, data)[0]]
    for ablation in drawn:
        draw(ablation, data)
    text = PAGE.read_text()
    PAGE.write_text(BLOCK.sub(lambda match: match[1] + block(data) + match[2], text))
    page = PAGE.relative_to(ROOT)
    print(f"ablations: {len(drawn)} of {len(PLAN['ablation'])} plots, and the table of {page}")


if __name__ == "__main__":
    main()
