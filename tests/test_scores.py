"""The statistics of rlops, against rliable's values, published tables and simulated noise."""

import numpy as np
import pytest

from cleanrl_utils.rlops import scores

# three environments, five runs of one side, four of the other, and the values of rliable 1.2.0
# (with pandas below 3)
X = [
    np.array(runs)
    for runs in (
        [0.8, 0.44, 0.82, 0.55, 0.84],
        [0.92, 0.62, 1.34, 1.0, 0.43],
        [0.69, 0.4, 0.6, 0.94, 0.79],
    )
]
Y = [
    np.array(runs)
    for runs in ([1.45, 0.15, 0.98, 1.18], [0.43, 0.46, 0.47, 1.01], [0.87, 0.18, 1.24, -0.16])
]
RLIABLE = {
    "iqm": ((0.73667, 0.594, 0.852), (0.70333, 0.347, 1.020)),
    "mean": ((0.74533, 0.631, 0.862), (0.68833, 0.435, 0.935)),
    "median": ((0.69, 0.604, 0.830), (0.5925, 0.440, 0.975)),
    "optimality_gap": ((0.27733, 0.183, 0.377), (0.385, 0.179, 0.597)),
}


@pytest.mark.parametrize("name", RLIABLE)
def test_aggregates_are_those_of_rliable(name):
    for side, (value, low, high) in zip((X, Y), RLIABLE[name], strict=True):
        ours = scores.interval(getattr(scores, name), side, count=50_000)
        assert ours[0] == pytest.approx(value, abs=1e-5)
        assert ours[1:] == pytest.approx((low, high), abs=0.01)


def test_probability_of_improvement_is_that_of_rliable():
    assert scores.interval(scores.probability_of_improvement, Y, X) == pytest.approx(
        (0.50833, 0.25, 0.75), abs=0.01
    )
    assert scores.probability_of_improvement(X, X) == 0.5
    assert scores.probability_of_improvement([np.array([1.0, 2.0])], [np.array([0.0])]) == 1
    assert (
        scores.probability_of_improvement([np.array([1.0, 3.0])], [np.array([1.0, 2.0])]) == 0.625
    )  # a tie is half a win


def test_performance_profile_is_that_of_rliable():
    middle, low, high = scores.interval(lambda x: scores.profile(x, np.array([0, 0.5, 1, 1.5])), Y)
    assert middle.tolist() == pytest.approx([0.91667, 0.5, 0.33333, 0], abs=1e-5)
    assert low.tolist() == pytest.approx([0.75, 0.25, 0.08333, 0], abs=0.01)
    assert high.tolist() == pytest.approx([1, 0.75, 0.58333, 0], abs=0.01)


def test_environments_may_have_different_numbers_of_runs():
    uneven = [np.array([0.0, 0.0, 0.0, 0.0]), np.array([1.0])]
    assert scores.mean(uneven) == 0.5 and scores.optimality_gap(uneven) == 0.5
    assert scores.profile(uneven, np.array([0.5])).tolist() == [0.5]
    assert scores.iqm(uneven) == 0.5  # both environments weigh the same
    few_bad, few_good = [np.zeros(10), np.ones(3)], [np.zeros(3), np.ones(10)]
    assert scores.iqm(few_bad) == pytest.approx(0.5) == scores.iqm(few_good)
    drawn = scores.resample(few_bad, 50, np.random.default_rng(1))
    assert scores.iqm(drawn) == pytest.approx(np.full(50, 0.5))


def test_resampling_stays_within_the_environment():
    drawn = scores.resample(
        [np.array([1.0, 2.0]), np.array([10.0, 20.0, 30.0])], 1000, np.random.default_rng(1)
    )
    assert [set(runs.flat) for runs in drawn] == [{1, 2}, {10, 20, 30}]
    assert [runs.shape for runs in drawn] == [(1000, 2), (1000, 3)]


@pytest.mark.parametrize(
    "df, published", [(1, 12.706), (2, 4.303), (4, 2.776), (8, 2.306), (30, 2.042), (120, 1.980)]
)
def test_quantile_is_that_of_students_table(df, published):
    assert scores.t_quantile(0.975, df) == pytest.approx(published, abs=6e-4)
    assert scores.t_quantile(0.025, df) == pytest.approx(-published, abs=6e-4)


