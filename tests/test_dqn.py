"""cleanrl/dqn.py. test_dqn_N guards detail N of docs/rl-algorithms/dqn.md; tests/mutations shows that each test bites.

The files of the same family import the tests that hold for them too.
"""

import copy
import random
import runpy
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.harness import FILES, flat_grad, only_run, probe, same, scalars, train

SMALL = (
    "--num-envs",
    3,
    "--learning-starts",
    60,
    "--train-frequency",
    6,
    "--batch-size",
    16,
    "--buffer-size",
    150,
)
SMALL = (
    *SMALL,
    "--target-network-frequency",
    30,
    "--total-timesteps",
    300,
    "--gamma",
    0.9,
    "--learning-rate",
    0.001,
)
FUZZ = settings(
    deadline=None, derandomize=True, database=None, phases=[Phase.generate], max_examples=60
)


@pytest.fixture
def file():
    return FILES["dqn"]


class Witness(gym.vector.VectorWrapper):
    """Writes down what really happens in environments: {(obs, action, reward, next obs, terminated): truncated}."""

    def __init__(self, envs, happened, reward_as_learned):
        super().__init__(envs)
        self.happened, self.reward_as_learned = happened, reward_as_learned

    def reset(self, **kwargs):
        obs, infos = self.env.reset(**kwargs)
        self.obs, self.is_over, self.lives = (
            obs.copy(),
            np.zeros(self.num_envs, bool),
            infos.get("lives", 0),
        )
        return obs, infos

    def step(self, actions):
        self.obs_before, self.actions = self.obs, actions
        obs, rewards, terminated, truncated, infos = self.env.step(actions)
        self.obs, lives = obs.copy(), infos.get("lives", np.zeros(self.num_envs))
        lost = (lives < self.lives) & (lives > 0) & ~terminated & ~truncated & ~self.is_over
        for e in np.flatnonzero(~self.is_over):  # the others only reset, or go on after a lost life
            reward, is_end = (
                float(self.reward_as_learned(rewards[e])),
                bool(terminated[e] or lost[e]),
            )
            step = (
                self.obs_before[e].tobytes(),
                int(actions[e]),
                reward,
                self.obs[e].tobytes(),
                is_end,
            )
            self.happened[step] = bool(truncated[e])
        self.is_over, self.lives = terminated | truncated | lost, lives
        return obs, rewards, terminated, truncated, infos


def watch(file, monkeypatch, **flags):
    """Has a file make environments with these flags more and a witness, whose notes it returns."""
    happened, make_vec, reward_as_learned = (
        {},
        gym.make_vec,
        np.sign if "_atari" in file.stem else np.float32,
    )
    make = lambda *args, **kwargs: Witness(
        make_vec(*args, **kwargs, **flags), happened, reward_as_learned
    )  # noqa: E731
    monkeypatch.setattr(gym, "make_vec", make)
    return happened


def batch(names):
    """What an update learned from: observations, actions, rewards, next observations, and which of those are final."""
    if "b_stacks" in names:
        b_obs, b_next_obs = names["b_stacks"][:, :4], names["b_stacks"][:, 1:]
    else:
        b_obs, b_next_obs = names["b_obs"], names["b_next_obs"]
    return b_obs, names["b_actions"], names["b_rewards"], b_next_obs, names["b_terminated"]


def transitions(names):
    """The same as a list of what a witness writes down."""
    obs, actions, rewards, next_obs, terminated = (x.numpy() for x in batch(names))
    obs, next_obs = [x.tobytes() for x in obs], [x.tobytes() for x in next_obs]
    return list(
        zip(obs, actions.tolist(), rewards.tolist(), next_obs, terminated.tolist(), strict=True)
    )


def q_values(names, obs):
    """What the network thinks of each action; of the distributions that C51 learns, their means."""
    with torch.no_grad():
        return names["q_network"].q_values(obs) if "atoms" in names else names["q_network"](obs)


def weights(run):
    return torch.load(run / "checkpoint.pt", weights_only=True)["q_network"]


def interrupted(file, folder, *flags, step):
    """A run that was stopped at its first update after a step."""

    def stop(names):
        if names["global_step"] > step:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(file, folder, *flags, on_update=stop)
    return only_run(folder)


