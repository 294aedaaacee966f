"""Where a run lies among the published runs of its algorithm and environment.

    from cleanrl_utils.bands import describe_run
    print(describe_run("runs/<run>"))  # inside the band, below it since step n, dead, ...

The JSON files beside this one hold, for each algorithm file, the return over steps of its published
runs and the return of the random policy. scripts/build_bands.py builds them from results/.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cleanrl_utils import runs
from cleanrl_utils.errors import plain
from cleanrl_utils.events import read_events

FOLDER = Path(__file__).parent
POINTS = 40  # of a band, evenly spaced over the steps of the published runs
WIDTH = 2  # a return is the mean of the episodes that ended between this many points ago and now
BEHIND = 0.75  # a run may learn as late as the slowest seed had at this share of the steps
SLACK = 0.2  # and miss the lowest seed by this share of its height above the random policy
ALIVE = 0.05  # better than random: by this share of what the published runs gained
COLUMNS = ("runs", "mean", "min", "q25", "median", "q75", "max")
HOUSEKEEPING = (
    *("exp_name", "seed", "torch_deterministic", "cuda", "track", "wandb_project_name"),
    *("wandb_entity", "capture_video", "resume", "checkpoint_interval", "checkpoint_buffer"),
    *("env_id", "total_timesteps", "log_interval", "compile"),
)


@dataclass
class Place:
    verdict: str  # inside, above, below, dead, early or unknown
    line: str


def read_bands(algorithm):
    """All bands of an algorithm file; none if it has no published runs."""
    path = FOLDER / f"{algorithm}.json"
    return json.loads(path.read_text())["bands"] if path.exists() else []


def plain_env_id(env_id):
    """As in the names of run folders, without the module that registers the environment."""
    return env_id.split(":")[-1].replace("/", "-")


def find_band(algorithm, env_id, flags):
    """The band of an environment whose flags are the nearest, or None."""
    bands = [band for band in read_bands(algorithm) if band["env_id"] == plain_env_id(env_id)]
    return min(bands, key=lambda band: len(other_flags(band, flags)), default=None)


def other_flags(band, flags):
    """The flags of a run that differ from the published runs', with both values."""
    return {
        name: (flags[name], value)
        for name, value in band["flags"].items()
        if name in flags and flags[name] != value
    }


def curve(rows, steps, spacing):
    """The mean return of the episodes that ended within WIDTH spacings before each step, or nan.

    rows are (step, return, ...), ordered by step."""
    ends = np.searchsorted(rows[:, 0], steps, side="right")
    starts = np.searchsorted(rows[:, 0], np.asarray(steps) - WIDTH * spacing, side="right")
    sums = np.concatenate([[0], rows[:, 1].cumsum()])
    count = ends - starts
    return np.where(count > 0, (sums[ends] - sums[starts]) / np.maximum(count, 1), np.nan)


def make_floor(band):
    """The lowest return at each point of a band that still counts as inside."""
    steps, low = np.array(band["steps"]), np.array(band["min"])
    scale = abs(np.array(band["mean"]) - band["random"]["mean"])
    earlier = [np.flatnonzero(steps >= BEHIND * step)[0] for step in steps]
    lowest = [low[max(0, first - 1) : i + 1].min() for i, first in enumerate(earlier)]
    return np.array(lowest) - SLACK * scale


def place_rows(rows, band):
    """Where the episodes of a run, (step, return, ...), lie in a band."""
    rows = np.asarray(rows, dtype=float)
    if not len(rows):
        return Place("early", "no episode has ended yet")
    steps, mean = np.array(band["steps"]), np.array(band["mean"])
    reached = min(np.searchsorted(steps, rows[-1, 0] * 1.001, side="right"), len(steps))
    if reached == 0:
        return Place("early", f"the band starts at step {steps[0]:,.0f}")
    if len(broken := rows[~np.isfinite(rows[:, 1])]):
        return Place("below", f"below the band: a return at step {broken[0, 0]:,.0f} is not finite")
    returns = curve(rows, steps[:reached], steps[0])
    floor, random = make_floor(band), band["random"]["mean"]
    now, last = reached - 1, returns[-1]
    if np.isnan(last):
        window = f"{max(0, steps[now] - WIDTH * steps[0]):,.0f} to {steps[now]:,.0f}"
        return Place("early", f"no episode ended in steps {window}")
    gained = ALIVE * (mean.max() - random)
    numbers = f"return {last:.1f}, published runs {band['min'][now]:.1f} to {band['max'][now]:.1f}"
    numbers += f" at step {steps[now]:,.0f}, random policy {random:.1f}"
    if mean[now] <= random + gained:
        numbers += ", from which the published runs do not differ yet"
    is_below = returns < floor[:reached]
    if is_below[-1]:
        inside = np.flatnonzero(~is_below)
        since = inside[-1] + 1 if len(inside) else 0
        if last <= random + gained and floor[now] > random + gained:
            return Place("dead", f"dead, no better than the random policy: {numbers}")
        if now - since >= 1 or reached == len(steps):
            return Place("below", f"below the band since step {steps[since]:,.0f}: {numbers}")
        return Place("inside", f"inside the band until step {steps[since]:,.0f}: {numbers}")
    if last > band["max"][now] + 0.02 * abs(band["max"][now] - random):
        return Place("above", f"above the band: {numbers}")
    return Place("inside", f"inside the band: {numbers}")


def place_episodes(algorithm, env_id, flags, rows):
    """Where the episodes of a run with these flags lie among the published runs of its file."""
    band = find_band(algorithm, env_id, flags)
    if band is None:
        return Place("unknown", f"no published runs of {plain(algorithm)} on {plain(env_id)}")
    rows = np.asarray(rows, dtype=float).reshape(len(rows), -1)
    place = place_rows(rows[np.argsort(rows[:, 0], kind="stable")] if len(rows) else rows, band)
    if others := other_flags(band, flags):
        told = [f"{name} {plain(own)} ({theirs})" for name, (own, theirs) in others.items()]
        place.line += f"; flags that differ from the published runs: {', '.join(told)}"
    if band["runs"][0] < 3:
        place.line += f"; seeds published: {band['runs'][0]}"
    if band["steps"][-1] < 0.95 * band["planned"]:
        place.line += f"; published up to step {band['steps'][-1]:,}"
    return place


def place_run(folder, algorithm=None):
    """Where a finished or unfinished run lies; algorithm is the file it grew out of."""
    run = runs.read_run(folder)
    algorithm = algorithm or Path(run["file"]).stem
    scalars, _ = read_events(Path(folder))
    rows = scalars.get("charts/episodic_return", ())
    return place_episodes(algorithm, run["args"]["env_id"], run["args"], rows)


def describe_run(folder, algorithm=None):
    """One line for tools that print runs; empty if there is nothing to compare with."""
    place = try_to_place(folder, algorithm)
    return place.line if place else ""


def try_to_place(folder, algorithm=None):
    try:
        place = place_run(folder, algorithm)
    except Exception:  # a damaged folder, which other tools report
        return None
    return None if place.verdict == "unknown" else place


def sum_up(folders):
    """Lines for tools that print many runs: those outside the band, and how many are inside."""
    places = {Path(folder).name: try_to_place(folder) for folder in folders}
    places = {name: place for name, place in places.items() if place and place.verdict != "early"}
    outside = {name: place for name, place in places.items() if place.verdict != "inside"}
    lines = [f"{name}: {place.line}" for name, place in outside.items()]
    count = f"{len(places) - len(outside)} of {len(places)}"
    return [*lines, f"runs inside the band of the published ones: {count}"] if places else []
