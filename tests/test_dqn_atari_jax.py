"""cleanrl/dqn_atari_jax.py. test_frames_N and test_dqn_N guard details of rl-algorithms/dqn.md.

test_atari_N guards Atari detail N of ppo.md. The environments are those of dqn_atari.py, where they
are tested; tests/test_siblings.py sees to it that they stay the same.
"""

import random
import runpy
import shutil
import sys

import jax
import numpy as np
import optax
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.harness import only_run, probe, read_checkpoint, same, scalars
from tests.test_dqn import (
    FUZZ,
    SHAPES,
    SMALL,
    Witness,
    drawn_evenly,
    few_atoms,
    made_up_steps,
    replay_of,
    watch,
)
from tests.test_dqn_atari import PROBE_FLAGS, fill, small_frames
from tests.test_dqn_jax import (
    edit,
    leaves,
    play,
    stopped,
    tensors,
    train,
    updates_of,
    without_speed,
    write,
)
from tests.test_ppo_atari import images_of


def outputs(names, params, stacks):
    """The network's outputs by PyTorch: Q-values, or the log-probabilities of atoms."""
    x, args, params = torch.tensor(np.asarray(stacks)) / 255, names["args"], params["params"]
    for name, stride in (("Conv_0", 4), ("Conv_1", 2), ("Conv_2", 1)):
        kernel = params[name]["kernel"].permute(3, 2, 0, 1)
        x = torch.nn.functional.conv2d(x, kernel, params[name]["bias"], stride).relu()
    hidden, last = params["Dense_0"], params["Dense_1"]
    x = (x.permute(0, 2, 3, 1).flatten(1) @ hidden["kernel"] + hidden["bias"]).relu()
    x = x @ last["kernel"] + last["bias"]
    return x.reshape(len(x), -1, args.n_atoms).log_softmax(-1) if hasattr(args, "n_atoms") else x


def q_values(names, params, stacks):
    """The network's values of all actions; of the distributions that C51 learns, the means."""
    args, values = names["args"], outputs(names, tensors(params), stacks).detach().numpy()
    if hasattr(args, "n_atoms"):
        return np.exp(values) @ np.linspace(args.v_min, args.v_max, args.n_atoms)
    return values


# the ring of frames


def transitions(b):
    """A batch as a list of (obs, action, reward, next obs, terminated), as a witness notes them."""
    obs = [stack[:4].tobytes() for stack in b["stacks"]]
    next_obs = [stack[1:].tobytes() for stack in b["stacks"]]
    actions, rewards, terminated = (b[x].tolist() for x in ("actions", "rewards", "terminated"))
    return list(zip(obs, actions, rewards, next_obs, terminated, strict=True))


def test_frames_1_every_frame_is_kept_once(file, tmp_path):
    """A million steps in 7.1 GB, which nobody has to have before they are needed."""
    replay = replay_of(runpy.run_path(str(file)), 1_000_000, 8, (4, 84, 84))
    assert sum(column.nbytes for column in replay.columns.values()) < 7.5e9


def test_frames_2_stacks_are_rebuilt(file, tmp_path):
    """Against plain lists; the oldest three steps lack frames of their stacks: never drawn."""
    names = runpy.run_path(str(file))

    @FUZZ
    @given(**SHAPES | {"rows": st.integers(8, 14)}, seed=st.integers(0, 2**32))
    def check(num_envs, rows, more, turns, seed):
        rng = random.Random(seed)
        count = max(2, int(turns * rows))
        steps, happened = made_up_steps(rng, num_envs, count, *small_frames(rng))
        size = num_envs * rows + more % num_envs
        replay = replay_of(names, size, num_envs, (4, 2, 2))
        fill(replay, steps)
        kept = range(max(0, len(steps) - rows + 3) * num_envs, (len(steps) - 1) * num_envs)
        expected = {number for number in kept if number in happened}
        if not expected:
            return
        rng = np.random.default_rng(seed)
        many, *single = [replay.sample(n, rng) for n in (40 * size, 1, 1, 1, 1, 1)]
        assert {len(x) for b in single for x in b.values()} == {1}
        assert set(many["rewards"].tolist()) == expected
        for b in (many, *single):
            for before, action, number, after, terminated in transitions(b):
                assert number in expected
                assert (before, action, after, terminated) == happened[int(number)]

    check()


def test_dqn_2_every_transition_is_as_likely(file, tmp_path):
    rng, num_envs, rows = random.Random(1), 3, 30
    steps, happened = made_up_steps(rng, num_envs, 80, *small_frames(rng))
    replay = replay_of(runpy.run_path(str(file)), num_envs * rows, num_envs, (4, 2, 2))
    fill(replay, steps)
    rng = np.random.default_rng(1)
    expected = [number for number in range(53 * num_envs, 79 * num_envs) if number in happened]
    samples = [torch.tensor(replay.sample(128, rng)["rewards"]) for _ in range(500)]
    assert drawn_evenly(samples, expected)