def test_difference_is_welchs():
    scipy_stats = pytest.importorskip("scipy.stats")
    for x, y in ((X[0], Y[0]), (Y[1], X[1]), (X[2], 100 * X[2] + 1)):
        welch = scipy_stats.ttest_ind(y, x, equal_var=False).confidence_interval()
        shift, interval = scores.difference([x], [y])
        assert shift == pytest.approx(y.mean() - x.mean()) and interval == pytest.approx(
            tuple(welch), rel=1e-5
        )


def test_a_single_run_has_no_interval_and_runs_without_spread_a_sharp_one():
    assert scores.difference([np.array([1.0])], [np.array([2.0, 3.0])]) == (1.5, None)
    assert scores.difference([np.array([1.0, 1.0])], [np.array([2.0, 2.0])]) == (1.0, (1.0, 1.0))


@pytest.mark.parametrize("runs, envs", [(3, 1), (5, 1), (5, 3)])
def test_the_same_is_told_apart_one_time_in_twenty(runs, envs):
    rng, told_apart = np.random.default_rng(1), 0
    for _ in range(1000):
        a, b = ([rng.normal(0, 1 + env, runs) for env in range(envs)] for _ in range(2))
        low, high = scores.difference(a, b)[1]
        told_apart += low > 0 or high < 0
    assert told_apart / 1000 < 0.07  # the bootstrap of the same means: 0.19 for 3 runs


def test_seeds_to_settle_do_settle_it():
    rng = np.random.default_rng(2)
    a, b = (
        [np.array([-1.0, 0.0, 1.0])],
        [np.array([0.0, 1.0, 2.0])],
    )  # standard deviations of 1, a difference of 1
    count = scores.seeds_to_settle(a, b)
    assert count == 17  # as in tables of power: 17 a side for an effect of 1 with 80%
    settled = 0
    for _ in range(1000):
        low, high = scores.difference([rng.normal(0, 1, count)], [rng.normal(1, 1, count)])[1]
        settled += low > 0 or high < 0
    assert 0.75 < settled / 1000 < 0.87
    assert scores.seeds_to_settle(a, [a[0] + 1e-3]) is None


@pytest.mark.parametrize("env_id", ["BreakoutNoFrameskip-v4", "ALE/Breakout-v5", "Breakout-v5"])
def test_games_are_found_in_all_their_names(env_id):
    assert scores.find_game(env_id) == "Breakout"


@pytest.mark.parametrize(
    "env_id", ["CartPole-v1", "Breakout-MinAtar", "ALE/Breakout-ram-v5", "my_envs:Breakout-v5", ""]
)
def test_other_environments_are_no_games(env_id):
    assert scores.find_game(env_id) is None


def test_human_scores():
    assert len(scores.ATARI) == 57 and all(low < high for low, high in scores.ATARI.values())
    low, high = scores.ATARI["Breakout"]
    assert (30.5 - low) / (high - low) == 1 and scores.ATARI["Pong"] == (-20.7, 14.6)


def test_running_mean():
    rows = np.array([[10, 4, 1], [20, 8, 2], [30, 0, 3]])
    curve, seen = scores.running_mean(rows, np.array([5, 10, 25, 30]), 0, window=2)
    assert curve[seen].tolist() == [4, 6, 4] and seen.tolist() == [False, True, True, True]
    assert scores.running_mean(rows, np.array([2.0]), 2)[0].tolist() == [6]
    means = np.array([[10, 4, 1, 2], [20, 8, 2, 6], [30, 0, 3, 2]])  # of 2, 6 and 2 episodes
    curve, _ = scores.running_mean(means, np.array([10, 20, 30]), 0, window=8)
    assert curve.tolist() == [4, 7, 6]  # a mean counts whole
    alone = np.array([[step, value, step, 1] for step, value in enumerate(range(9))])
    grid = np.arange(9)
    same = scores.running_mean(alone[:, :3], grid, 0, window=4)[0]
    assert scores.running_mean(alone, grid, 0, window=4)[0].tolist() == same.tolist()
