"""Run folders: what run.json says, how far a run got, its evaluations, and its command again.

    from cleanrl_utils import runs
    from cleanrl_utils.events import read_events

    for folder in runs.find_runs("runs"):
        run = runs.read_run(folder)  # run["args"], run["file"], run["tags"], run["packages"]
        scalars, problems = read_events(folder)
        print(folder, runs.last_step(scalars), runs.is_finished(run, scalars))

A run folder may be untrusted: nothing in it is executed, and its text is printed with
errors.plain().
"""

import json
import re
from pathlib import Path

import numpy as np

LARGEST_JSON = 2**24  # bytes


def require(condition, problem):
    if not condition:
        raise ValueError(problem)


def find_runs(parent="runs"):
    """The run folders in a folder, in the order of their names; or the folder itself if it is one.

    A folder with event files and no run.json is listed too: read_run says what it lacks. Others,
    such as the benchmark's journal, are no runs.
    """
    parent = Path(parent)
    require(parent.is_dir(), f"there is no folder {parent}")
    if is_run(parent):
        return [parent]
    return sorted(folder for folder in parent.iterdir() if folder.is_dir() and is_run(folder))


def is_run(folder):
    return (folder / "run.json").exists() or any(folder.glob("*tfevents*"))


def newest_run(parent="runs"):
    """The run folder that was started or resumed last."""
    started = {}
    for folder in find_runs(parent):
        if (folder / "run.json").exists():
            started[folder] = (folder / "run.json").stat().st_mtime_ns
    require(started, f"there is no run in {parent}")
    return max(started, key=started.get)


def read_json(path):
    require(path.stat().st_size <= LARGEST_JSON, f"more than {LARGEST_JSON:,} bytes")
    return json.loads(path.read_text(encoding="utf-8"))


def read_run(folder):
    """run.json as a dictionary, which has the name of the algorithm's file and the flags in args.

    Raises whatever is wrong with it. The values may be untrusted, of any type.
    """
    run = read_json(Path(folder, "run.json"))
    run["args"] = dict(run["args"])
    run["file"] = run.get("file") or run["args"]["exp_name"] + ".py"
    return run


def last_step(scalars):
    """The last step that anything was logged at."""
    return int(max((rows[:, 0].max() for rows in scalars.values() if len(rows)), default=0))


def is_finished(run, scalars):
    """Whether a run logged at its last step, or less than one logging interval before it."""
    total = run["args"].get("total_timesteps", 0)
    logged = scalars.get("charts/SPS", np.zeros((0, 3)))[:, 0]
    interval = np.median(np.diff(logged)) if len(logged) > 1 else 0.05 * total
    return last_step(scalars) + max(interval, 1) > total


def count_episodes(scalars):
    """How many episodes each logged return is the mean of.

    Runs that were trained side by side log one mean for each call of the program, at its end."""
    returns = scalars["charts/episodic_return"]
    lengths, calls = scalars.get("charts/episodic_length"), scalars.get("charts/SPS")
    if lengths is None or calls is None or len(lengths) != len(returns):
        return np.ones(len(returns))
    steps, ends = returns[:, 0], np.unique(calls[:, 0])
    if len(np.unique(steps)) < len(steps) or not np.isin(steps, ends).all():
        return np.ones(len(returns))  # one by one, at the step at which each ended
    num_steps = np.diff(ends, prepend=0)[np.searchsorted(ends, steps)]
    return np.maximum(num_steps / np.maximum(lengths[:, 1], 1), 1)


def episodes_of(rows):
    """How many episodes each row is the mean of: its fourth number, or one."""
    return rows[:, 3] if rows.shape[1] == 4 else np.ones(len(rows))


def mean_of_last(values, counts, window):
    """The mean of the last window episodes, where each value is that of so many."""
    newer = counts[::-1].cumsum()[::-1] - counts  # how many ended after each
    last = newer < window
    return np.average(values[last], weights=counts[last])


def read_evaluation(folder, env_id, global_step, episodes):
    """eval.json, which enjoy writes; None if it is not of this environment, step and number."""
    try:
        evaluation = read_json(Path(folder, "eval.json"))
        of = (evaluation["env_id"], evaluation["global_step"], len(evaluation["returns"]))
        return evaluation if of == (env_id, global_step, episodes) else None
    except Exception:  # missing, damaged, or of another program
        return None


def require_printable(text, what):
    """Text without control characters: no line ends, cursor movement or bidirectional marks."""
    require(isinstance(text, str) and text.isprintable(), f"{what} is not plain text")
    return text


def to_words(name, value):
    """A flag on a command line: bools as --x or --no-x, lists as several words, None left out."""
    require(re.fullmatch(r"[a-z][a-z0-9_]*", name), f"{name[:40]!r} is not the name of a flag")
    flag = name.replace("_", "-")
    if value is None or name == "resume":  # the run is made again from its start
        return []
    if isinstance(value, bool):
        return [f"--{flag}" if value else f"--no-{flag}"]
    values = value if isinstance(value, list) else [value]
    for part in values:
        known = isinstance(part, str | int | float) and not isinstance(part, bool)
        require(known, f"{name} has an unknown type")
    values = [require_printable(str(part), name) for part in values]
    if len(values) == 1 and values[0].startswith("-"):  # or it would be read as a flag
        return [f"--{flag}={values[0]}"]
    return [f"--{flag}", *values]
