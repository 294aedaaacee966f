"""cleanrl/dqn.py. test_dqn_N guards detail N of docs/rl-algorithms/dqn.md.

tests/mutations shows that each test can fail. The files of the same family import the tests that
hold for them too.
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

from tests.harness import flat_grad, only_run, probe, same, scalars, train

SMALL = (
    "--num-envs 3 --learning-starts 60 --train-frequency 6 --batch-size 16 --buffer-size 150 "
    "--target-network-frequency 30 --total-timesteps 300 --gamma 0.9 --learning-rate 0.001"
).split()
FUZZ = settings(
    deadline=None, derandomize=True, database=None, phases=[Phase.generate], max_examples=60
)
CPU = torch.device("cpu")


class Witness(gym.vector.VectorWrapper):
    """Notes what really happens: {(obs, action, reward, next obs, terminated): truncated}."""

    def __init__(self, envs, happened, reward_as_learned):
        super().__init__(envs)
        self.happened, self.reward_as_learned = happened, reward_as_learned

    def reset(self, **kwargs):
        obs, infos = self.env.reset(**kwargs)
        self.obs = obs.copy()
        self.is_over = np.zeros(self.num_envs, bool)
        self.lives = infos.get("lives", 0)
        return obs, infos

    def step(self, actions):
        self.obs_before, self.actions = self.obs, actions
        obs, rewards, terminated, truncated, infos = self.env.step(actions)
        self.obs, lives = obs.copy(), infos.get("lives", np.zeros(self.num_envs))
        lost = (lives < self.lives) & (lives > 0) & ~terminated & ~truncated & ~self.is_over
        for e in np.flatnonzero(~self.is_over):  # the others only reset, or go on after a lost life
            before, after = self.obs_before[e].tobytes(), self.obs[e].tobytes()
            reward = float(self.reward_as_learned(rewards[e]))
            is_end = bool(terminated[e] or lost[e])
            step = before, int(actions[e]), reward, after, is_end
            self.happened[step] = bool(truncated[e])
        self.is_over, self.lives = terminated | truncated | lost, lives
        return obs, rewards, terminated, truncated, infos


def watch(file, monkeypatch, **flags):
    """Make the file's environments with these settings and a witness, whose notes it returns."""
    happened, make_vec = {}, gym.make_vec
    reward_as_learned = np.sign if "_atari" in file.stem else np.float32

    def make(*args, **kwargs):
        return Witness(make_vec(*args, **kwargs, **flags), happened, reward_as_learned)

    monkeypatch.setattr(gym, "make_vec", make)
    return happened


def batch(names):
    """What an update learns from: observations, actions, rewards, next observations, ends."""
    b = names["b"]
    if "stacks" in b:
        return b["stacks"][:, :4], b["actions"], b["rewards"], b["stacks"][:, 1:], b["terminated"]
    return b["obs"], b["actions"], b["rewards"], b["next_obs"], b["terminated"]


def transitions(names):
    """The same as a list of what a witness notes."""
    obs, actions, rewards, next_obs, terminated = (x.numpy() for x in batch(names))
    obs, next_obs = [x.tobytes() for x in obs], [x.tobytes() for x in next_obs]
    columns = obs, actions.tolist(), rewards.tolist(), next_obs, terminated.tolist()
    return list(zip(*columns, strict=True))


def q_values(names, obs):
    """The network's values of all actions; of distributions (C51, QR-DQN), the means."""
    is_distributional = "atoms" in names or "taus" in names
    with torch.no_grad():
        return names["q_network"].q_values(obs) if is_distributional else names["q_network"](obs)


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
    """What a training loop remembers of made-up episodes, and what truly happened at each step.

    Rewards number the steps. start() makes the first observation of an episode, follow(obs) the
    one after obs. Ends of both kinds come at random, and now and then all environments start anew,
    as when a run is resumed: nobody knows then what the step before led to.
    """
    rows, happened = [], {}

    def starts():
        return [start() for _ in range(num_envs)], [True] * num_envs, [False] * num_envs

    obs, is_first, is_last = starts()
    for t in range(count):
        if t > 0 and rng.random() < 0.04:
            obs, is_first, is_last = starts()
            for e in range(num_envs):
                happened.pop((t - 1) * num_envs + e, None)
        actions = [rng.randrange(5) for _ in range(num_envs)]
        numbers = [t * num_envs + e for e in range(num_envs)]
        dice = [rng.random() * (not over) for over in is_last]  # one that is over only resets
        terminated, truncated = [0 < die < 0.2 for die in dice], [die > 0.8 for die in dice]
        next_obs = []
        for x, over in zip(obs, is_last, strict=True):  # a new game, a new life, or the next step
            next_obs.append(rng.choice([start(), follow(x)]) if over else follow(x))
        row = dict(obs=obs, is_first=is_first, actions=actions, rewards=numbers)
        row["terminated"] = terminated
        rows.append({name: np.array(x) for name, x in row.items()})
        for e in np.flatnonzero(~np.array(is_last)):
            before, after = np.array(obs[e]).tobytes(), np.array(next_obs[e]).tobytes()
            happened[numbers[e]] = before, actions[e], after, terminated[e]
        is_over = [a or b for a, b in zip(terminated, truncated, strict=True)]
        obs, is_first, is_last = next_obs, is_last, is_over
    return rows, happened


