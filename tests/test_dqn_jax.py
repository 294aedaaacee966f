"""cleanrl/dqn_jax.py. test_dqn_N guards detail N of docs/rl-algorithms/dqn.md; tests/mutations shows that each test bites.

Compiling takes longer than everything else here: so most tests take a run of few steps apart, and check several things of it.
c51_jax.py imports the tests that hold for it too, and so do the Atari files those of what surrounds the algorithm.
"""

import json
import os
import runpy
import shutil
import sys
from pathlib import Path
from unittest import mock

import gymnasium as gym
import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from flax.serialization import msgpack_serialize

from cleanrl_utils import enjoy
from tests import harness
from tests.harness import FILES, about, only_run, read_checkpoint, same, scalars
from tests.test_dqn import FAST_CARTPOLE, SMALL, few_atoms, probe_flags


@pytest.fixture
def file():
    return FILES["dqn_jax"]


def compiled_quickly(call):
    """What a call returns that compiles less thoroughly, in half the time, to programs that are a little slower."""
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        return call()
    finally:
        jax.config.update("jax_disable_most_optimizations", False)


def train(file, folder, *flags):
    """Run a file as tests.harness does, compiled quickly."""
    return compiled_quickly(lambda: harness.train(file, folder, *flags))


def begin(file, *flags, length=1):
    """The names of a file, a run that has not begun, and a function that takes one some iterations further."""
    names = runpy.run_path(str(file))
    with mock.patch.object(sys, "argv", [str(file), *map(str, flags)]):
        args = names["tyro"].cli(names["Args"])
    args.gymnax = args.env_id in gymnax.registered_envs
    envs = names["make_envs"](args, args.num_envs, None, gym.vector.AutoresetMode.DISABLED)
    init, train = names["make_program"](args, envs)
    run = init(jax.random.PRNGKey(args.seed), 0)
    program = jax.jit(lambda run: train(run, length))
    return (
        names | {"args": args},
        jax.device_get(run),
        lambda run: compiled_quickly(lambda: jax.device_get(program(run))),
    )


def tensors(tree):
    """Arrays as PyTorch's tensors, which remember how they are used."""
    return jax.tree.map(lambda x: torch.tensor(np.asarray(x), requires_grad=True), tree)


def outputs(names, params, obs):
    """What the network returns, by PyTorch, which need not compile: values, or the log-probabilities of atoms."""
    x, args, params = torch.tensor(np.asarray(obs)).flatten(1), names["args"], params["params"]
    for name in ("Dense_0", "Dense_1", "Dense_2"):
        x = x @ params[name]["kernel"] + params[name]["bias"]
        x = x.relu() if name != "Dense_2" else x
    return x.reshape(len(x), -1, args.n_atoms).log_softmax(-1) if hasattr(args, "n_atoms") else x


def q_values(names, params, obs):
    """What the network thinks of each action; of the distributions that C51 learns, their means."""
    args, values = names["args"], outputs(names, tensors(params), obs).detach().numpy()
    return (
        np.exp(values) @ np.linspace(args.v_min, args.v_max, args.n_atoms)
        if hasattr(args, "n_atoms")
        else values
    )


def leaves(tree):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def updates_of(agent):
    """How often Adam was called."""
    return int(optax.tree.get(agent["opt_state"], "count"))


class Recorder(gym.vector.VectorWrapper):
    """Writes down every step: observations, actions, rewards, what followed, both kinds of ends, returns and lengths."""

    def __init__(self, envs, steps):
        super().__init__(envs)
        self.steps = steps

    def reset(self, **kwargs):
        self.obs, infos = self.env.reset(**kwargs)
        return self.obs.copy(), infos

    def step(self, actions):
        obs, (self.obs, *answers, infos) = self.obs, self.env.step(actions)
        episodes = infos.get(
            "episode", {"r": np.zeros(self.num_envs), "l": np.zeros(self.num_envs)}
        )
        self.steps.append(
            [
                x.copy()
                for x in (
                    obs,
                    actions,
                    answers[0],
                    self.obs,
                    *answers[1:],
                    episodes["r"],
                    episodes["l"],
                )
            ]
        )
        return self.obs.copy(), *answers, infos


