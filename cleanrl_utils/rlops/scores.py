"""Statistics of final returns over a few seeds, after Agarwal et al. (2021, arXiv:2108.13264).

Interquartile mean, optimality gap, probability of improvement and performance profiles, with 95%
intervals from a stratified bootstrap. Scores are one array of runs per environment; environments
may have different numbers of runs. The usual library for this, rliable, cannot be imported beside
pandas 3 (it needs arch below 8); tests/test_scores.py compares with its values.
"""

import re
from bisect import bisect_left
from csv import DictReader
from pathlib import Path

import numpy as np

from cleanrl_utils.runs import episodes_of

RESAMPLES = 10_000

# {game: scores of random play and of a human} (Wang et al., 2016, arXiv:1511.06581, table 2)
with (Path(__file__).parent / "atari.csv").open(newline="") as file:
    ATARI = {row["game"]: (float(row["random"]), float(row["human"])) for row in DictReader(file)}


def find_game(env_id):
    """The Atari game of an id such as BreakoutNoFrameskip-v4 or ALE/Breakout-v5, or None."""
    game = re.fullmatch(r"(?:ALE/)?([A-Za-z]+?)(?:NoFrameskip|Deterministic)?-v\d+", env_id)
    return game[1] if game and game[1] in ATARI else None


def running_mean(rows, grid, column, window=100):
    """The mean of the last window episodes at each point of the grid, and where there is any."""
    ends = np.searchsorted(rows[:, column], grid, side="right")
    return means_before(rows, ends, window), ends > 0


def means_before(rows, ends, window):
    """The mean of the last window episodes in the first so many rows."""
    counts = episodes_of(rows)
    sums = np.concatenate([[0], (counts * rows[:, 1]).cumsum()])
    totals = np.concatenate([[0], counts.cumsum()])
    starts = np.searchsorted(totals[1:], totals[ends] - window, side="right")
    starts = np.minimum(starts, ends)
    return (sums[ends] - sums[starts]) / np.maximum(totals[ends] - totals[starts], 1)


def iqm(scores):
    """Mean of the middle half of all runs, along the last axis; environments weigh the same."""
    sizes = [runs.shape[-1] for runs in scores]
    scores = np.concatenate(scores, axis=-1)
    if len(set(sizes)) == 1:
        scores = np.sort(scores, axis=-1)
        cut = scores.shape[-1] // 4
        return scores[..., cut : scores.shape[-1] - cut].mean(-1)
    shares = np.concatenate([np.full(size, 1 / size / len(sizes)) for size in sizes])
    order = np.argsort(scores, axis=-1, kind="stable")
    above = shares[order].cumsum(-1)  # share of the runs up to each, itself included
    below = above - shares[order]
    middle = np.maximum(np.minimum(above, 0.75) - np.maximum(below, 0.25), 0)
    return (middle * np.take_along_axis(scores, order, -1)).sum(-1) / middle.sum(-1)


def optimality_gap(scores):
    """The mean shortfall from 1, where scores above 1 count as 1."""
    return 1 - np.mean([np.minimum(runs, 1).mean(-1) for runs in scores], axis=0)


def mean(scores):
    return np.mean([runs.mean(-1) for runs in scores], axis=0)


def median(scores):
    """Median over the environments of their means."""
    return np.median([runs.mean(-1) for runs in scores], axis=0)


def probability_of_improvement(scores, others):
    """How likely a run beats one of the others, averaged over environments; ties count half."""
    pairs = [(x[..., :, None], y[..., None, :]) for x, y in zip(scores, others, strict=True)]
    return np.mean([((x > y) + 0.5 * (x == y)).mean((-1, -2)) for x, y in pairs], axis=0)


def profile(scores, thresholds):
    """Share of the runs above each of the thresholds, which come first in the shape."""
    above = [runs > thresholds.reshape(-1, *[1] * runs.ndim) for runs in scores]
    return np.mean([runs.mean(-1) for runs in above], axis=0)


def resample(scores, count, rng):
    """The runs of each environment (the last axis), resampled with replacement count times."""
    sizes = [runs.shape[-1] for runs in scores]
    chosen = [rng.integers(size, size=(count, size)) for size in sizes]
    return [runs[..., of_env] for runs, of_env in zip(scores, chosen, strict=True)]


def interval(statistic, *sides, count=RESAMPLES, seed=1):
    """The statistic of one or two sides, and the ends of its 95% stratified-bootstrap interval."""
    rng = np.random.default_rng(seed)
    values = statistic(*(resample(side, count, rng) for side in sides))
    low, high = np.percentile(values, [2.5, 97.5], axis=-1)
    return statistic(*sides), low, high


def t_quantile(probability, df):
    from scipy.special import stdtrit  # late: reading runs does not need SciPy

    return float(stdtrit(df, probability))


def difference(scores, others):
    """The mean of others minus that of scores, averaged over environments, and its 95% interval.

    The interval is Welch's: with few runs, the bootstrap's is too narrow. It is None where an
    environment has a single run on a side.
    """
    shift = float(mean(others) - mean(scores))
    if min(len(runs) for runs in (*scores, *others)) < 2:
        return shift, None
    runs = [*scores, *others]
    errors = np.array([x.var(ddof=1) / len(x) for x in runs]) / len(scores) ** 2
    if errors.sum() == 0:
        return shift, (shift, shift)
    df = errors.sum() ** 2 / (errors**2 / [len(x) - 1 for x in runs]).sum()
    reach = t_quantile(0.975, df) * errors.sum() ** 0.5
    return shift, (float(shift - reach), float(shift + reach))


def seeds_to_settle(scores, others, most=1000):
    """Seeds per side with which this difference would be significant with a power of 80%.

    None if that takes more than most.
    """
    shift = abs(float(mean(others) - mean(scores)))
    spread = sum(runs.var(ddof=1) for runs in (*scores, *others)) / len(scores) ** 2

    def settles(count):
        quantiles = t_quantile(0.975, 2 * len(scores) * (count - 1)) + 0.8416
        return shift >= quantiles * (spread / count) ** 0.5

    return bisect_left(range(most + 1), True, lo=2, key=settles) if settles(most) else None