def replay_of(names, size, num_envs, shape):
    space = gym.spaces.Box(-np.inf, np.inf, shape, np.float32)
    envs = SimpleNamespace(num_envs=num_envs, single_observation_space=space)
    return names["ReplayBuffer"](size, envs)


def fill(replay, steps):
    """Add steps to a replay buffer; one of images keeps the newest of each stack."""
    for step in steps:
        if "frames" in replay.columns:
            obs = step["obs"]
            step = {"frames": obs[:, -1], "is_shown": obs.any((2, 3))} | step
            del step["obs"]
        replay.add(**step)


SHAPES = {
    "num_envs": st.integers(1, 4),
    "rows": st.integers(4, 12),
    "more": st.integers(0, 3),
    "turns": st.floats(0.2, 4),
}


def test_dqn_1_a_ring_with_the_last_steps(file, tmp_path):
    """Against plain lists: what happened in the last steps, but for the newest, can be drawn."""
    names = runpy.run_path(str(file))

    @FUZZ
    @given(**SHAPES, seed=st.integers(0, 2**32))
    def check(num_envs, rows, more, turns, seed):
        rng = random.Random(seed)

        def new(obs=None):
            return np.float32([[rng.uniform(-1, 1)], [rng.uniform(-1, 1)]])

        steps, happened = made_up_steps(rng, num_envs, max(2, int(turns * rows)), new, new)
        size = num_envs * rows + more % num_envs  # what does not fill a row is left out
        replay = replay_of(names, size, num_envs, (2, 1))
        fill(replay, steps)
        kept = range(max(0, len(steps) - rows) * num_envs, (len(steps) - 1) * num_envs)
        expected = {number for number in kept if number in happened}
        if not expected:
            return
        torch.manual_seed(seed)
        many, *single = [replay.sample(n, CPU) for n in (40 * size, 1, 1, 1, 1, 1)]
        assert {len(x) for x in many.values()} == {40 * size}
        assert {len(x) for b in single for x in b.values()} == {1}
        assert set(many["rewards"].tolist()) == expected
        for b in (many, *single):
            b = {name: x.numpy() for name, x in b.items()}
            for i, number in enumerate(b["rewards"]):
                before, after = b["obs"][i].tobytes(), b["next_obs"][i].tobytes()
                step = before, b["actions"][i], after, b["terminated"][i]
                assert step == happened[int(number)]

    check()


def test_dqn_2_every_transition_is_as_likely(file, tmp_path):
    rng, num_envs, rows = random.Random(1), 3, 30
    steps, happened = made_up_steps(rng, num_envs, 80, lambda: [0.0], lambda obs: [0.0])
    replay = replay_of(runpy.run_path(str(file)), num_envs * rows, num_envs, (1,))
    fill(replay, steps)
    expected = [number for number in range(50 * num_envs, 79 * num_envs) if number in happened]
    torch.manual_seed(1)
    assert drawn_evenly([replay.sample(128, CPU)["rewards"] for _ in range(500)], expected)


@pytest.mark.parametrize("every", [3, 150, None])
def test_dqn_2_few_transitions(file, tmp_path, monkeypatch, every):
    """Some of 200 steps, one, or none: they are found with two draws, and none is an error."""
    calls, randint = [], torch.randint

    def count_calls(*args):
        calls.append(args)
        assert len(calls) < 5, "it draws without end"
        return randint(*args)

    monkeypatch.setattr(torch, "randint", count_calls)
    torch.manual_seed(1)
    shape = (4, 2, 2) if "_atari" in file.stem else (1,)
    replay = replay_of(runpy.run_path(str(file)), 300, 1, shape)
    transitions = list(range(every, 199, every)) if every else []
    for t in range(200):
        step = dict(is_first=t - 1 not in transitions, actions=0, rewards=t, terminated=False)
        step = {name: np.array([x]) for name, x in step.items()}
        fill(replay, [{"obs": np.zeros((1, *shape)), **step}])
    if not transitions:
        with pytest.raises(SystemExit, match="no transition to learn from"):
            replay.sample(32, CPU)
        return
    samples = []
    for _ in range(500):
        calls.clear()
        samples.append(replay.sample(128, CPU)["rewards"])
        assert len(calls) == 2
    if len(transitions) > 1:
        assert drawn_evenly(samples, transitions)
    assert set(torch.cat(samples).tolist()) == set(transitions)


