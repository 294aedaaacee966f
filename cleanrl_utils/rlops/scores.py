"""Statistics of final returns over a few seeds, after Agarwal et al. (2021, arXiv:2108.13264).

Interquartile mean, optimality gap, probability of improvement and performance profiles, with 95%
intervals from a stratified bootstrap. Scores are one array of runs per environment; environments
may have different numbers of runs. The usual library for this, rliable, cannot be imported beside
pandas 3 (it needs arch below 8); tests/test_scores.py compares with its values.
"""

import re
from bisect import bisect_left

import numpy as np

RESAMPLES = 10_000

# Game: scores of random play and of a human (Wang et al., 2016, arXiv:1511.06581, table 2)
ATARI = {
    "Alien": (227.8, 7127.7),
    "Amidar": (5.8, 1719.5),
    "Assault": (222.4, 742.0),
    "Asterix": (210.0, 8503.3),
    "Asteroids": (719.1, 47388.7),
    "Atlantis": (12850.0, 29028.1),
    "BankHeist": (14.2, 753.1),
    "BattleZone": (2360.0, 37187.5),
    "BeamRider": (363.9, 16926.5),
    "Berzerk": (123.7, 2630.4),
    "Bowling": (23.1, 160.7),
    "Boxing": (0.1, 12.1),
    "Breakout": (1.7, 30.5),
    "Centipede": (2090.9, 12017.0),
    "ChopperCommand": (811.0, 7387.8),
    "CrazyClimber": (10780.5, 35829.4),
    "Defender": (2874.5, 18688.9),
    "DemonAttack": (152.1, 1971.0),
    "DoubleDunk": (-18.6, -16.4),
    "Enduro": (0.0, 860.5),
    "FishingDerby": (-91.7, -38.7),
    "Freeway": (0.0, 29.6),
    "Frostbite": (65.2, 4334.7),
    "Gopher": (257.6, 2412.5),
    "Gravitar": (173.0, 3351.4),
    "Hero": (1027.0, 30826.4),
    "IceHockey": (-11.2, 0.9),
    "Jamesbond": (29.0, 302.8),
    "Kangaroo": (52.0, 3035.0),
    "Krull": (1598.0, 2665.5),
    "KungFuMaster": (258.5, 22736.3),
    "MontezumaRevenge": (0.0, 4753.3),
    "MsPacman": (307.3, 6951.6),
    "NameThisGame": (2292.3, 8049.0),
    "Phoenix": (761.4, 7242.6),
    "Pitfall": (-229.4, 6463.7),
    "Pong": (-20.7, 14.6),
    "PrivateEye": (24.9, 69571.3),
    "Qbert": (163.9, 13455.0),
    "Riverraid": (1338.5, 17118.0),
    "RoadRunner": (11.5, 7845.0),
    "Robotank": (2.2, 11.9),
    "Seaquest": (68.4, 42054.7),
    "Skiing": (-17098.1, -4336.9),
    "Solaris": (1236.3, 12326.7),
    "SpaceInvaders": (148.0, 1668.7),
    "StarGunner": (664.0, 10250.0),
    "Surround": (-10.0, 6.5),
    "Tennis": (-23.8, -8.3),
    "TimePilot": (3568.0, 5229.2),
    "Tutankham": (11.4, 167.6),
    "UpNDown": (533.4, 11693.2),
    "Venture": (0.0, 1187.5),
    "VideoPinball": (16256.9, 17667.9),
    "WizardOfWor": (563.5, 4756.5),
    "YarsRevenge": (3092.9, 54576.9),
    "Zaxxon": (32.5, 9173.3),
}


def find_game(env_id):
    """The Atari game of an id such as BreakoutNoFrameskip-v4 or ALE/Breakout-v5, or None."""
    game = re.fullmatch(r"(?:ALE/)?([A-Za-z]+?)(?:NoFrameskip|Deterministic)?-v\d+", env_id)
    return game[1] if game and game[1] in ATARI else None


def running_mean(rows, grid, column, window=100):
    """The mean of the last window episodes at each point of the grid, and where there is any."""
    ends = np.searchsorted(rows[:, column], grid, side="right")
    sums = np.concatenate([[0], rows[:, 1].cumsum()])
    starts = np.maximum(ends - window, 0)
    return (sums[ends] - sums[starts]) / np.maximum(ends - starts, 1), ends > 0


def iqm(scores):
    """Mean of the middle half of all runs of all environments, along the last axis."""
    scores = np.sort(np.concatenate(scores, axis=-1), axis=-1)
    cut = scores.shape[-1] // 4
    return scores[..., cut : scores.shape[-1] - cut].mean(-1)


def optimality_gap(scores):
    """How much is missing to 1 on average, where a score above 1 makes up for nothing."""
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
