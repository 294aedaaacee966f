"""The report of rlops on several sides, of which the first is the baseline: Markdown and CSV."""

import csv
import math
import re

import numpy as np

from cleanrl_utils.rlops import scores

POINTS = 200  # of a curve
AXES = {"steps": 0, "time": 2}  # and their column in a run's rows


def plain(value, most=120):
    """Text without control characters, which a stranger's run folder may contain."""
    text = "".join(c if c.isprintable() else "?" for c in str(value)[: most + 1])
    return text if len(text) <= most else text[: most - 1] + "…"


def compare(sides, window):
    """All that is shown, from {label: runs}, as plain dictionaries and lists."""
    labels = list(sides)
    env_ids = list(dict.fromkeys(run.env_id for runs in sides.values() for run in runs))
    counting = {
        env_id: {
            label: [run for run in runs if run.env_id == env_id and not run.state]
            for label, runs in sides.items()
        }
        for env_id in env_ids
    }
    finals = {
        env_id: {
            label: np.array([run.final(window) for run in runs]) for label, runs in on_env.items()
        }
        for env_id, on_env in counting.items()
    }
    rows = []
    for env_id in env_ids:
        for label in labels:
            runs, base = finals[env_id][label], finals[env_id][labels[0]]
            row = {
                "environment": env_id,
                "side": label,
                "seeds": len(runs),
                "returns": runs.tolist(),
            }
            row |= {
                "mean": runs.mean() if len(runs) else None,
                "std": runs.std() if len(runs) else None,
            }
            if label != labels[0]:
                row |= judge([base], [runs], labels[0])
            rows.append(row)
    shared = [env_id for env_id in env_ids if all(len(runs) for runs in finals[env_id].values())]
    told = {
        "sides": labels,
        "env_ids": env_ids,
        "shared": shared,
        "rows": rows,
        "window": window,
        "counting": counting,
    }
    told["overall"] = sum_up(labels, shared, counting, finals, window)
    told["curves"] = {name: draw_curves(told, sides, column) for name, column in AXES.items()}
    overall_curves = {name: draw_overall(told, column) for name, column in AXES.items()}
    return told | {"overall_curves": overall_curves if all(overall_curves.values()) else None}


def judge(base, other, base_label):
    """The difference of two sides and whether it is more than noise, in numbers and words."""
    if not all(len(runs) for runs in (*base, *other)):
        return {"difference": None, "interval": None, "verdict": "nothing to compare"}
    shift, interval = scores.difference(base, other)
    told = {"difference": shift, "interval": interval}
    fewest = min(len(runs) for runs in (*base, *other))
    if interval is None:
        return told | {"verdict": "a single seed shows no noise: add 2 or more"}
    if interval[0] > 0 or interval[1] < 0:
        return told | {
            "verdict": f"{'better' if shift > 0 else 'worse'} than {base_label}, outside the noise"
        }
    if shift == 0:
        return told | {"verdict": f"the same as {base_label}"}
    needed = scores.seeds_to_settle(base, other)
    more = (
        "more than 1,000 seeds" if needed is None else f"about {max(needed - fewest, 1)} more seeds"
    )
    return told | {"verdict": f"within the noise; if it is real, {more} a side would settle it"}


def find_scale(env_id, runs, window):
    """The returns that count as 0 and 1: random and human on Atari, else the least and the most."""
    game = scores.find_game(env_id)
    if game:
        return scores.ATARI[game]
    ends = [
        np.unique(np.linspace(min(window, len(run.rows)), len(run.rows), POINTS).astype(int))
        for run in runs
    ]
    means = [
        run.rows[max(end - window, 0) : end, 1].mean()
        for run, on_run in zip(runs, ends, strict=True)
        for end in on_run
    ]
    low, high = min(means), max(means)
    return (low, high) if high > low else (low, low + 1)


def sum_up(labels, shared, counting, finals, window):
    """Scores over all environments that every side has runs of."""
    if not shared:
        return None
    scale = {
        e: find_scale(e, [run for runs in counting[e].values() for run in runs], window)
        for e in shared
    }
    scaled = {
        label: [
            (finals[env_id][label] - scale[env_id][0]) / (scale[env_id][1] - scale[env_id][0])
            for env_id in shared
        ]
        for label in labels
    }
    every = np.concatenate([runs for side in scaled.values() for runs in side])
    thresholds = np.linspace(min(0, every.min()), max(1, every.max()), 101)
    told = {"scale": scale, "thresholds": thresholds.tolist(), "sides": {}}
    for label, side in scaled.items():
        of_side = {
            name: scores.interval(getattr(scores, name), side)
            for name in ("iqm", "mean", "median", "optimality_gap")
        }
        of_side["profile"] = scores.interval(
            lambda x: scores.profile(x, thresholds), side, count=2000
        )
        if label != labels[0]:
            of_side["improvement"] = scores.interval(
                scores.probability_of_improvement, side, scaled[labels[0]], count=2000
            )
            of_side |= judge(scaled[labels[0]], side, labels[0])
        told["sides"][label] = of_side
    return told