def drawn_evenly(samples, numbers):
    """Whether these numbers alone were drawn, as often as chance would have it (chi-square)."""
    counts = np.bincount(torch.cat(samples).int(), minlength=numbers[-1] + 1)[numbers]
    degrees = len(numbers) - 1
    chi_square = ((counts - counts.mean()) ** 2 / counts.mean()).sum()
    is_likely = abs(chi_square - degrees) < 4 * (2 * degrees) ** 0.5
    return degrees > 40 and counts.sum() == sum(map(len, samples)) and is_likely


def test_dqn_2_only_what_happened_is_learned_from(file, tmp_path, monkeypatch):
    """Bit for bit, with ends of both kinds, a ring that went round, and a resume in the middle."""
    happened, learned = watch(file, monkeypatch), []
    flags = ("--checkpoint-interval", 60, "--checkpoint-buffer")
    env_id = probe(file, "RandomEnds")
    run = interrupted(file, tmp_path, "--env-id", env_id, *SMALL, *flags, step=180)
    before = set(happened)

    def look(names):
        learned.extend(transitions(names))

    train(file, tmp_path, "--resume", run, on_update=look)
    assert len(learned) == 20 * 16 and set(learned) <= happened.keys()
    assert len(set(learned) & before) > 20, "from before the resume"
    assert len(set(learned) - before) > 20, "from after it"
    assert any(terminated for *_, terminated in learned)
    assert any(happened[step] for step in learned), "truncated"


def test_dqn_2_reset_rows_are_not_learned_from(file, tmp_path):
    seen = set()

    def look(names):
        obs = batch(names)[0]
        seen.update(obs.flatten().tolist() if obs.ndim == 2 else obs[:, -1, 0, 0].tolist())

    train(file, tmp_path, "--env-id", probe(file, "MarkedLast"), *SMALL, on_update=look)
    expected = np.float32([0, 1 / 3, 2 / 3])
    if "_atari" in file.stem:
        expected = (127.5 * (1 + expected)).astype(int)
    assert seen == set(expected.tolist())


# exploration


@pytest.mark.parametrize("num_envs", [1, 3])
def test_dqn_3_the_chance_of_a_random_action_falls_linearly(file, tmp_path, num_envs):
    """From start_e to end_e over the first quarter of the steps of all environments together."""
    seen = {}
    flags = (
        "--env-id Probe/ConstantValue-v0 --train-frequency 1 --learning-starts 12 --start-e 0.9 "
        "--total-timesteps 240 --exploration-fraction 0.25 --end-e 0.2"
    ).split()

    def look(names):
        seen[names["global_step"]] = names["epsilon"]

    train(file, tmp_path, *flags, "--num-envs", num_envs, on_update=look)
    expected = {}
    for step in range(12, 241, num_envs):
        expected[step] = max(0.2, 0.9 - 0.7 * (step - num_envs) / 60)
    assert seen == pytest.approx(expected)
    logged = dict(scalars(only_run(tmp_path))["charts/epsilon"])
    reached = [step + -step % num_envs for step in (100, 200)]
    assert logged == pytest.approx({step: expected[step] for step in reached})


@pytest.mark.parametrize("num_envs", [1, 3])
def test_dqn_3_so_many_actions_are_random(file, tmp_path, num_envs):
    """A network that learns nothing has one favorite: half of the random actions are the other."""
    flags = (
        "--env-id Probe/ActionMatters-v0 --learning-starts 1000000 --total-timesteps 7200 "
        "--exploration-fraction 0.5 --end-e 0.1"
    ).split()
    train(file, tmp_path, *flags, "--num-envs", num_envs)
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

    env_id = probe(file, "ActionAndObsMatter")
    greedy = "--start-e 0 --end-e 0 --train-frequency 3 --target-network-frequency 200".split()
    flags = (*SMALL, *greedy, *few_atoms(file), "--total-timesteps", 180)
    train(file, tmp_path, "--env-id", env_id, *flags, on_update=look)
    assert 10 < sum(taken) < len(taken) - 10, "each action must be the best one at times"


# learning