# the ring


def made_up_steps(rng, num_envs, count, start, follow):
    """What a training loop remembers of made-up episodes, whose rewards number the steps, and what truly happened at each.

    start() makes the first observation of an episode, follow(obs) the one after obs. Ends of both kinds come at random, and
    now and then all environments start anew, as when a run is resumed: nobody knows then what the step before led to.
    """
    rows, happened = [], {}
    obs, is_first, is_last = (
        [start() for _ in range(num_envs)],
        [True] * num_envs,
        [False] * num_envs,
    )
    for t in range(count):
        if t > 0 and rng.random() < 0.04:
            obs, is_first, is_last = (
                [start() for _ in range(num_envs)],
                [True] * num_envs,
                [False] * num_envs,
            )
            for e in range(num_envs):
                happened.pop((t - 1) * num_envs + e, None)
        actions, numbers = (
            [rng.randrange(5) for _ in range(num_envs)],
            [t * num_envs + e for e in range(num_envs)],
        )
        dice = [rng.random() * (not over) for over in is_last]  # one that is over only resets
        terminated, truncated = [0 < die < 0.2 for die in dice], [die > 0.8 for die in dice]
        after_end = lambda obs: rng.choice([start(), follow(obs)])  # noqa: E731  a new game, or a new life
        next_obs = [
            after_end(x) if over else follow(x) for x, over in zip(obs, is_last, strict=True)
        ]
        rows.append([np.array(x) for x in (obs, is_first, actions, numbers, terminated)])
        for e in np.flatnonzero(~np.array(is_last)):
            happened[numbers[e]] = (
                np.array(obs[e]).tobytes(),
                actions[e],
                np.array(next_obs[e]).tobytes(),
                terminated[e],
            )
        is_over = [a or b for a, b in zip(terminated, truncated, strict=True)]
        obs, is_first, is_last = next_obs, is_last, is_over
    return rows, happened


def replay_of(names, size, num_envs, shape):
    space = gym.spaces.Box(-np.inf, np.inf, shape, np.float32)
    return names["ReplayBuffer"](
        size, SimpleNamespace(num_envs=num_envs, single_observation_space=space)
    )


SHAPES = {
    "num_envs": st.integers(1, 4),
    "rows": st.integers(4, 12),
    "more": st.integers(0, 3),
    "turns": st.floats(0.2, 4),
}


def test_dqn_1_a_ring_with_the_last_steps(file, tmp_path):
    """Against plain lists: what can be drawn is what happened in the last steps, but for the newest, and is drawn exactly."""
    names = runpy.run_path(str(file))

    @FUZZ
    @given(**SHAPES, seed=st.integers(0, 2**32))
    def check(num_envs, rows, more, turns, seed):
        rng = random.Random(seed)
        new = lambda obs=None: np.float32([[rng.uniform(-1, 1)], [rng.uniform(-1, 1)]])  # noqa: E731
        steps, happened = made_up_steps(rng, num_envs, max(2, int(turns * rows)), new, new)
        size = num_envs * rows + more % num_envs  # what does not fill a row is left out
        replay = replay_of(names, size, num_envs, (2, 1))
        for step in steps:
            replay.add(*step)
        kept = range(max(0, len(steps) - rows) * num_envs, (len(steps) - 1) * num_envs)
        expected = {number for number in kept if number in happened}
        if not expected:
            return
        torch.manual_seed(seed)
        drawn = [replay.sample(40 * size, torch.device("cpu"))]
        drawn += [replay.sample(1, torch.device("cpu")) for _ in range(5)]
        assert [len(x) for x in drawn[0]] == [40 * size] * 5 and [len(x) for x in drawn[1]] == [
            1
        ] * 5
        assert set(drawn[0][2].tolist()) == expected
        for sample in drawn:
            for obs, action, number, next_obs, terminated in zip(
                *(x.numpy() for x in sample), strict=True
            ):
                assert (obs.tobytes(), action, next_obs.tobytes(), terminated) == happened[
                    int(number)
                ]

    check()