def record(monkeypatch):
    """Has a file make environments with a recorder, whose list it returns."""
    steps, make_vec = [], gym.make_vec
    monkeypatch.setattr(
        gym, "make_vec", lambda *args, **kwargs: Recorder(make_vec(*args, **kwargs), steps)
    )
    return steps


def test_dqn_1_the_ring_holds_what_happened_and_every_episode_is_logged(
    file, tmp_path, monkeypatch
):
    """Bit for bit and in order, with ends of both kinds, more steps than the buffer holds, and two calls of the program."""
    steps = record(monkeypatch)
    flags = (
        *SMALL,
        "--train-frequency",
        3,
        "--total-timesteps",
        330,
        "--buffer-size",
        152,
    )  # 50 rows, 110 steps
    run = train(file, tmp_path, "--env-id", "Probe/RandomEnds-v0", *flags)["run"]
    assert len(steps) == 110 and int(run["added"]) == int(run["global_step"]) == 330
    *seen, truncated, returns, lengths = map(np.array, zip(*steps, strict=True))
    newest = [max(t for t in range(110) if t % 50 == row) for row in range(50)]
    for column, expected in zip(run["buffer"], seen, strict=True):
        np.testing.assert_array_equal(column, expected[newest].astype(column.dtype))
    is_over = seen[-1] | truncated
    assert seen[-1].sum() > 10 and truncated.sum() > 10, "both ends"
    logged, numbers = scalars(only_run(tmp_path)), np.arange(1, 331).reshape(110, 3)[is_over]
    for name, values in {"return": returns[is_over], "length": lengths[is_over]}.items():
        steps_logged, values_logged = zip(*logged[f"charts/episodic_{name}"], strict=True)
        np.testing.assert_array_equal(steps_logged, numbers)
        np.testing.assert_allclose(values_logged, values, atol=1e-5)


def test_dqn_1_gymnax_steps_as_gymnasium_does(file, tmp_path):
    """Inside the program too: every row against Gymnasium's CartPole, with a cut, whose last observation is the true one."""
    flags = (
        "--num-envs",
        2,
        "--train-frequency",
        2,
        "--buffer-size",
        200,
        "--start-e",
        1,
        "--end-e",
        1,
    )
    _, run, program = begin(file, *flags)
    state, cartpole, starts, ends, cuts = (
        run["world"]["env_state"],
        gym.make("CartPole-v1").unwrapped,
        [],
        0,
        0,
    )
    run["world"]["env_state"] = state.replace(time=np.int32([0, 499]))
    cartpole.reset()
    for t in range(60):
        before, (run, ((is_over, returns, lengths), _)) = run, program(run)
        obs, actions, rewards, next_obs, terminated = (column[t] for column in run["buffer"])
        np.testing.assert_array_equal(obs, before["world"]["obs"])
        for e in range(2):
            cartpole.state, cartpole.steps_beyond_terminated = obs[e], None
            expected, _, is_end, _, _ = cartpole.step(int(actions[e]))
            np.testing.assert_allclose(next_obs[e], expected, atol=1e-5)
            assert (rewards[e], terminated[e]) == (1, is_end)
            is_cut = t == 0 and e == 1
            assert is_over[0, 0, e] == (is_end or is_cut)
            assert returns[0, 0, e] == lengths[0, 0, e] == before["world"]["episode_length"][e] + 1
            if is_over[0, 0, e]:
                assert (
                    np.abs(run["world"]["obs"][e]).max() <= 0.05
                    and run["world"]["episode_return"][e] == 0
                )
                starts.append(run["world"]["obs"][e])
            else:
                np.testing.assert_array_equal(run["world"]["obs"][e], next_obs[e])
            ends, cuts = ends + is_end, cuts + is_cut
    assert ends > 2 and cuts == 1 and len(np.unique(starts)) == 4 * len(starts), (
        "every episode has a start of its own"
    )