def test_dqn_4_a_cut_is_bootstrapped_and_an_end_is_not(file, tmp_path, monkeypatch):
    """The gradient at the optimizer is that of the textbook loss, row by row, by autograd."""
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
        expected = torch.cat([g.flatten() for g in expected])
        torch.testing.assert_close(flat_grad(names["q_network"]), expected, atol=1e-5, rtol=1e-3)
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
    """One every train_frequency steps: several in a row where more environments step at once."""
    seen = []

    def look(names):
        seen.append(names["global_step"])

    flags = ("--num-envs", num_envs, "--train-frequency", train_frequency, "--total-timesteps", 63)
    flags = (*SMALL, *flags, "--learning-starts", learning_starts)
    train(file, tmp_path, "--env-id", probe(file, "ConstantValue"), *flags, on_update=look)
    expected = []
    for step in range(1, 63 - 63 % num_envs + 1):
        now = step + -step % num_envs  # when the environments have all made their steps
        if step % train_frequency == 0 and now >= learning_starts:
            expected.append(now)
    assert seen == expected and len(seen) >= 3


@pytest.mark.parametrize("keep", [True, False])
def test_dqn_5_learning_waits_for_a_buffer_that_was_not_kept(file, tmp_path, keep):
    seen = []

    def look(names):
        seen.append(names["global_step"])

    flags = ("--env-id", probe(file, "RandomEnds"), *SMALL, "--total-timesteps", 180)
    keeping = "--checkpoint-buffer" if keep else "--no-checkpoint-buffer"
    run = interrupted(file, tmp_path, *flags, "--checkpoint-interval", 90, keeping, step=120)
    train(file, tmp_path, "--resume", run, on_update=look)
    assert seen == list(range(96 if keep else 150, 181, 6))


def follow_target(file, folder, every, tau, *flags):
    """Whether the target network moves when and as far as it should, and is frozen in between."""
    before, moves, differs = [], 0, 0

    def look(names):
        nonlocal moves, differs
        step, num_envs = names["global_step"], names["args"].num_envs
        network, target = (
            [p.detach().clone() for p in names[name].parameters()]
            for name in ("q_network", "target_network")
        )
        first, expected = before if before else (step, network)
        for then in range(first, step, num_envs):  # after the updates of these steps
            if then // every > (then - num_envs) // every:
                pairs = zip(network, expected, strict=True)
                expected = [new * tau + old * (1 - tau) for new, old in pairs]
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
    loss_name = "loss" if "c51" in file.stem or "qrdqn" in file.stem else "td_loss"
    seen = {}

    def look(names):
        obs, actions, _, _, _ = batch(names)
        values = q_values(names, obs)[torch.arange(len(actions)), actions]
        seen[names["global_step"]] = values.mean().item(), names[loss_name].item()

    flags = ("--train-frequency", 1, "--num-envs", 1, "--total-timesteps", 110)
    train(file, tmp_path, "--env-id", probe(file, "RandomEnds"), *SMALL, *flags, on_update=look)
    logged = scalars(only_run(tmp_path))
    charts = {"charts/episodic_return", "charts/episodic_length", "charts/SPS", "charts/epsilon"}
    assert logged.keys() == charts | {f"losses/{loss_name}", "losses/q_values"}
    assert logged["losses/q_values"] == [(100, pytest.approx(seen[100][0], rel=1e-4))]
    assert logged[f"losses/{loss_name}"] == [(100, pytest.approx(seen[100][1], rel=1e-4))]


# known answers


def few_atoms(file):
    return ("--v-min", -3, "--v-max", 3, "--n-atoms", 31) if "c51" in file.stem else ()


def probe_flags(file):
    flags = (
        "--total-timesteps 1500 --learning-starts 60 --train-frequency 3 --learning-rate 0.005 "
        "--gamma 0.5 --batch-size 32 --target-network-frequency 30 --buffer-size 600"
    ).split()
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
    flags = ("--env-id", f"Probe/{probe}-v0", *probe_flags(file), "--num-envs", num_envs)
    names = train(file, tmp_path, *flags)
    learned = q_values(names, torch.tensor([[float(obs)] for obs in values]))
    expected = torch.tensor(list(values.values())).float()
    torch.testing.assert_close(learned, expected, atol=0.1, rtol=0)


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
    returns = [value for _, value in scalars(only_run(tmp_path))["charts/episodic_return"]]
    assert np.mean(returns[-20:]) >= 150


FAST_CARTPOLE = (
    "--total-timesteps 16000 --learning-starts 1000 --train-frequency 4 --batch-size 64 "
    "--learning-rate 0.001"
).split()


# the same seed, the same run


def test_same_seed_same_bits(file, tmp_path):
    for name, seed in {"a": 1, "b": 1, "c": 2}.items():
        train(file, tmp_path / name, *SMALL, "--total-timesteps", 120, "--seed", seed)
    a, b, c = (only_run(tmp_path / name) for name in "abc")
    assert same(weights(a), weights(b)) and not same(weights(a), weights(c))
    logged, again = scalars(a), scalars(b)
    logged["charts/SPS"] = again["charts/SPS"] = None  # the speed may differ
    assert logged == again