def test_dqn_2_every_transition_is_as_likely(file, tmp_path):
    rng, num_envs, rows = random.Random(1), 3, 30
    steps, happened = made_up_steps(rng, num_envs, 80, lambda: [0.0], lambda obs: [0.0])
    replay = replay_of(runpy.run_path(str(file)), num_envs * rows, num_envs, (1,))
    for step in steps:
        replay.add(*step)
    expected = [number for number in range(50 * num_envs, 79 * num_envs) if number in happened]
    torch.manual_seed(1)
    assert drawn_evenly([replay.sample(128, torch.device("cpu"))[2] for _ in range(500)], expected)


def drawn_evenly(samples, numbers):
    """Whether these numbers were drawn, and no others, as often as chance would have it, by the measure of chi-square."""
    counts, degrees = (
        np.bincount(torch.cat(samples).int(), minlength=numbers[-1] + 1)[numbers],
        len(numbers) - 1,
    )
    chi_square = ((counts - counts.mean()) ** 2 / counts.mean()).sum()
    return (
        degrees > 40
        and counts.sum() == sum(map(len, samples))
        and abs(chi_square - degrees) < 4 * (2 * degrees) ** 0.5
    )


def test_dqn_2_only_what_happened_is_learned_from(file, tmp_path, monkeypatch):
    """Bit for bit, with ends of both kinds, more steps than the buffer holds, and a resume in the middle."""
    happened, learned = watch(file, monkeypatch), []
    flags = (
        "--env-id",
        probe(file, "RandomEnds"),
        *SMALL,
        "--checkpoint-interval",
        60,
        "--checkpoint-buffer",
    )
    run = interrupted(file, tmp_path, *flags, step=180)
    before = set(happened)
    train(
        file, tmp_path, "--resume", run, on_update=lambda names: learned.extend(transitions(names))
    )
    assert len(learned) == 20 * 16 and set(learned) <= happened.keys()
    assert len(set(learned) & before) > 20 and len(set(learned) - before) > 20, (
        "from before and from after the resume"
    )
    assert any(terminated for *_, terminated in learned) and any(
        happened[step] for step in learned
    ), "both ends"


def test_dqn_2_reset_rows_are_not_learned_from(file, tmp_path):
    seen = set()

    def look(names):
        obs = batch(names)[0]
        seen.update(obs.flatten().tolist() if obs.ndim == 2 else obs[:, -1, 0, 0].tolist())

    train(file, tmp_path, "--env-id", probe(file, "MarkedLast"), *SMALL, on_update=look)
    shown = (
        (lambda x: int(127.5 * (1 + x)))
        if "_atari" in file.stem
        else (lambda x: float(np.float32(x)))
    )
    assert seen == {shown(t / 3) for t in range(3)}


# exploration


@pytest.mark.parametrize("num_envs", [1, 3])
def test_dqn_3_the_chance_of_a_random_action_falls_linearly(file, tmp_path, num_envs):
    """From start_e to end_e over the first quarter of the steps, all environments' together."""
    seen = {}
    flags = (
        "--env-id",
        "Probe/ConstantValue-v0",
        "--num-envs",
        num_envs,
        "--train-frequency",
        1,
        "--learning-starts",
        12,
    )
    flags = (
        *flags,
        "--total-timesteps",
        240,
        "--exploration-fraction",
        0.25,
        "--start-e",
        0.9,
        "--end-e",
        0.2,
    )
    train(
        file,
        tmp_path,
        *flags,
        on_update=lambda names: seen.update({names["global_step"]: names["epsilon"]}),
    )
    expected = {
        step: max(0.2, 0.9 - 0.7 * (step - num_envs) / 60) for step in range(12, 241, num_envs)
    }
    assert seen == pytest.approx(expected)
    logged = dict(scalars(only_run(tmp_path))["charts/epsilon"])
    reached = [step + -step % num_envs for step in (100, 200)]
    assert logged == pytest.approx({step: expected[step] for step in reached})


