"""cleanrl/dqn_jax.py. test_dqn_N guards detail N of docs/rl-algorithms/dqn.md.

tests/mutations shows that each test can fail. Compiling takes longer than everything else here: so
most tests take a run of few steps apart, and check several things of it. The files of the same
family import the tests that hold for them too, and the other JAX files what surrounds a run.
"""

import json
import os
import runpy
import shutil
import sys
from pathlib import Path
from unittest import mock

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from flax.serialization import msgpack_serialize

from cleanrl_utils import enjoy
from tests import harness
from tests.harness import about, compiled_quickly, only_run, read_checkpoint, same, scalars
from tests.test_dqn import FAST_CARTPOLE, SMALL, few_atoms, probe_flags

COLUMNS = ("obs", "actions", "rewards", "next_obs", "terminated")


def train(file, folder, *flags):
    """Run a file as tests.harness does, compiled quickly."""
    return compiled_quickly(lambda: harness.train(file, folder, *flags))


def begin(file, *flags, length=1):
    """The names of a file, a run at its start, and a function that trains for some iterations."""
    names = runpy.run_path(str(file))
    with mock.patch.object(sys, "argv", [str(file), *map(str, flags)]):
        args = names["tyro"].cli(names["Args"])
    envs = names["make_envs"](args, args.num_envs, None, gym.vector.AutoresetMode.DISABLED)
    init, train = names["make_program"](args, envs)
    run = init(jax.random.PRNGKey(args.seed), 0)
    program = jax.jit(lambda run: train(run, length))

    def further(run):
        return compiled_quickly(lambda: jax.device_get(program(run)))

    return names | {"args": args}, jax.device_get(run), further


def tensors(tree):
    """Arrays as PyTorch's tensors, which remember how they are used."""
    return jax.tree.map(lambda x: torch.tensor(np.asarray(x), requires_grad=True), tree)


def outputs(names, params, obs):
    """The network's outputs by PyTorch, which need not compile: Q-values or log-probabilities."""
    x, args, params = torch.tensor(np.asarray(obs)).flatten(1), names["args"], params["params"]
    for name in ("Dense_0", "Dense_1", "Dense_2"):
        x = x @ params[name]["kernel"] + params[name]["bias"]
        x = x.relu() if name != "Dense_2" else x
    return x.reshape(len(x), -1, args.n_atoms).log_softmax(-1) if hasattr(args, "n_atoms") else x


def q_values(names, params, obs):
    """The network's values of all actions; of the distributions that C51 learns, the means."""
    args, values = names["args"], outputs(names, tensors(params), obs).detach().numpy()
    if hasattr(args, "n_atoms"):
        return np.exp(values) @ np.linspace(args.v_min, args.v_max, args.n_atoms)
    return values


def leaves(tree):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def updates_of(agent):
    """How often Adam was called."""
    return int(optax.tree.get(agent["opt_state"], "count"))


class Recorder(gym.vector.VectorWrapper):
    """Writes down what happens: the columns of the replay buffer, truncations and statistics."""

    def __init__(self, envs, steps):
        super().__init__(envs)
        self.steps = steps

    def reset(self, **kwargs):
        self.obs, infos = self.env.reset(**kwargs)
        return self.obs.copy(), infos

    def step(self, actions):
        obs, (self.obs, rewards, terminated, truncated, infos) = self.obs, self.env.step(actions)
        nothing = {"r": np.zeros(self.num_envs), "l": np.zeros(self.num_envs)}
        episodes = infos.get("episode", nothing)
        step = obs, actions, rewards, self.obs, terminated, truncated, episodes["r"], episodes["l"]
        self.steps.append([x.copy() for x in step])
        return self.obs.copy(), rewards, terminated, truncated, infos


def record(monkeypatch):
    """Has a file make environments with a recorder, whose list it returns."""
    steps, make_vec = [], gym.make_vec

    def make(*args, **kwargs):
        return Recorder(make_vec(*args, **kwargs), steps)

    monkeypatch.setattr(gym, "make_vec", make)
    return steps


# acting and the ring


