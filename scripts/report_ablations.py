"""Make the plots and the table of docs/rl-algorithms/ppo-details.md from results/ablations/.

    python scripts/report_ablations.py

scripts/run_ablations.py makes the runs. Only seeds that both sides of a comparison have count. A
run counts with the mean return of the episodes in its last tenth.
"""

import csv
import json
import re
import tomllib
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "results" / "ablations"
PAGE = ROOT / "docs" / "rl-algorithms" / "ppo-details.md"
PLAN = tomllib.loads((ROOT / "scripts" / "ablations.toml").read_text())
TASKS = [task["name"] for task in PLAN["task"]]
BLOCK = re.compile(r"(<!-- ablations -->\n).*?(\n<!-- end of ablations -->)", re.S)
STEPS = 200_000  # of every task
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


def table(data):
    lines = [
        "| detail | task | without it | seeds | return with | return without |",
        "|---|---|---|---|---|---|",
    ]
    for ablation in sorted(PLAN["ablation"], key=order):
        runs, told = sides(ablation, data), []
        for side in runs:
            finals = [final(rows) for rows in side]
            spread = f" ± {np.std(finals, ddof=1):.1f}" if len(finals) > 1 else ""
            told.append(f"{np.mean(finals):.1f}{spread}" if finals else "not run")
        if runs[0] and all(map(np.array_equal, *runs)):
            told[1] = "identical runs: it has no effect"
        cells = ablation["detail"], ablation["task"], ablation["without"], len(runs[0]), *told
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def order(ablation):
    family, number = ablation["detail"].split()
    return family != "core", int(number)


def block(data):
    """What the page says between its two marks."""
    counts = {len(sides(ablation, data)[0]) for ablation in PLAN["ablation"]}
    if counts == {0}:
        return (
            "The ablations have not been run yet: `scripts/run_ablations.py` makes the runs.\n\n"
            + table(data)
        )
    seeds = f"{min(counts)} to {max(counts)}" if len(counts) > 1 else str(counts.pop())
    about = json.loads((DATA / "runs.json").read_text())
    devices = ", ".join(sorted({run["device"] for run in about.values()}))
    protocol = f"{STEPS:,} steps, {seeds} seeds, on {devices}"
    return f"{protocol}; mean ± standard deviation of the runs.\n\n{table(data)}"


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