@pytest.mark.parametrize("num_envs", [1, 3])
def test_dqn_3_so_many_actions_are_random(file, tmp_path, num_envs):
    """The network, which learns nothing, always has the same favorite: half of the random actions are the other one."""
    flags = (
        "--env-id",
        "Probe/ActionMatters-v0",
        "--num-envs",
        num_envs,
        "--learning-starts",
        10**6,
    )
    flags = (*flags, "--total-timesteps", 7200, "--exploration-fraction", 0.5, "--end-e", 0.1)
    train(file, tmp_path, *flags)
    returns = np.array(scalars(only_run(tmp_path))["charts/episodic_return"])
    other = returns[:, 1] != np.sign(np.median(returns[-500:, 1]))
    assert len(other) == 3600
    expected = np.maximum(0.1, 1 - 0.9 * returns[:, 0] / 3600) / 2
    for part in range(6):  # 600 actions each
        piece = slice(600 * part, 600 * (part + 1))
        assert other[piece].mean() == pytest.approx(expected[piece].mean(), abs=0.07)


def test_dqn_3_other_actions_are_the_networks_best(file, tmp_path, monkeypatch):
    watch(file, monkeypatch)
    taken = []

    def look(names):
        witness = names["envs"]
        while not isinstance(witness, Witness):
            witness = witness.env
        best = q_values(names, torch.from_numpy(witness.obs_before).float()).argmax(1).numpy()
        np.testing.assert_array_equal(witness.actions, best)
        taken.extend(best)

    greedy = (
        "--start-e",
        0,
        "--end-e",
        0,
        "--train-frequency",
        3,
        "--target-network-frequency",
        200,
        *few_atoms(file),
    )
    greedy = (*greedy, "--total-timesteps", 180)
    train(
        file,
        tmp_path,
        "--env-id",
        probe(file, "ActionAndObsMatter"),
        *SMALL,
        *greedy,
        on_update=look,
    )
    assert 10 < sum(taken) < len(taken) - 10, "each action must be the best one at times"


# learning


def test_dqn_4_a_cut_is_bootstrapped_and_an_end_is_not(file, tmp_path, monkeypatch):
    """The gradient that reaches the optimizer is that of the textbook loss, row by row, left to autograd."""
    happened, ends = watch(file, monkeypatch), []

    def look(names):
        network, target_network = copy.deepcopy(names["q_network"]), names["target_network"]
        obs, actions, rewards, next_obs, _ = batch(names)
        errors = []
        for row, step in enumerate(transitions(names)):
            target, terminated, truncated = float(rewards[row]), step[-1], happened[step]
            if not terminated:
                target += 0.9 * max(target_network(next_obs[row, None])[0].tolist())
            errors.append((network(obs[row, None])[0, int(actions[row])] - target) ** 2)
            ends.append((terminated, truncated))
        loss = sum(errors) / len(errors)
        expected = torch.autograd.grad(loss, list(network.parameters()))
        torch.testing.assert_close(
            flat_grad(names["q_network"]),
            torch.cat([g.flatten() for g in expected]),
            atol=1e-5,
            rtol=1e-3,
        )
        assert names["td_loss"].item() == pytest.approx(loss.item(), rel=1e-4)

    flags = (*SMALL, "--total-timesteps", 180, "--train-frequency", 20)
    train(file, tmp_path, "--env-id", probe(file, "RandomEnds"), *flags, on_update=look)
    assert len(ends) == 7 * 16 and {(True, False), (False, True), (False, False)} <= set(ends)


@pytest.mark.parametrize(
    ("num_envs", "train_frequency", "learning_starts"),
    [(1, 4, 4), (1, 1, 40), (3, 4, 20), (4, 10, 33), (8, 3, 32)],
)
def test_dqn_5_updates_are_counted_in_environment_steps(
    file, tmp_path, num_envs, train_frequency, learning_starts
):
    """One every train_frequency steps; where the environments together make more steps at once, several in a row."""
    seen = []
    flags = (
        *SMALL,
        "--env-id",
        probe(file, "ConstantValue"),
        "--num-envs",
        num_envs,
        "--total-timesteps",
        63,
    )
    flags = (*flags, "--train-frequency", train_frequency, "--learning-starts", learning_starts)
    train(file, tmp_path, *flags, on_update=lambda names: seen.append(names["global_step"]))
    expected = []
    for step in range(1, 63 - 63 % num_envs + 1):
        now = step + -step % num_envs  # when the environments have all made their steps
        if step % train_frequency == 0 and now >= learning_starts:
            expected.append(now)
    assert seen == expected and len(seen) >= 3