def test_dqn_1_the_ring_holds_what_happened_and_every_episode_is_logged(
    file, tmp_path, monkeypatch
):
    """In order, with both kinds of ends, more steps than it holds, and two calls of the program."""
    steps = record(monkeypatch)
    sizes = "--train-frequency 3 --total-timesteps 330 --buffer-size 152".split()  # 50 rows
    run = train(file, tmp_path, "--env-id", "Probe/RandomEnds-v0", *SMALL, *sizes)["run"]
    assert len(steps) == 110 and int(run["added"]) == int(run["global_step"]) == 330
    *seen, truncated, returns, lengths = map(np.array, zip(*steps, strict=True))
    newest = [max(t for t in range(110) if t % 50 == row) for row in range(50)]
    assert set(run["buffer"]) == set(COLUMNS)
    for name, expected in zip(COLUMNS, seen, strict=True):
        column = run["buffer"][name]
        np.testing.assert_array_equal(column, expected[newest].astype(column.dtype))
    terminated = seen[-1]
    is_over = terminated | truncated
    assert terminated.sum() > 10 and truncated.sum() > 10, "both ends"
    logged, numbers = scalars(only_run(tmp_path)), np.arange(1, 331).reshape(110, 3)[is_over]
    for name, values in {"return": returns[is_over], "length": lengths[is_over]}.items():
        steps_logged, values_logged = zip(*logged[f"charts/episodic_{name}"], strict=True)
        np.testing.assert_array_equal(steps_logged, numbers)
        np.testing.assert_allclose(values_logged, values, atol=1e-5)


def test_dqn_1_gymnax_steps_as_gymnasium_does(file, tmp_path):
    """Every row against Gymnasium's CartPole; a truncated episode's last observation is its own."""
    flags = "--num-envs 2 --train-frequency 2 --buffer-size 200 --start-e 1 --end-e 1".split()
    _, run, program = begin(file, *flags)
    cartpole = gym.make("CartPole-v1").unwrapped
    cartpole.reset()
    run["world"]["env_state"] = run["world"]["env_state"].replace(time=np.int32([0, 499]))
    starts, ends, cuts = [], 0, 0
    for t in range(60):
        before, (run, ((is_over, returns, lengths, _), _)) = run, program(run)
        row = {name: column[t] for name, column in run["buffer"].items()}
        world = run["world"]
        np.testing.assert_array_equal(row["obs"], before["world"]["obs"])
        for e in range(2):
            cartpole.state, cartpole.steps_beyond_terminated = row["obs"][e], None
            expected, _, is_end, _, _ = cartpole.step(int(row["actions"][e]))
            np.testing.assert_allclose(row["next_obs"][e], expected, atol=1e-5)
            assert (row["rewards"][e], row["terminated"][e]) == (1, is_end)
            is_cut = t == 0 and e == 1
            assert is_over[0, 0, e] == (is_end or is_cut)
            assert returns[0, 0, e] == lengths[0, 0, e] == before["world"]["episode_length"][e] + 1
            if is_over[0, 0, e]:
                assert np.abs(world["obs"][e]).max() <= 0.05 and world["episode_return"][e] == 0
                starts.append(world["obs"][e])
            else:
                np.testing.assert_array_equal(world["obs"][e], row["next_obs"][e])
            ends, cuts = ends + is_end, cuts + is_cut
    assert ends > 2 and cuts == 1
    assert len(np.unique(starts)) == 4 * len(starts), "every episode has a start of its own"


