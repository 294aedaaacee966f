"""What the runs of several sides say: final values, differences, scores and curves."""

from dataclasses import dataclass, field
from functools import partial

import numpy as np

from cleanrl_utils.rlops import scores
from cleanrl_utils.rlops.sides import REPEATED
from cleanrl_utils.runs import episodes_of

POINTS = 200  # of a curve
AXES = {"steps": 0, "time": 2}  # and their column in a run's rows
STATISTICS = ("iqm", "mean", "median", "optimality_gap")


@dataclass
class Comparison:
    sides: dict  # {label: its runs}; the first is the baseline
    metric: str  # in words
    is_return: bool
    lower_is_better: bool
    window: int  # episodes at the end of a run whose mean is compared
    smoothing: int  # episodes in a running mean of the curves
    until: dict  # {environment: the last step that all of its runs reached}
    counting: dict  # {environment: {side: runs that count}}
    finals: dict  # {environment: {side: their final values}}
    notes: list = field(default_factory=list)  # on what is compared
    rows: list = field(default_factory=list)  # the table: one dictionary per environment and side
    shared: list = field(default_factory=list)  # environments on which each side has runs
    scale: dict = field(default_factory=dict)  # {environment: values that score 0 and 1}
    thresholds: np.ndarray | None = None  # of the performance profile
    overall: dict = field(default_factory=dict)  # {side: scores over all shared environments}
    curves: dict = field(default_factory=dict)  # {axis: {environment: (grid, {side: curves})}}
    overall_curves: dict = field(default_factory=dict)  # {axis: (grid, {side: (iqm, low, high)})}

    @property
    def baseline(self):
        return next(iter(self.sides))

    @property
    def unit(self):
        """What a run has many of, one after another."""
        return "episodes" if self.is_return else "values"

    def is_on_human_scale(self, env_id):
        return self.is_return and scores.find_game(env_id) is not None

    def ends_at(self, run):
        """The step at which a run is compared; one that does not count is shown at its end."""
        return np.inf if run.state else self.until[run.env_id]


def compare(sides, metric="return", window=100, smoothing=100, lower_is_better=False):
    """Compare sides, {label: runs}, each environment at the last step that all its runs reached."""
    all_runs = [run for runs in sides.values() for run in runs]
    env_ids = list(dict.fromkeys(run.env_id for run in all_runs))
    cuts = {env_id: cut_to_common_step(all_runs, env_id, window) for env_id in env_ids}
    until = {env_id: step for env_id, (step, _) in cuts.items()}
    counting = {
        env_id: {
            label: [run for run in runs if run.env_id == env_id and not run.state]
            for label, runs in sides.items()
        }
        for env_id in env_ids
    }
    finals = {
        env_id: {
            label: np.array([run.final(window, until[env_id]) for run in runs])
            for label, runs in of_env.items()
        }
        for env_id, of_env in counting.items()
    }
    is_return = metric.endswith("return")
    c = Comparison(
        sides, metric, is_return, lower_is_better, window, smoothing, until, counting, finals
    )
    c.notes = [note for _, notes in cuts.values() for note in notes]
    for env_id in env_ids:
        for label in sides:
            c.rows.append(make_row(c, env_id, label))
    c.shared = [env_id for env_id in env_ids if all(map(len, finals[env_id].values()))]
    if c.shared:
        add_scores(c)
    for axis, column in AXES.items():
        c.curves[axis] = draw_curves(c, column)
        overall = draw_overall(c, column)
        if overall:
            c.overall_curves[axis] = overall
    return c


def cut_to_common_step(runs, env_id, window):
    """The last step that all runs of an environment reached, and a note if some went further."""
    counting = [run for run in runs if run.env_id == env_id and not run.state]
    if not counting:
        return 0, []
    shortest, longest = (end(counting, key=lambda run: run.step) for end in (min, max))
    until, notes, few = shortest.step, [], []
    for run in counting:
        num_values = round(episodes_of(run.rows[run.rows[:, 0] <= until]).sum())
        if num_values == 0:
            run.state = f"has no value up to step {until:,}, where the shortest run ends"
        elif num_values < window:
            few.append(f"{run.name} ({num_values})")
    if few:
        notes.append(f"{env_id}: runs with fewer than {window} values: {', '.join(few)}")
    if longest.step > 1.01 * until:
        ends = f"where {shortest.name} ends; others reach step {longest.step:,}"
        notes.append(f"{env_id}: all runs are compared at step {until:,}, {ends}")
        if any(run.is_thinned and run.step > 1.01 * until for run in counting):
            notes.append(f"{env_id}: before its end, published data has means of several episodes")
    return until, notes


def final_row(values):
    """Number, mean and sample standard deviation; None where there are too few."""
    mean = np.mean(values) if len(values) else None
    std = np.std(values, ddof=1) if len(values) > 1 else None
    return {"seeds": len(values), "mean": mean, "std": std}


def make_row(c, env_id, label):
    values = c.finals[env_id][label]
    row = {"environment": env_id, "side": label} | final_row(values)
    if label != c.baseline:
        base = c.finals[env_id][c.baseline]
        row |= judge([base], [values], c.baseline, -1 if c.lower_is_better else 1)
        row["verdict"] += left_out(c, [env_id], label)
    return row


def left_out(c, env_ids, label):
    """How many runs of two sides do not count, such as diverged ones, by which a mean may gain."""
    told = []
    for name in (c.baseline, label):
        runs = [run for run in c.sides[name] if run.env_id in env_ids]
        runs = [run for run in runs if not run.state.startswith(REPEATED)]
        if count := sum(bool(run.state) for run in runs):
            told.append(f"{count} of {len(runs)} runs of {name}")
    return f"; left out: {', '.join(told)}" if told else ""