def draw_curves(told, sides, column):
    """{environment: (grid, {label: (curve of each run, mean, std)})} over steps or seconds."""
    drawn = {}
    for env_id in told["env_ids"]:
        runs = {
            label: [run for run in of_side if run.env_id == env_id and len(run.rows)]
            for label, of_side in sides.items()
        }
        last = [reach(run, column) for of_side in runs.values() for run in of_side]
        if not last:
            continue
        grid = np.linspace(0, max(last), POINTS)
        drawn[env_id] = (
            grid,
            {
                label: average(of_side, grid, column, told["window"])
                for label, of_side in runs.items()
            },
        )
    return drawn


def reach(run, column):
    return max(run.step, run.rows[-1, 0]) if column == 0 else run.rows[-1, column]


def average(runs, grid, column, window):
    curves = []
    for run in runs:
        with np.errstate(invalid="ignore"):  # of a run that diverged
            curve, seen = scores.running_mean(run.rows, grid, column, window)
        curves.append(np.where(seen & (grid <= reach(run, column)), curve, np.nan))
    counting = [curve for run, curve in zip(runs, curves, strict=True) if not run.state]
    stacked = np.array(counting or [np.full(len(grid), np.nan)])
    return (
        [(run, curve) for run, curve in zip(runs, curves, strict=True)],
        stacked.mean(0),
        stacked.std(0),
    )