def test_dqn_3_the_chance_of_a_random_action_falls_linearly(file, tmp_path):
    """A network that learns nothing has its favorites: half of the random actions are others."""
    flags = (
        "--num-envs 20 --train-frequency 20 --learning-starts 1000000 --buffer-size 8000 "
        "--total-timesteps 8000 --exploration-fraction 0.75 --start-e 0.9 --end-e 0"
    ).split()
    names, run, program = begin(file, *flags, length=400)
    run, _ = program(run)
    obs, actions = run["buffer"]["obs"].reshape(-1, 4), run["buffer"]["actions"].reshape(-1)
    other = actions != q_values(names, run["agent"]["params"], obs).argmax(1)
    epsilon = 0.9 * (1 - np.arange(8000) // 20 * 20 / 6000).clip(min=0)
    for part in range(6):  # 1000 actions each
        piece = slice(1000 * part, 1000 * (part + 1))
        assert other[piece].mean() == pytest.approx(epsilon[piece].mean() / 2, abs=0.05)
    assert not other[6000:].any(), "in the end none is random"
    assert updates_of(run["agent"]) == 0 and run["added"] == 8000


# learning


def reference_loss(names, params, target_params, batch):
    """The textbook loss, row by row, and the mean value of the actions that were taken."""
    values = outputs(names, params, batch["obs"])
    next_values = outputs(names, target_params, batch["next_obs"]).tolist()
    errors, taken = [], []
    for row, action in enumerate(batch["actions"]):
        target = float(batch["rewards"][row])
        if not batch["terminated"][row]:
            target += 0.9 * max(next_values[row])
        errors.append((values[row, action] - target) ** 2)
        taken.append(values[row, action])
    return sum(errors) / len(errors), sum(taken) / len(taken)


def follow_updates(file, monkeypatch, reference_loss, eps, *flags):
    """How many updates in a row were checked to be those of a reference loss.

    They learn from all rows that were written, in order: what is drawn is far above their number,
    and only the remainder counts.
    """

    def bits(key, shape):
        assert shape == (1, 2, 16)
        return 32 * 1_000_001 + jnp.arange(32, dtype=jnp.uint32).reshape(shape)

    def rows_of(run, rows):
        columns = run["buffer"].items()
        return {name: column.reshape(40, *column.shape[2:])[rows] for name, column in columns}

    monkeypatch.setattr(jax.random, "bits", bits)
    sizes = (
        "--env-id Probe/RandomEnds-v0 --num-envs 4 --train-frequency 2 --learning-starts 32 "
        "--buffer-size 40 --target-network-frequency 1000"
    ).split()
    names, run, program = begin(file, *SMALL, *sizes, *flags)
    rng = np.random.default_rng(1)

    def shake(x):
        return np.float32(x + 0.1 * rng.standard_normal(x.shape))

    shaken = jax.tree.map(shake, run["agent"]["params"])
    run["agent"] |= {"target_params": shaken}
    run["global_step"] = np.int32(120)  # as after a resume without the buffer
    for _ in range(8):
        before, (run, (_, (losses, values))) = run, program(run)
    assert 2 < rows_of(run, slice(32))["terminated"].sum() < 30
    old, params = leaves(before["agent"]["params"]), tensors(before["agent"]["params"])
    adam = torch.optim.Adam(jax.tree.leaves(params), lr=0.001, eps=eps)
    for update in range(2):
        batch = rows_of(run, slice(16 * update, 16 * (update + 1)))
        loss, value = reference_loss(names, params, tensors(shaken), batch)
        assert losses[0, update] == pytest.approx(loss.item(), rel=1e-4)
        assert values[0, update] == pytest.approx(value.item(), rel=1e-4, abs=1e-5)
        adam.zero_grad()
        loss.backward()
        adam.step()
    agent = run["agent"]
    assert updates_of(agent) == 2 and same(leaves(agent["target_params"]), leaves(shaken))
    means = [adam.state[tensor]["exp_avg"] for tensor in jax.tree.leaves(params)]
    got_means = leaves(optax.tree.get(agent["opt_state"], "mu"))
    for got, wanted in zip(got_means, means, strict=True):
        np.testing.assert_allclose(got, wanted, atol=1e-6, rtol=1e-3)
    wanted_params = [tensor.detach().numpy() for tensor in jax.tree.leaves(params)]
    for got, was, wanted in zip(leaves(agent["params"]), old, wanted_params, strict=True):
        np.testing.assert_allclose(got - was, wanted - was, atol=5e-5)
    for _ in range(3):  # 44 steps now, of which the buffer holds 40, and draws from these
        before, (run, (_, (losses, _))) = run, program(run)
    batch = rows_of(run, (32 * 1_000_001 + np.arange(16)) % 40)
    loss, _ = reference_loss(names, tensors(before["agent"]["params"]), tensors(shaken), batch)
    assert losses[0, 0] == pytest.approx(loss.item(), rel=1e-4)
    return 1 + update


def test_dqn_4_a_cut_is_bootstrapped_and_an_end_is_not(file, tmp_path, monkeypatch):
    """Loss, gradient and Adam's step against those of the textbook loss, by autograd."""
    assert follow_updates(file, monkeypatch, reference_loss, 1e-8) == 2


@pytest.mark.parametrize(
    ("num_envs", "train_frequency", "learning_starts", "every", "tau"),
    [(1, 4, 30, 25, 1), (4, 2, 33, 30, 0.3), (2, 6, 7, 12, 1)],
)
def test_dqn_5_dqn_6_updates_and_the_target_network(
    file, tmp_path, num_envs, train_frequency, learning_starts, every, tau
):
    schedule = num_envs, train_frequency, learning_starts, every, tau
    updates, moves, other_best = follow_schedule(file, *schedule)
    assert updates >= 20 and moves >= 3 and other_best > 0, "there was something to see"


def follow_schedule(file, num_envs, train_frequency, learning_starts, every, tau):
    """How many updates, moves of the target network and actions that it would not take were seen.

    Both are counted in environment steps: an update every train_frequency, several in a row where
    the environments make more steps at once; the target network moves when it should, as far as it
    should, and is frozen in between. Without random actions, every action is the best one by the
    network as it was after the last update.
    """
    greedy = "--env-id Probe/RandomEnds-v0 --start-e 0 --end-e 0 --learning-rate 0.02".split()
    flags = (*SMALL, *greedy, "--num-envs", num_envs, "--train-frequency", train_frequency)
    flags = (*flags, "--learning-starts", learning_starts, "--target-network-frequency", every)
    flags = (*flags, *few_atoms(file)) if "c51" in file.stem else (*flags, "--tau", tau)
    names, run, program = begin(file, *flags)
    iteration, updates, moves, other_best = max(num_envs, train_frequency), 0, 0, 0
    for now in range(iteration, 30 * iteration + 1, iteration):
        before, (run, _) = run, program(run)
        new, old = run["agent"], before["agent"]
        assert int(run["global_step"]) == int(run["added"]) == now
        for step in range(now - iteration + 1, now + 1):
            made = step + -step % num_envs  # when the environments have all made their steps
            updates += step % train_frequency == 0 and made >= learning_starts
        assert updates_of(new) == updates
        stays = np.array_equal(leaves(new["params"])[0], leaves(old["params"])[0])
        assert stays == (now < learning_starts)
        is_due = now >= learning_starts and now // every > (now - iteration) // every
        moves += is_due
        networks = new["target_params"], new["params"], old["target_params"]
        for target, params, target_before in zip(*map(leaves, networks), strict=True):
            expected = tau * params + (1 - tau) * target_before if is_due else target_before
            tolerance = 1e-6 if is_due and tau != 1 else 0
            np.testing.assert_allclose(target, expected, rtol=0, atol=tolerance)
        obs, actions = run["buffer"]["obs"], run["buffer"]["actions"]
        for step in range(now - iteration, now, num_envs):
            row = step // num_envs % len(obs)
            best = q_values(names, old["params"], obs[row]).argmax(1)
            np.testing.assert_array_equal(actions[row], best)
            other_best += (q_values(names, old["target_params"], obs[row]).argmax(1) != best).sum()
    return updates, moves, other_best


@pytest.mark.parametrize(
    ("probe", "num_envs", "values"),
    [
        pytest.param("ConstantValue", 1, {0: [1, 1]}, marks=pytest.mark.slow),
        pytest.param("ValueFromObs", 3, {-1: [-1, -1], 1: [1, 1]}, marks=pytest.mark.slow),
        pytest.param("Discounting", 3, {0: [0.5, 0.5], 1: [1, 1]}, marks=pytest.mark.slow),
        ("ShiftedActions", 1, {0: [-1, 1]}),
        ("ActionAndObsMatter", 3, {-1: [1, -1], 1: [-1, 1]}),
        pytest.param("TruncatedEveryStep", 3, {0: [2, 2]}, marks=pytest.mark.slow),
        ("TwoEnds", 3, {-1: [1, 1], 1: [2, 2]}),
    ],
)
def test_values_of_probes(file, tmp_path, probe, num_envs, values):
    """Where actions matter, load_policy takes the right ones too, in fresh environments."""
    learned, returns = learn_probe(file, tmp_path, probe, num_envs, values)
    np.testing.assert_allclose(learned, list(values.values()), atol=0.1)
    assert "Action" not in probe or returns == [1] * 40


def learn_probe(file, tmp_path, probe, num_envs, observations):
    """The values that are learned at observations, and the returns of some games after that."""
    flags = (*probe_flags(file), "--num-envs", num_envs, "--learning-rate", 0.01)
    flags = (*flags, "--end-e", 0.5)  # there is a value to learn for either action
    names = train(file, tmp_path, "--env-id", f"Probe/{probe}-v0", *flags)
    obs = np.float32([[obs] for obs in observations])
    learned = q_values(names, names["run"]["agent"]["params"], obs)
    return learned, play(names, only_run(tmp_path))


def play(names, run, games=40):
    """The returns of games in new environments."""
    envs = names["make_envs"](names["args"], 8)
    policy = names["load_policy"](read_checkpoint(run), envs)
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
    """The one of gymnax, inside the program."""
    assert learn_cartpole(file, tmp_path, seed) >= 150


def learn_cartpole(file, tmp_path, seed, *flags):
    """The mean return of the last 20 episodes."""
    names = train(file, tmp_path, *FAST_CARTPOLE, "--seed", seed, *flags)
    assert names["is_compiled"](names["args"])
    returns = [value for _, value in scalars(only_run(tmp_path))["charts/episodic_return"]]
    return np.mean(returns[-20:])


# the same seed, the same run


def without_speed(run):
    return {name: values for name, values in scalars(run).items() if name != "charts/SPS"}


def test_another_seed_is_another_run(file, tmp_path):
    """Other weights, environments and random numbers; the same ones for the same seed."""
    for flags in ((), ("--env-id", "Probe/RandomEnds-v0")):
        flags = (*flags, *"--buffer-size 10 --train-frequency 1 --seed".split())
        a, b, c = (begin(file, *flags, seed, length=0)[1] for seed in (1, 1, 2))
        assert same(leaves(a), leaves(b))
        pairs = (a["key"], c["key"]), (a["world"]["obs"], c["world"]["obs"])
        for x, y in (*pairs, *zip(*map(kernels, (a, c)), strict=True)):
            assert (np.asarray(x) != np.asarray(y)).mean() > 0.99


def kernels(run):
    return [leaf for leaf in leaves(run["agent"]["params"]) if leaf.ndim == 2]


def stopped(file, folder, step, *flags):
    """The folder of a finished run, and a copy of it from when it had saved a certain step."""
    real = os.replace

    def replace(source, target):
        real(source, target)
        run = Path(target).parent
        if target.name == "checkpoint.msgpack" and read_checkpoint(run)["global_step"] == step:
            shutil.copytree(run, folder / "part")

    with mock.patch("os.replace", replace):
        train(file, folder / "whole", *flags)
    return only_run(folder / "whole"), folder / "part"


HALVES = (  # in two calls
    "--num-envs 2 --train-frequency 2 --learning-starts 30 --batch-size 16 --buffer-size 150 "
    "--target-network-frequency 50 --total-timesteps 400 --checkpoint-interval 200"
).split()


def test_resume_with_gymnax_is_the_uninterrupted_run(file, tmp_path):
    """Bit for bit, curves included, although episodes were under way."""
    flags = (*HALVES, "--seed", 2)  # with seed 1 both episodes end at that very step
    whole, part = stopped(file, tmp_path, 200, *flags)
    world = read_checkpoint(part).get("world")
    assert world and world["episode_length"].max() > 0
    train(file, tmp_path, "--resume", part)
    assert same(read_checkpoint(whole), read_checkpoint(part))
    assert updates_of(read_checkpoint(part)["agent"]) == (400 - 28) // 2
    assert without_speed(whole) == without_speed(part)


def edit(run, **args):
    told = about(run)
    told["args"] |= args
    (run / "run.json").write_text(json.dumps(told))


def write(run, checkpoint):
    (run / "checkpoint.msgpack").write_bytes(msgpack_serialize(checkpoint))


def test_resume_with_gymnasium_restarts_episodes_only(file, tmp_path):
    """Bit for bit where every step is an episode; without its buffer, learning waits for one."""
    whole, part = stopped(file, tmp_path, 200, "--env-id", "Probe/ConstantValue-v0", *HALVES)
    forgetful, checkpoint = shutil.copytree(part, tmp_path / "forgetful"), read_checkpoint(part)
    assert checkpoint.keys() == {"agent", "buffer", "added", "global_step", "key", "args"}
    train(file, tmp_path, "--resume", part)
    assert same(read_checkpoint(whole), read_checkpoint(part))
    assert updates_of(read_checkpoint(part)["agent"]) == (400 - 28) // 2

    edit(forgetful, checkpoint_buffer=False)
    kept = {"agent", "global_step", "key", "args"}
    write(forgetful, {name: checkpoint[name] for name in kept})
    run = train(file, tmp_path, "--resume", forgetful)["run"]
    assert (int(run["global_step"]), int(run["added"])) == (400, 200)
    assert updates_of(run["agent"]) == updates_of(checkpoint["agent"]) + (200 - 28) // 2
    assert read_checkpoint(forgetful).keys() == kept
    assert without_speed(whole) == without_speed(part)


def without(tree, name):
    return {key: value for key, value in tree.items() if key != name}


def test_resume_of_a_damaged_checkpoint_gets_one_line(file, tmp_path):
    """Also where arrays have other shapes or types: the program would read beyond their ends."""
    train(file, tmp_path, *HALVES, "--total-timesteps", 200)
    run = only_run(tmp_path)
    checkpoint, data = read_checkpoint(run), (run / "checkpoint.msgpack").read_bytes()
    agent, buffer, world = (checkpoint[name] for name in ("agent", "buffer", "world"))
    damages = [
        {"added": np.float32(2)},
        {"buffer": buffer | {"obs": buffer["obs"][1:]}},
        {"buffer": without(buffer, "terminated")},
        {"buffer": 1},
        {"agent": agent | {"params": jax.tree.map(np.transpose, agent["params"])}},
        {"world": without(world, "obs")},
    ]
    damaged = [msgpack_serialize(checkpoint | damage) for damage in damages]
    damaged += [msgpack_serialize(without(checkpoint, name)) for name in ("agent", "global_step")]
    random_bytes = np.random.default_rng(1).bytes(9999)
    damaged += [data[:-1], data[:5000], random_bytes, msgpack_serialize([1])]
    for number, content in enumerate(damaged):
        (run / "checkpoint.msgpack").write_bytes(content)
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(SystemExit) as refusal:
            train(file, tmp_path, "--resume", run)
        message = refusal.value.code
        assert message.startswith(f"cannot resume {run}: ") and "\n" not in message, number
        assert sorted(tmp_path.rglob("*")) == before, "a refused command must not write"


@pytest.mark.parametrize("what", ["reward", "observation"])
def test_what_is_not_finite_ends_the_run(file, tmp_path, monkeypatch, what):
    """One line after the call of the program in which it came, although that episode is over."""
    make_vec = gym.make_vec

    class Broken(gym.vector.VectorWrapper):
        steps = 0

        def step(self, actions):
            obs, rewards, *ends, infos = self.env.step(actions)
            self.steps += 1
            if what == "reward" and self.steps == 120:
                rewards = rewards + np.array([0, np.inf])
            if what == "observation" and self.steps >= 120:
                obs = obs + np.float32(np.nan)
            return obs, rewards, *ends, infos

    monkeypatch.setattr(gym, "make_vec", lambda *args, **kwargs: Broken(make_vec(*args, **kwargs)))
    bad = "inf" if what == "reward" else "nan"
    with pytest.raises(SystemExit, match=f"{what} of Probe/LateEnds-v0 at step 400: {bad}"):
        train(file, tmp_path, "--env-id", "Probe/LateEnds-v0", *HALVES, "--learning-starts", 1000)
    assert read_checkpoint(only_run(tmp_path))["global_step"] == 200


@pytest.mark.slow
def test_videos_are_gymnasiums(file, tmp_path):
    names = train(file, tmp_path, *HALVES, "--capture-video")
    run = only_run(tmp_path)
    assert not names["is_compiled"](names["args"])
    assert len(scalars(run)["charts/episodic_return"]) > 5
    videos = list((run / "videos").glob("step-0-episode-*.mp4"))
    assert len(videos) >= 2 and all(video.stat().st_size > 1000 for video in videos)


@pytest.mark.slow
def test_minatar_is_trained_and_played(file, tmp_path, monkeypatch):
    """What only gymnax has: images of 0 and 1, and games that enjoy can play."""
    flags = ("--env-id", "Breakout-MinAtar", *HALVES, "--total-timesteps", 200)
    names = train(file, tmp_path, *flags)
    run, obs = only_run(tmp_path), names["run"]["buffer"]["obs"]
    assert names["is_compiled"](names["args"])
    assert obs.shape == (75, 2, 10, 10, 4) and np.unique(obs).tolist() == [0, 1]
    assert updates_of(names["run"]["agent"]) == (200 - 28) // 2
    assert scalars(run)["charts/episodic_length"][0][1] > 3
    monkeypatch.setattr(sys, "argv", ["enjoy", str(run), "--episodes", "3"])
    enjoy.main()
    evaluation = json.loads((run / "eval.json").read_text())
    assert len(evaluation["returns"]) == 3 and min(evaluation["lengths"]) > 3
    assert evaluation["global_step"] == 200