# learning


def before_updates(monkeypatch, look):
    """Has look(names, agent, b) called before each update, with arrays that nobody changes."""
    real = jax.jit

    def jit(function, **flags):
        compiled = real(function, **flags)

        def learn(agent, b):
            copies = {name: x.copy() for name, x in b.items()}
            look(sys._getframe(1).f_globals, jax.tree.map(np.array, agent), copies)
            return compiled(agent, b)

        return learn if function.__name__ == "learn" else compiled

    monkeypatch.setattr(jax, "jit", jit)


def reference_loss(names, params, target_params, b):
    """The textbook loss, row by row."""
    values = outputs(names, params, b["stacks"][:, :4])
    next_values = outputs(names, target_params, b["stacks"][:, 1:]).tolist()
    errors = []
    for row, action in enumerate(b["actions"]):
        target = float(b["rewards"][row])
        if not b["terminated"][row]:
            target += 0.9 * max(next_values[row])
        errors.append((values[row, action] - target) ** 2)
    return sum(errors) / len(errors)


def follow_updates(file, folder, monkeypatch, reference_loss, eps, tau, *flags):
    """The steps of a run's updates, each of which was looked at.

    The batch is of what truly happened; the chance of a random action falls linearly; when it is 0,
    the actions are the network's best; the target network moves when it should, as far as it
    should, and is frozen in between. At some updates, what they change is compared too.
    """
    happened, steps, ends, moves, before = watch(file, monkeypatch), [], set(), [], {}

    def look(names, agent, b):
        step, witness = names["global_step"], names["envs"]
        while not isinstance(witness, Witness):
            witness = witness.env
        assert names["epsilon"] == pytest.approx(max(0, 1 - (step - 3) / 150))
        if names["epsilon"] == 0:
            best = q_values(names, agent["params"], witness.obs_before).argmax(1)
            np.testing.assert_array_equal(witness.actions, best)
        for transition in transitions(b):
            assert transition in happened
            ends.add((transition[-1], happened[transition]))

        if steps:
            expected = before["target"]
            for then in range(steps[-1], step, 3):  # after the updates of these steps
                if then // 30 > (then - 3) // 30:
                    pairs = zip(leaves(agent["params"]), expected, strict=True)
                    expected = [tau * new + (1 - tau) * old for new, old in pairs]
                    moves.append(then)
            for got, wanted in zip(leaves(agent["target_params"]), expected, strict=True):
                np.testing.assert_allclose(got, wanted, rtol=0, atol=0 if tau == 1 else 1e-6)
        means = leaves(optax.tree.get(agent["opt_state"], "mu"))
        if "means" in before:
            for got, wanted in zip(means, before.pop("means"), strict=True):
                np.testing.assert_allclose(got, wanted, rtol=1e-3, atol=2e-6)
        if "params" in before:
            for got, wanted in zip(leaves(agent["params"]), before.pop("params"), strict=True):
                np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-5)
        assert updates_of(agent) == len(steps)
        steps.append(step)
        before["target"] = leaves(agent["target_params"])
        if len(steps) in (1, 2, 8):
            params, target_params = tensors(agent["params"]), tensors(agent["target_params"])
            loss = reference_loss(names, params, target_params, b)
            grads = [grad.numpy() for grad in torch.autograd.grad(loss, jax.tree.leaves(params))]
            pairs = zip(means, grads, strict=True)
            before["means"] = [0.9 * mean + 0.1 * grad for mean, grad in pairs]
            if len(steps) == 1:  # Adam's first step
                pairs = zip(leaves(agent["params"]), grads, strict=True)
                first = [old - 0.001 * grad / (np.abs(grad) + eps) for old, grad in pairs]
                before["params"] = first

    before_updates(monkeypatch, look)
    schedule = ("--total-timesteps", 240, "--exploration-fraction", 150 / 240, "--end-e", 0)
    env_id = probe(file, "RandomEnds")
    names = train(file, folder, "--env-id", env_id, *SMALL, *schedule, *flags)
    assert moves == [60, 90, 120, 150, 180, 210]
    assert ends == {(True, False), (False, True), (False, False)}
    assert set(names["buffer"].columns["rewards"].tolist()) == {-1, 0, 1}, "0 where they only reset"
    returns = [value for _, value in scalars(only_run(folder))["charts/episodic_return"]]
    assert len(returns) > 20
    assert all(value != round(value) for value in returns), "what is reported is not clipped"
    return steps


def test_dqn_2_to_dqn_6_every_update_is_by_the_book(file, tmp_path, monkeypatch):
    """And rewards are clipped to their sign for learning only [atari 6]."""
    steps = follow_updates(file, tmp_path, monkeypatch, reference_loss, 1e-8, 0.3, "--tau", 0.3)
    assert steps == list(range(60, 241, 6))