def draw_overall(told, column):
    """(grid, {label: (interquartile mean, low, high)}) of the scores, up to the shortest run."""
    overall, counting = told["overall"], told["counting"]
    if overall is None or len(told["shared"]) < 2:
        return None
    runs = [
        run for env_id in told["shared"] for of_side in counting[env_id].values() for run in of_side
    ]
    grid = np.linspace(0, min(reach(run, column) for run in runs), POINTS // 2)
    grid = grid[grid >= max(run.rows[0, column] for run in runs)]
    if not len(grid):  # a run was over before another had an episode
        return None
    drawn = {}
    for label in told["sides"]:
        scaled = []
        for env_id in told["shared"]:
            low, high = overall["scale"][env_id]
            curves = [
                scores.running_mean(run.rows, grid, column, told["window"])[0]
                for run in counting[env_id][label]
            ]
            scaled.append((np.array(curves).T - low) / (high - low))
        drawn[label] = scores.interval(scores.iqm, scaled, count=500)
    return grid, drawn


def numbers(*values):
    """With as many digits as the largest of them needs."""
    largest = max((abs(value) for value in values if value and math.isfinite(value)), default=1)
    digits = min(max(2 - math.floor(math.log10(largest)), 2), 6)
    return [f"{value:,.{digits}f}" for value in values]


def span(value, interval):
    if value is None:
        return "none"
    middle, *ends = numbers(value, *(interval if interval is not None else ()))
    return middle + (f" [{', '.join(ends)}]" if ends else "")


def table(told):
    """Header and rows of the table of final returns, as text."""
    header = ["environment", "side", "seeds", "final return", "difference [95%]", "in words"]
    lines = []
    for row in told["rows"]:
        final = " ± ".join(numbers(row["mean"], row["std"])) if row["seeds"] else "none"
        compared = (
            [span(row["difference"], row["interval"]), row["verdict"]]
            if "verdict" in row
            else ["", ""]
        )
        lines.append([row["environment"], row["side"], str(row["seeds"]), final, *compared])
    return header, lines


def align(header, lines):
    """The lines of a table as text."""
    widths = [max(map(len, column)) for column in zip(header, *lines, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in (header, *lines)
    ]


def overall_table(told):
    names = {
        "iqm": "interquartile mean",
        "mean": "mean",
        "median": "median",
        "optimality_gap": "optimality gap",
    }
    header, lines = (
        ["side", *(f"{name} [95%]" for name in names.values()), "probability of improvement [95%]"],
        [],
    )
    for label, of_side in told["overall"]["sides"].items() if told["overall"] else ():
        cells = [span(of_side[name][0], of_side[name][1:]) for name in names]
        better = of_side.get("improvement")
        lines.append([label, *cells, span(better[0], better[1:]) if better else ""])
    return header, lines


def sentences(told):
    """The verdicts, one a line."""
    said = []
    for row in told["rows"]:
        if "verdict" in row:
            shift = span(row["difference"], row["interval"])
            names = f"{row['environment']}: {row['side']} - {told['sides'][0]}"
            said.append(f"{names} = {shift}: {row['verdict']}")
    overall = told["overall"]
    if overall and len(told["shared"]) > 1:
        for label, of_side in overall["sides"].items():
            if "verdict" in of_side:
                shift = span(of_side["difference"], of_side["interval"])
                names = f"{label} - {told['sides'][0]}"
                names = f"mean score of {len(told['shared'])} environments: {names}"
                said.append(f"{names} = {shift}: {of_side['verdict']}")
    if len(said) > 10:
        said.append(
            f"of {len(said)} differences, about {len(said) / 20:.0f} "
            "would be outside the noise by chance alone"
        )
    return said


def scale_words(told):
    if not told["overall"]:
        return "No environment has runs of every side that count."
    human = [env_id for env_id in told["shared"] if scores.find_game(env_id)]
    others = [env_id for env_id in told["shared"] if env_id not in human]
    words = (
        ["Scores are 0 for random play and 1 for a human, as published: " + ", ".join(human) + "."]
        if human
        else []
    )
    if others:
        words += [
            "Scores are 0 for the least and 1 for the most that any run here had: "
            + ", ".join(others)
            + "."
        ]
    left_out = [env_id for env_id in told["env_ids"] if env_id not in told["shared"]]
    if left_out:
        words += [
            "Not in the scores, since a side has no run that counts: " + ", ".join(left_out) + "."
        ]
    return " ".join(words)


def list_notes(sides, problems):
    """Every run that does not count and everything else that is not as it should be."""
    notes = [
        f"{label}: {run.name} {run.state}: left out"
        for label, runs in sides.items()
        for run in runs
        if run.state
    ]
    notes += [
        f"{label}: {run.name}: {note}"
        for label, runs in sides.items()
        for run in runs
        for note in run.notes
    ]
    return notes + problems


def list_differences(sides):
    """(kind, name, what each side has) of the settings and versions in which the sides differ."""
    rows = []
    for kind in ("settings", "versions"):
        names = dict.fromkeys(
            name for runs in sides.values() for run in runs for name in getattr(run, kind)
        )
        for name in names:
            values = [
                ", ".join(sorted({getattr(run, kind).get(name, "none") for run in runs}))
                for runs in sides.values()
            ]
            if len(set(values)) > 1:
                rows.append((kind, name, values))
    return rows


def escape_markdown(text):
    return re.sub(r"([\\`*<>|]|^\[|\](?=[(\[]))", r"\\\1", text)


def markdown_table(header, lines):
    rows = [
        header,
        ["---"] * len(header),
        *([escape_markdown(cell) for cell in line] for line in lines),
    ]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def write_markdown(path, told, notes, differences):
    parts = [markdown_table(*table(told))]
    parts.append(
        f"Each seed counts with the mean of its last {told['window']} episodes; "
        "mean ± standard deviation over seeds; "
        f"differences are to {escape_markdown(told['sides'][0])}, with their 95% intervals (Welch)."
    )
    if told["overall"]:
        parts += [
            markdown_table(*overall_table(told)),
            "95% intervals from a stratified bootstrap.",
        ]
    parts.append(escape_markdown(scale_words(told)))
    parts += ["\n".join(f"- {escape_markdown(line)}" for line in sentences(told))]
    if differences:
        lines = [[name, *values] for _, name, values in differences]
        parts.append(
            markdown_table(["setting or version", *map(escape_markdown, told["sides"])], lines)
        )
    if notes:
        parts.append("\n".join(f"- {escape_markdown(note)}" for note in notes))
    path.write_text("\n\n".join(filter(None, parts)) + "\n", encoding="utf-8")


def write_csv(path, told):
    """The table of final returns."""
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow("environment side seeds mean std difference low high in_words".split())
        for row in told["rows"]:
            low, high = row.get("interval") or (None, None)
            values = (row["mean"], row["std"], row.get("difference"), low, high)
            values = ["" if value is None else f"{value:.6g}" for value in values]
            rows.writerow(
                [row["environment"], row["side"], row["seeds"], *values, row.get("verdict", "")]
            )


def write_runs(path, sides, window):
    """One row for each run, those that do not count too."""
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(
            "environment side seed final_return episodes steps seconds counts why_not run".split()
        )
        for label, runs in sides.items():
            for run in runs:
                final = f"{run.final(window):.6g}" if len(run.rows) else ""
                seconds = f"{run.rows[-1, 2]:.1f}" if len(run.rows) else ""
                counts = ["no", run.state] if run.state else ["yes", ""]
                rows.writerow(
                    [
                        run.env_id,
                        label,
                        run.seed,
                        final,
                        len(run.rows),
                        run.step,
                        seconds,
                        *counts,
                        run.name,
                    ]
                )