@pytest.mark.parametrize("keep", [True, False])
def test_dqn_5_learning_waits_for_a_buffer_that_was_not_kept(file, tmp_path, keep):
    seen = []
    flags = (
        "--env-id",
        probe(file, "RandomEnds"),
        *SMALL,
        "--total-timesteps",
        180,
        "--checkpoint-interval",
        90,
    )
    run = interrupted(
        file,
        tmp_path,
        *flags,
        "--checkpoint-buffer" if keep else "--no-checkpoint-buffer",
        step=120,
    )
    train(
        file, tmp_path, "--resume", run, on_update=lambda names: seen.append(names["global_step"])
    )
    assert seen == list(range(96 if keep else 150, 181, 6))


def follow_target(file, folder, every, tau, *flags):
    """Whether the target network moves when it should, as far as it should, and is frozen in between."""
    before, moves, differs = [], 0, 0

    def look(names):
        nonlocal moves, differs
        step, num_envs = names["global_step"], names["args"].num_envs
        network, target = (
            [p.detach().clone() for p in names[n].parameters()]
            for n in ("q_network", "target_network")
        )
        expected = before[1] if before else network
        for then in range(
            before[0] if before else step, step, num_envs
        ):  # after the updates of these steps
            if then // every > (then - num_envs) // every:
                expected = [
                    new * tau + old * (1 - tau) for new, old in zip(network, expected, strict=True)
                ]
                moves += 1
        for got, wanted in zip(target, expected, strict=True):
            torch.testing.assert_close(got, wanted, rtol=0, atol=0 if tau == 1 else 1e-6)
        differs += not torch.equal(network[0], target[0])
        before[:] = step, target

    train(file, folder, "--env-id", probe(file, "RandomEnds"), *SMALL, *flags, on_update=look)
    return moves, differs


@pytest.mark.parametrize(
    ("num_envs", "train_frequency", "every"), [(1, 3, 25), (3, 10, 20), (4, 2, 30)]
)
def test_dqn_6_the_target_network_is_a_frozen_copy(
    file, tmp_path, num_envs, train_frequency, every
):
    flags = ("--num-envs", num_envs, "--train-frequency", train_frequency, "--total-timesteps", 150)
    flags = (*flags, "--target-network-frequency", every)
    moves, differs = follow_target(file, tmp_path, every, 1, *flags)
    assert 2 <= moves <= 5 and differs > 3


def test_dqn_6_tau_moves_the_target_network_part_of_the_way(file, tmp_path):
    moves, differs = follow_target(file, tmp_path, 30, 0.3, "--tau", 0.3, "--total-timesteps", 156)
    assert moves == 4 and differs > 14


def test_metrics(file, tmp_path):
    seen = {}

    def look(names):
        obs, actions, _, _, _ = batch(names)
        values = q_values(names, obs)[torch.arange(len(actions)), actions]
        seen[names["global_step"]] = (
            values.mean().item(),
            names["loss" if "atoms" in names else "td_loss"].item(),
        )

    flags = ("--env-id", probe(file, "RandomEnds"), *SMALL, "--train-frequency", 1, "--num-envs", 1)
    train(file, tmp_path, *flags, "--total-timesteps", 110, on_update=look)
    logged = scalars(only_run(tmp_path))
    loss = "losses/loss" if "c51" in file.stem else "losses/td_loss"
    assert logged.keys() == {
        *(f"charts/{name}" for name in ("episodic_return", "episodic_length", "SPS", "epsilon")),
        *(loss, "losses/q_values"),
    }
    assert logged["losses/q_values"] == [(100, pytest.approx(seen[100][0], rel=1e-4))]
    assert logged[loss] == [(100, pytest.approx(seen[100][1], rel=1e-4))]


# known answers