def judge(base, other, baseline, direction=1):
    """The difference of two sides and whether it is more than noise, in numbers and words."""
    if not all(len(runs) for runs in (*base, *other)):
        return {"difference": None, "interval": None, "verdict": "nothing to compare"}
    difference, interval = scores.difference(base, other)
    if interval is None:
        verdict = "a single seed gives no interval: add 2 or more"
    elif interval[0] > 0 or interval[1] < 0:
        word = "better" if difference * direction > 0 else "worse"
        verdict = f"{word} than {baseline}, outside the noise"
    elif difference == 0:
        verdict = f"the same as {baseline}"
    else:
        needed = scores.seeds_to_settle(base, other)
        fewest = min(len(runs) for runs in (*base, *other))
        missing = max(needed - fewest, 1) if needed else 0
        more = (
            f"about {missing} more seed{'s' * (missing > 1)}" if needed else "more than 1,000 seeds"
        )
        verdict = f"within the noise; if it is real, {more} a side would settle it"
    return {"difference": difference, "interval": interval, "verdict": verdict}


def find_scale(c, env_id):
    """The values that score 0 and 1: random and human on Atari, else the worst and the best."""
    if c.is_on_human_scale(env_id):
        return scores.ATARI[scores.find_game(env_id)]
    means = []
    for run in (run for runs in c.counting[env_id].values() for run in runs):
        rows = run.rows[run.rows[:, 0] <= c.until[env_id]]
        first = np.searchsorted(episodes_of(rows).cumsum(), c.window) + 1
        ends = np.linspace(min(first, len(rows)), len(rows), POINTS).astype(int)
        means.append(scores.means_before(rows, ends, c.window))
    low, high = np.min(np.concatenate(means)), np.max(np.concatenate(means))
    high = high if high > low else low + 1
    return (high, low) if c.lower_is_better else (low, high)


def add_scores(c):
    """Scores over all environments that every side has runs of."""
    c.scale = {env_id: find_scale(c, env_id) for env_id in c.shared}
    scaled = {
        label: [rescale(c, env_id, c.finals[env_id][label]) for env_id in c.shared]
        for label in c.sides
    }
    every = np.concatenate([runs for side in scaled.values() for runs in side])
    c.thresholds = np.linspace(min(0, every.min()), max(1, every.max()), 101)
    base = scaled[c.baseline]
    for label, side in scaled.items():
        of_side = {name: scores.interval(getattr(scores, name), side) for name in STATISTICS}
        profile = partial(scores.profile, thresholds=c.thresholds)
        of_side["profile"] = scores.interval(profile, side, count=2000)
        if label != c.baseline:
            better = scores.probability_of_improvement
            of_side["improvement"] = scores.interval(better, side, base, count=2000)
            of_side |= judge(base, side, c.baseline)
            of_side["verdict"] += left_out(c, c.shared, label)
        c.overall[label] = of_side


def rescale(c, env_id, values):
    zero, one = c.scale[env_id]
    return (values - zero) / (one - zero)


def draw_curves(c, column):
    """{environment: (grid, {side: ([(run, its curve)], mean, std)})} over steps or seconds."""
    drawn = {}
    for env_id in c.counting:
        runs = {
            label: [run for run in of_side if run.env_id == env_id and len(run.rows)]
            for label, of_side in c.sides.items()
        }
        ends = [reach(run, column) for of_side in runs.values() for run in of_side]
        if ends:
            grid = np.linspace(0, max(ends), POINTS)
            sides = {label: average(c, of_side, grid, column) for label, of_side in runs.items()}
            drawn[env_id] = grid, sides
    return drawn


def reach(run, column):
    return max(run.step, run.rows[-1, 0]) if column == 0 else run.rows[-1, column]


def average(c, runs, grid, column):
    """The curve of each run, and mean and standard deviation of those that count."""
    curves = []
    for run in runs:
        with np.errstate(invalid="ignore"):  # of a run that diverged
            curve, seen = scores.running_mean(run.rows, grid, column, c.smoothing)
        curves.append(np.where(seen & (grid <= reach(run, column)), curve, np.nan))
    nothing = np.full(len(grid), np.nan)
    counting = [curve for run, curve in zip(runs, curves, strict=True) if not run.state]
    mean = np.mean(counting, axis=0) if counting else nothing
    std = np.std(counting, axis=0, ddof=1) if len(counting) > 1 else nothing
    return list(zip(runs, curves, strict=True)), mean, std


def draw_overall(c, column):
    """(grid, {side: (interquartile mean, low, high)}) of the scores, up to the shortest run."""
    if len(c.shared) < 2:
        return None
    runs = [run for env_id in c.shared for runs in c.counting[env_id].values() for run in runs]
    grid = np.linspace(0, min(reach(run, column) for run in runs), POINTS // 2)
    grid = grid[grid >= max(run.rows[0, column] for run in runs)]
    if not len(grid):  # a run was over before another had an episode
        return None
    drawn = {}
    for label in c.sides:
        scaled = []
        for env_id in c.shared:
            of_side = c.counting[env_id][label]
            curves = [
                scores.running_mean(run.rows, grid, column, c.smoothing)[0] for run in of_side
            ]
            scaled.append(rescale(c, env_id, np.array(curves).T))
        drawn[label] = scores.interval(scores.iqm, scaled, count=500)
    return grid, drawn