def test_dqn_3_the_chance_of_a_random_action_falls_linearly(file, tmp_path):
    """The network, which learns nothing, tells its favorites: half of the random actions are others. Then none is random."""
    flags = (
        "--num-envs",
        20,
        "--train-frequency",
        20,
        "--learning-starts",
        10**6,
        "--buffer-size",
        8000,
    )
    flags = (
        *flags,
        "--total-timesteps",
        8000,
        "--exploration-fraction",
        0.75,
        "--start-e",
        0.9,
        "--end-e",
        0,
    )
    names, run, program = begin(file, *flags, length=400)
    run, _ = program(run)
    best = q_values(names, run["agent"]["params"], run["buffer"][0].reshape(-1, 4)).argmax(1)
    other, epsilon = (
        best != run["buffer"][1].reshape(-1),
        0.9 * (1 - np.arange(8000) // 20 * 20 / 6000).clip(min=0),
    )
    for part in range(6):  # 1000 actions each
        piece = slice(1000 * part, 1000 * (part + 1))
        assert other[piece].mean() == pytest.approx(epsilon[piece].mean() / 2, abs=0.05)
    assert not other[6000:].any()
    assert updates_of(run["agent"]) == 0 and run["added"] == 8000


def reference_loss(names, params, target_params, batch):
    """The textbook's loss, row by row, and the mean value of the actions that were taken."""
    (obs, actions, rewards, next_obs, terminated), errors = batch, []
    values, next_values = (
        outputs(names, params, obs),
        outputs(names, target_params, next_obs).tolist(),
    )
    for row, action in enumerate(actions):
        target = float(rewards[row]) + (0 if terminated[row] else 0.9 * max(next_values[row]))
        errors.append((values[row, action] - target) ** 2)
    return sum(errors) / len(errors), sum(
        values[row, action] for row, action in enumerate(actions)
    ) / len(actions)


def follow_updates(file, monkeypatch, reference_loss, eps, *flags):
    """The number of updates in a row that were checked to be those of a reference loss, on all rows that were written, in
    order: what is drawn is far above their number, and only what remains of it below that counts."""

    def bits(key, shape):
        assert shape == (1, 2, 16)
        return 32 * 1_000_001 + jnp.arange(32, dtype=jnp.uint32).reshape(shape)

    monkeypatch.setattr(jax.random, "bits", bits)
    flags = (
        *SMALL,
        "--num-envs",
        4,
        "--train-frequency",
        2,
        "--learning-starts",
        32,
        "--buffer-size",
        40,
        *flags,
    )
    flags = (*flags, "--target-network-frequency", 1000)
    names, run, program = begin(file, "--env-id", "Probe/RandomEnds-v0", *flags)
    rng = np.random.default_rng(1)
    shaken = jax.tree.map(
        lambda x: np.float32(x + 0.1 * rng.standard_normal(x.shape)), run["agent"]["params"]
    )
    run["agent"] |= {"target_params": shaken}
    run["global_step"] = np.int32(
        120
    )  # as after a resume without the buffer, for which learning waits
    for _ in range(8):
        before, (run, (_, (losses, values))) = run, program(run)
    buffer = [column.reshape(40, *column.shape[2:]) for column in run["buffer"]]
    assert 2 < buffer[-1][:32].sum() < 30
    old, params = leaves(before["agent"]["params"]), tensors(before["agent"]["params"])
    adam = torch.optim.Adam(jax.tree.leaves(params), lr=0.001, eps=eps)
    for update in range(2):
        batch = [column[16 * update : 16 * (update + 1)] for column in buffer]
        loss, value = reference_loss(names, params, tensors(shaken), batch)
        assert losses[0, update] == pytest.approx(loss.item(), rel=1e-4)
        assert values[0, update] == pytest.approx(value.item(), rel=1e-4, abs=1e-5)
        adam.zero_grad()
        loss.backward()
        adam.step()
    assert updates_of(run["agent"]) == 2 and same(
        leaves(run["agent"]["target_params"]), leaves(shaken)
    )
    means = [adam.state[tensor]["exp_avg"] for tensor in jax.tree.leaves(params)]
    for got, wanted in zip(
        leaves(optax.tree.get(run["agent"]["opt_state"], "mu")), means, strict=True
    ):
        np.testing.assert_allclose(got, wanted, atol=1e-6, rtol=1e-3)
    for got, was, wanted in zip(
        leaves(run["agent"]["params"]), old, jax.tree.leaves(params), strict=True
    ):
        np.testing.assert_allclose(got - was, wanted.detach().numpy() - was, atol=5e-5)
    for _ in range(3):  # 44 steps now, of which the buffer holds 40
        before, (run, (_, (losses, _))) = run, program(run)
    rows = (32 * 1_000_001 + np.arange(16)) % 40
    batch = [column.reshape(40, *column.shape[2:])[rows] for column in run["buffer"]]
    loss, _ = reference_loss(names, tensors(before["agent"]["params"]), tensors(shaken), batch)
    assert losses[0, 0] == pytest.approx(loss.item(), rel=1e-4), (
        "what is drawn from are the steps that the buffer holds"
    )
    return 1 + update


def test_dqn_4_a_cut_is_bootstrapped_and_an_end_is_not(file, tmp_path, monkeypatch):
    """Loss, gradient and Adam's step against those of the textbook's loss, left to autograd."""
    assert follow_updates(file, monkeypatch, reference_loss, 1e-8) == 2


@pytest.mark.parametrize(
    ("num_envs", "train_frequency", "learning_starts", "every", "tau"),
    [(1, 4, 30, 25, 1), (4, 2, 33, 30, 0.3), (2, 6, 7, 12, 1)],
)
def test_dqn_5_dqn_6_updates_and_the_target_network(
    file, tmp_path, num_envs, train_frequency, learning_starts, every, tau
):
    updates, moves, other_best = follow_schedule(
        file, num_envs, train_frequency, learning_starts, every, tau
    )
    assert updates >= 20 and moves >= 3 and other_best > 0, "there was something to see"


def follow_schedule(file, num_envs, train_frequency, learning_starts, every, tau):
    """Both counted in environment steps: an update every train_frequency, several in a row where the environments make more
    steps at once; the target network moves when it should, as far as it should, and is frozen in between. Without random
    actions, every action is the best one by the network as it was after the last update. How often each was to be seen."""
    flags = (
        *SMALL,
        "--num-envs",
        num_envs,
        "--train-frequency",
        train_frequency,
        "--learning-starts",
        learning_starts,
    )
    flags = (
        *flags,
        "--target-network-frequency",
        every,
        "--start-e",
        0,
        "--end-e",
        0,
        "--learning-rate",
        0.02,
    )
    if "c51" in file.stem:
        flags, tau = (*flags, *few_atoms(file)), 1
    else:
        flags = (*flags, "--tau", tau)
    names, run, program = begin(file, "--env-id", "Probe/RandomEnds-v0", *flags)
    iteration, updates, moves, other_best = max(num_envs, train_frequency), 0, 0, 0
    for now in range(iteration, 30 * iteration + 1, iteration):
        before, (run, _) = run, program(run)
        new, old = run["agent"], before["agent"]
        assert int(run["global_step"]) == int(run["added"]) == now
        for step in range(now - iteration + 1, now + 1):
            made = step + -step % num_envs  # when the environments have all made their steps
            updates += step % train_frequency == 0 and made >= learning_starts
        assert updates_of(new) == updates
        assert np.array_equal(leaves(new["params"])[0], leaves(old["params"])[0]) == (
            now < learning_starts
        )
        is_due = now >= learning_starts and now // every > (now - iteration) // every
        moves += is_due
        for target, params, target_before in zip(
            *map(leaves, (new["target_params"], new["params"], old["target_params"])), strict=True
        ):
            expected = tau * params + (1 - tau) * target_before if is_due else target_before
            np.testing.assert_allclose(
                target, expected, rtol=0, atol=0 if tau == 1 or not is_due else 1e-6
            )
        rows = [
            row // num_envs % len(run["buffer"][0]) for row in range(now - iteration, now, num_envs)
        ]
        obs, actions = (column[rows] for column in run["buffer"][:2])
        for t in range(len(rows)):
            np.testing.assert_array_equal(
                actions[t], q_values(names, old["params"], obs[t]).argmax(1)
            )
            other_best += (
                actions[t] != q_values(names, old["target_params"], obs[t]).argmax(1)
            ).sum()
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
    """And, where actions matter, that load_policy takes the right ones in fresh environments, as every evaluation does."""
    learned, returns = learn_probe(file, tmp_path, probe, num_envs, values)
    np.testing.assert_allclose(learned, list(values.values()), atol=0.1)
    assert "Action" not in probe or returns == [1] * 40


def learn_probe(file, tmp_path, probe, num_envs, observations):
    """The values that are learned at observations, and the returns of some games after that."""
    flags = (*probe_flags(file), "--num-envs", num_envs, "--learning-rate", 0.01)
    flags = (*flags, "--end-e", 0.5)  # there is a value to learn for either action
    names = train(file, tmp_path, "--env-id", f"Probe/{probe}-v0", *flags)
    learned = q_values(
        names, names["run"]["agent"]["params"], np.float32([[obs] for obs in observations])
    )
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


def learn_cartpole(file, tmp_path, seed):
    """The mean return of the last 20 episodes."""
    names = train(file, tmp_path, *FAST_CARTPOLE, "--seed", seed)
    assert names["args"].gymnax
    return np.mean(
        [value for _, value in scalars(only_run(tmp_path))["charts/episodic_return"]][-20:]
    )


# the same seed, the same run


def without_speed(run):
    return {name: values for name, values in scalars(run).items() if name != "charts/SPS"}


def test_another_seed_is_another_run(file, tmp_path):
    """Other weights, other environments, other random numbers; and the same ones for the same seed."""
    for flags in ((), ("--env-id", "Probe/RandomEnds-v0")):
        a, b, c = (
            begin(
                file, *flags, "--buffer-size", 10, "--train-frequency", 1, "--seed", seed, length=0
            )[1]
            for seed in (1, 1, 2)
        )
        assert same(leaves(a), leaves(b))
        for x, y in (
            (a["key"], c["key"]),
            (a["world"]["obs"], c["world"]["obs"]),
            *zip(*map(kernels, (a, c)), strict=True),
        ):
            assert (np.asarray(x) != np.asarray(y)).mean() > 0.99


def kernels(run):
    return [leaf for leaf in leaves(run["agent"]["params"]) if leaf.ndim == 2]


def stopped(file, folder, step, *flags):
    """The folder of a run that went to its end, and a copy of how it was when the checkpoint of a step was written."""
    real = os.replace

    def replace(source, target):
        real(source, target)
        if (
            Path(target).name == "checkpoint.msgpack"
            and read_checkpoint(Path(target).parent)["global_step"] == step
        ):
            shutil.copytree(Path(target).parent, folder / "part")

    with mock.patch("os.replace", replace):
        train(file, folder / "whole", *flags)
    return only_run(folder / "whole"), folder / "part"


HALVES = (
    "--num-envs",
    2,
    "--train-frequency",
    2,
    "--learning-starts",
    30,
    "--batch-size",
    16,
    "--buffer-size",
    150,
)
HALVES = (
    *HALVES,
    "--target-network-frequency",
    50,
    "--total-timesteps",
    400,
    "--checkpoint-interval",
    200,
)  # in two calls


def test_resume_with_gymnax_is_the_uninterrupted_run(file, tmp_path):
    """Bit for bit, curves included, although episodes were under way."""
    whole, part = stopped(
        file, tmp_path, 200, *HALVES, "--seed", 2
    )  # with seed 1 both episodes end at that very step
    assert read_checkpoint(part)["world"]["episode_length"].max() > 0
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
    """Bit for bit where every step is an episode. Without the buffer, learning waits for learning_starts further steps."""
    whole, part = stopped(file, tmp_path, 200, "--env-id", "Probe/ConstantValue-v0", *HALVES)
    forgetful, checkpoint = shutil.copytree(part, tmp_path / "forgetful"), read_checkpoint(part)
    train(file, tmp_path, "--resume", part)
    assert same(read_checkpoint(whole), read_checkpoint(part))
    assert updates_of(read_checkpoint(part)["agent"]) == (400 - 28) // 2

    edit(forgetful, checkpoint_buffer=False)
    write(
        forgetful,
        {name: value for name, value in checkpoint.items() if name not in ("buffer", "added")},
    )
    run = train(file, tmp_path, "--resume", forgetful)["run"]
    assert (int(run["global_step"]), int(run["added"])) == (400, 200)
    assert updates_of(run["agent"]) == updates_of(checkpoint["agent"]) + (200 - 28) // 2
    assert read_checkpoint(forgetful).keys() == {"agent", "global_step", "key"}
    assert without_speed(whole) == without_speed(part)


def test_resume_of_a_damaged_checkpoint_gets_one_line(file, tmp_path):
    """Also where it was made to do harm: arrays of other shapes would be read beyond their ends, and so would wrong counts."""
    train(file, tmp_path, *HALVES, "--total-timesteps", 200)
    run = only_run(tmp_path)
    checkpoint, data = read_checkpoint(run), (run / "checkpoint.msgpack").read_bytes()
    agent, buffer, world = (checkpoint[name] for name in ("agent", "buffer", "world"))
    less = lambda tree, name: {key: value for key, value in tree.items() if key != name}  # noqa: E731
    damages = [{"global_step": np.int32(step)} for step in (-200, 100)]
    damages += [
        {"added": added} for added in (np.int32(-2), np.int32(3), np.int32(202), np.float32(2))
    ]
    damages += [
        {"buffer": other} for other in (buffer | {"0": buffer["0"][1:]}, less(buffer, "4"), 1)
    ]
    damages += [
        {"agent": agent | {"params": jax.tree.map(np.transpose, agent["params"])}},
        {"world": less(world, "obs")},
    ]
    damaged = [msgpack_serialize(checkpoint | damage) for damage in damages]
    damaged += [msgpack_serialize(less(checkpoint, name)) for name in ("agent", "global_step")]
    damaged += [
        data[:-1],
        data[:5000],
        np.random.default_rng(1).bytes(9999),
        msgpack_serialize([1]),
    ]
    for number, content in enumerate(damaged):
        (run / "checkpoint.msgpack").write_bytes(content)
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(SystemExit) as refusal:
            train(file, tmp_path, "--resume", run)
        message = refusal.value.code
        assert message.startswith(f"cannot resume {run}: ") and "\n" not in message, number
        assert sorted(tmp_path.rglob("*")) == before, "a refused command must not write"


@pytest.mark.slow
def test_videos_are_gymnasiums(file, tmp_path):
    names = train(file, tmp_path, *HALVES, "--capture-video")
    assert (
        not names["args"].gymnax and len(scalars(only_run(tmp_path))["charts/episodic_return"]) > 5
    )
    videos = list((only_run(tmp_path) / "videos").glob("step-0-episode-*.mp4"))
    assert len(videos) >= 2 and all(video.stat().st_size > 1000 for video in videos)


@pytest.mark.slow
def test_minatar_is_trained_and_played(file, tmp_path, monkeypatch):
    """What only gymnax has: images of 0 and 1, several environments, and games that enjoy can play."""
    names = train(file, tmp_path, "--env-id", "Breakout-MinAtar", *HALVES, "--total-timesteps", 200)
    run, (obs, *_) = only_run(tmp_path), names["run"]["buffer"]
    assert (
        names["args"].gymnax
        and obs.shape == (75, 2, 10, 10, 4)
        and np.unique(obs).tolist() == [0, 1]
    )
    assert (
        updates_of(names["run"]["agent"]) == (200 - 28) // 2
        and scalars(run)["charts/episodic_length"][0][1] > 3
    )
    monkeypatch.setattr(sys, "argv", ["enjoy", str(run), "--episodes", "3"])
    enjoy.main()
    evaluation = json.loads((run / "eval.json").read_text())
    assert (
        len(evaluation["returns"]) == 3
        and min(evaluation["lengths"]) > 3
        and evaluation["global_step"] == 200
    )