def few_atoms(file):
    return ("--v-min", -3, "--v-max", 3, "--n-atoms", 31) if "c51" in file.stem else ()


def probe_flags(file):
    flags = (
        "--total-timesteps",
        1500,
        "--learning-starts",
        60,
        "--train-frequency",
        3,
        "--learning-rate",
        0.005,
    )
    flags = (
        *flags,
        "--gamma",
        0.5,
        "--batch-size",
        32,
        "--target-network-frequency",
        30,
        "--buffer-size",
        600,
    )
    return (*flags, *few_atoms(file))


@pytest.mark.parametrize(
    ("probe", "num_envs", "values"),
    [
        ("ConstantValue", 1, {0: [1, 1]}),
        ("ValueFromObs", 3, {-1: [-1, -1], 1: [1, 1]}),
        ("Discounting", 3, {0: [0.5, 0.5], 1: [1, 1]}),
        ("ActionMatters", 1, {0: [-1, 1]}),
        ("ActionAndObsMatter", 3, {-1: [1, -1], 1: [-1, 1]}),
        ("TruncatedEveryStep", 3, {0: [2, 2]}),
        ("TwoEnds", 1, {-1: [1, 1], 1: [2, 2]}),
        ("TwoEnds", 3, {-1: [1, 1], 1: [2, 2]}),
        ("MarkedLast", 1, {0: [1.75, 1.75], 1 / 3: [1.5, 1.5], 2 / 3: [1, 1]}),
    ],
)
def test_values_of_probes(file, tmp_path, probe, num_envs, values):
    names = train(
        file, tmp_path, "--env-id", f"Probe/{probe}-v0", *probe_flags(file), "--num-envs", num_envs
    )
    learned = q_values(names, torch.tensor([[float(obs)] for obs in values]))
    torch.testing.assert_close(
        learned, torch.tensor(list(values.values())).float(), atol=0.1, rtol=0
    )


@pytest.mark.parametrize("probe", ["ActionAndObsMatter", "ShiftedActions", "ImageObs", "ScalarObs"])
def test_actions_of_probes(file, tmp_path, probe):
    """Acting through load_policy in fresh environments, as every evaluation does."""
    flags = (*probe_flags(file), "--total-timesteps", 900, "--num-envs", 3)
    names = train(file, tmp_path, "--env-id", f"Probe/{probe}-v0", *flags)
    assert play(names, only_run(tmp_path)) == [1] * 80


def play(names, run, games=80):
    """The returns of games in new environments."""
    envs = names["make_envs"](names["args"], 8)
    policy = names["load_policy"](torch.load(run / "checkpoint.pt", weights_only=True), envs)
    returns, (obs, _), is_last = [], envs.reset(seed=5), np.zeros(8, bool)
    while len(returns) < games:
        obs, _, terminated, truncated, infos = envs.step(policy(obs, is_last))
        is_last = terminated | truncated
        returns += list(infos["episode"]["r"][infos["_episode"]]) if "episode" in infos else []
    return returns[:games]


@pytest.mark.parametrize(
    "seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3))]
)
def test_learns_cartpole(file, tmp_path, seed):
    train(file, tmp_path, *FAST_CARTPOLE, "--seed", seed)
    assert (
        np.mean([value for _, value in scalars(only_run(tmp_path))["charts/episodic_return"]][-20:])
        >= 150
    )


FAST_CARTPOLE = (
    "--total-timesteps",
    16_000,
    "--learning-starts",
    1000,
    "--train-frequency",
    4,
    "--batch-size",
    64,
)
FAST_CARTPOLE = (*FAST_CARTPOLE, "--learning-rate", 0.001)


# the same seed, the same run


def test_same_seed_same_bits(file, tmp_path):
    for name, seed in {"a": 1, "b": 1, "c": 2}.items():
        train(file, tmp_path / name, *SMALL, "--total-timesteps", 120, "--seed", seed)
    a, b, c = (only_run(tmp_path / name) for name in "abc")
    assert same(weights(a), weights(b)) and not same(weights(a), weights(c))
    a, b = (
        {name: values for name, values in scalars(run).items() if name != "charts/SPS"}
        for run in (a, b)
    )
    assert a == b