def test_atari_8_the_nature_cnn(file, tmp_path):
    """Layer by layer, from bytes that are scaled to 0 and 1 [atari 9]."""
    names = runpy.run_path(str(file))
    stacks = np.random.default_rng(1).integers(256, size=(5, 4, 84, 84), dtype=np.uint8)
    args = names["Args"]()
    atoms = (args.n_atoms,) if "c51" in file.stem else ()
    network = names["QNetwork"](6, *atoms)
    params = network.init(jax.random.key(1), stacks)
    shapes = {name: layer["kernel"].shape for name, layer in params["params"].items()}
    assert shapes == {
        "Conv_0": (8, 8, 4, 32),
        "Conv_1": (4, 4, 32, 64),
        "Conv_2": (3, 3, 64, 64),
        "Dense_0": (3136, 512),
        "Dense_1": (512, 6 * 51 if atoms else 6),
    }
    expected = outputs({"args": args}, tensors(params), stacks).detach()
    np.testing.assert_allclose(network.apply(params, stacks), expected, rtol=0, atol=1e-4)


# known answers


@pytest.mark.slow
def test_values_of_probes(file, tmp_path):
    """The reward comes at the second step, whose stack still has the image of the first."""
    flags = (*PROBE_FLAGS, *few_atoms(file), "--total-timesteps", 320)
    names = train(file, tmp_path, "--env-id", probe(file, "Discounting"), *flags)
    learned = q_values(names, names["agent"]["params"], images_of([0, (0, 1)]))
    np.testing.assert_allclose(learned, [[0.5, 0.5], [1, 1]], atol=0.25)


@pytest.mark.slow
def test_actions_of_probes(file, tmp_path):
    """Acting through load_policy in fresh environments, as every evaluation does."""
    flags = (*PROBE_FLAGS, *few_atoms(file), "--total-timesteps", 320)
    names = train(file, tmp_path, "--env-id", probe(file, "ActionAndObsMatter"), *flags)
    learned = q_values(names, names["agent"]["params"], images_of([-1, 1]))
    np.testing.assert_allclose(learned, [[1, -1], [-1, 1]], atol=0.25)
    assert play(names, only_run(tmp_path)) == [1] * 40


# the same seed, the same run


def test_resume_restarts_episodes_only(file, tmp_path):
    """Bit for bit where all episodes are alike; without its buffer, learning waits for one."""
    flags = (
        "--num-envs 2 --train-frequency 4 --learning-starts 16 --batch-size 8 --buffer-size 36 "
        "--total-timesteps 48 --checkpoint-interval 24 --target-network-frequency 20 "
        "--checkpoint-buffer --env-id"
    ).split()
    whole, part = stopped(file, tmp_path, 24, *flags, probe(file, "ConstantValue"))
    forgetful, checkpoint = shutil.copytree(part, tmp_path / "forgetful"), read_checkpoint(part)
    train(file, tmp_path, "--resume", part)
    assert same(read_checkpoint(whole), read_checkpoint(part))
    assert without_speed(whole) == without_speed(part)
    assert updates_of(read_checkpoint(part)["agent"]) == 9

    edit(forgetful, checkpoint_buffer=False)
    kept = {"agent", "args", "global_step"}
    write(forgetful, {name: checkpoint[name] for name in kept})
    names = train(file, tmp_path, "--resume", forgetful)
    assert (names["global_step"], names["buffer"].num_added) == (48, 24)
    assert updates_of(names["agent"]) == 3 + 3
    assert read_checkpoint(forgetful).keys() == kept

    frames = checkpoint["buffer"]["frames"][1:]
    write(part, checkpoint | {"buffer": checkpoint["buffer"] | {"frames": frames}})
    with pytest.raises(SystemExit, match="cannot resume"):
        train(file, tmp_path, "--resume", part)


def test_same_seed_same_bits(file, tmp_path):
    """Before learning starts: that learning repeats itself too, a resume shows."""
    flags = (*SMALL, "--total-timesteps", 57, "--checkpoint-buffer")
    for name, seed in {"a": 1, "b": 1, "c": 2}.items():
        env = ("--env-id", probe(file, "RandomEnds"), "--seed", seed)
        train(file, tmp_path / name, *env, *flags)
    a, b, c = (only_run(tmp_path / name) for name in "abc")
    assert same(read_checkpoint(a), read_checkpoint(b)) and without_speed(a) == without_speed(b)
    a, c = read_checkpoint(a), read_checkpoint(c)
    columns = ("frames", "actions", "rewards")
    assert not any(same(a["buffer"][name], c["buffer"][name]) for name in columns)
    assert not same(a["agent"]["params"], c["agent"]["params"])
