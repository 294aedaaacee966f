"""cleanrl/rainbow_atari.py. test_rainbow_N guards detail N of docs/rl-algorithms/rainbow.md, test_dqn_N and test_frames_N that
of dqn.md, test_c51_N of c51.md, test_atari_N of ppo.md; some are those of the files where that comes from."""

import copy
import gc
import math
import os
import random
import runpy
import sys
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.harness import FILES, flat_grad, only_run, probe, read_checkpoint, scalars, train
from tests.test_c51 import (  # noqa: F401  the imported tests run here on this file
    means,
    projected,
    test_c51_2_by_hand,
    test_c51_2_projection_matches_a_loop_over_the_atoms,
)
from tests.test_dqn import Witness, interrupted
from tests.test_dqn_atari import (  # noqa: F401
    BREAKOUT,
    FUZZ,
    PONG,
    SHAPES,
    SMALL,
    images_of,
    made_up_steps,
    play,
    small_frames,
    test_atari_6_rewards_are_clipped_to_their_sign_for_learning_only,
    test_dqn_5_learning_waits_for_a_buffer_that_was_not_kept,
    test_dqn_6_tau_moves_the_target_network_part_of_the_way,
    test_dqn_6_the_target_network_is_a_frozen_copy,
    test_same_seed_same_bits,
)


@pytest.fixture
def file():
    return FILES["rainbow_atari"]


def spaces(num_actions=6, shape=(4, 84, 84), num_envs=1):
    """What networks and buffers ask of environments."""
    obs_space, action_space = (
        gym.spaces.Box(0, 255, shape, np.uint8),
        gym.spaces.Discrete(num_actions),
    )
    return SimpleNamespace(
        num_envs=num_envs, single_observation_space=obs_space, single_action_space=action_space
    )


def replay_of(file, size, num_envs=1, shape=(4, 2, 2), n_step=1, gamma=0.5):
    return runpy.run_path(str(file))["ReplayBuffer"](
        size, spaces(shape=shape, num_envs=num_envs), n_step, gamma
    )


def fill(replay, steps):
    for obs, *step in steps:
        replay.add(obs[:, -1], obs.any((2, 3)), *step)


def leaves(replay):
    return replay.tree[replay.first_leaf : replay.first_leaf + replay.size]


def quiet_values(names, obs):
    """What the network thinks of each action, without its noise."""
    with torch.no_grad():
        return copy.deepcopy(names["q_network"]).eval().q_values(obs)


# the noise


def noise_of(layer):
    """The noise of one call: of each weight and of each bias, in units of its strength."""
    with torch.no_grad():
        bias, *weights = layer(
            torch.cat([torch.zeros(1, layer.in_features), torch.eye(layer.in_features)])
        ).double()
        weights = (torch.stack(weights, 1) - bias[:, None] - layer.weight) / layer.weight_sigma
        return weights, (bias - layer.bias) / layer.bias_sigma


def test_rainbow_1_noise_is_factorized(file, tmp_path):
    """That of a weight is the product of its input's and its output's, which is the bias's; each is sign(x) sqrt(|x|) of a
    Gaussian x. Means are even within 1 / sqrt(inputs), strengths 0.5 / sqrt(inputs)."""
    torch.manual_seed(1)
    layer = runpy.run_path(str(file))["NoisyLinear"](40, 30)
    assert (layer.weight_sigma == 0.5 / 40**0.5).all() and (layer.bias_sigma == 0.5 / 40**0.5).all()
    sizes = layer.weight.detach().abs() * 40**0.5
    assert 0.95 < sizes.max() <= 1 and sizes.mean().item() == pytest.approx(0.5, abs=0.05)
    gaussian = []
    for _ in range(100):
        weights, outs = noise_of(layer)
        ins = weights[outs.abs().argmax()] / outs[outs.abs().argmax()]
        torch.testing.assert_close(weights, torch.outer(outs, ins), atol=1e-4, rtol=1e-4)
        gaussian.append(torch.cat([x.sign() * x.square() for x in (ins, outs)]))
    values = torch.stack(gaussian)
    assert (
        values.mean().abs() < 4 / 7000**0.5
        and (values.square().mean() - 1).abs() < 4 * (2 / 7000) ** 0.5
    )
    assert (values.abs() < 1).double().mean().item() == pytest.approx(0.683, abs=0.025), (
        "as often as a Gaussian's"
    )
    assert (values.T.corrcoef() - torch.eye(70)).abs().max() < 0.6, "each has its own"
    assert (values.corrcoef() - torch.eye(100)).abs().max() < 0.65, "each time anew"


class Listener:
    """Notes what torch.randn has drawn."""

    def __init__(self, monkeypatch):
        self.drawn, real = [], torch.randn

        def randn(*shape, **options):
            self.drawn.append(real(*shape, **options))
            return self.drawn[-1]

        monkeypatch.setattr(torch, "randn", randn)


def test_rainbow_1_noise_is_new_for_acting_learning_and_the_target(file, tmp_path, monkeypatch):
    """Four layers with noise: four draws for each step, and for each update four for what was done, for the choice of what
    comes next, and for the target."""
    listener, counts = Listener(monkeypatch), []
    flags = ("--env-id", probe(file, "RandomEnds"), *SMALL, "--total-timesteps", 90)
    names = train(
        file, tmp_path, *flags, on_update=lambda names: counts.append(len(listener.drawn))
    )
    acted = [
        4 * names["global_step"] // 3
        for names in ({"global_step": step} for step in range(60, 91, 6))
    ]
    assert counts == [steps + 12 * (update + 1) for update, steps in enumerate(acted)]
    assert names["q_network"].training and names["target_network"].training
    assert len({x.sum().item() for x in listener.drawn}) == len(listener.drawn), (
        "none is used twice"
    )


def test_rainbow_1_evaluation_is_without_noise(file, tmp_path):
    """Whoever loads the policy gets the best actions by the means of the weights, whatever the strengths of the noise are."""
    torch.manual_seed(1)
    names, envs = runpy.run_path(str(file)), spaces()
    network = names["QNetwork"](envs, torch.linspace(-1, 1, 5))
    obs = torch.randint(256, (50, 4, 84, 84), dtype=torch.uint8)
    with torch.no_grad():
        noisy = [network.q_values(obs).argmax(1) for _ in range(3)]
        expected = (
            torch.stack([by_hand(network, one[None], [0.0] * 4)[0] for one in obs]).softmax(-1)
            @ network.atoms
        )
    assert not torch.equal(noisy[0], noisy[1]) and not torch.equal(noisy[1], noisy[2])
    louder = {name: 9 * x if "sigma" in name else x for name, x in network.state_dict().items()}
    for weights in (network.state_dict(), louder):
        policy = names["load_policy"]({"q_network": weights}, envs)
        for _ in range(2):
            np.testing.assert_array_equal(
                policy(obs.numpy(), np.zeros(50, bool)), expected.argmax(1)
            )
    assert len(set(expected.argmax(1).tolist())) > 1


def test_rainbow_1_the_strengths_of_the_noise_are_learned(file, tmp_path):
    flags = ("--env-id", probe(file, "RandomEnds"), *SMALL, "--total-timesteps", 90)
    network = train(file, tmp_path, *flags)["q_network"]
    for layer in (
        network.value_hidden,
        network.values,
        network.advantage_hidden,
        network.advantages,
    ):
        start = 0.5 / layer.in_features**0.5
        assert (layer.weight_sigma != start).float().mean() > 0.1 and (
            layer.bias_sigma != start
        ).float().mean() > 0.1


# the network


def by_hand(network, obs, noises):
    """The logits of all atoms, with the noise written into the weights, layer by layer, and the dueling sum left to loops.
    Of each of the four layers with noise: what was drawn, or a number for all of it."""

    def linear(layer, x, drawn):
        drawn = torch.as_tensor(drawn).expand(layer.in_features + layer.out_features)
        shaped = drawn.sign() * drawn.abs() ** 0.5
        ins, outs = shaped[: layer.in_features], shaped[layer.in_features :]
        weight = layer.weight + layer.weight_sigma * outs[:, None] * ins[None]
        return x @ weight.T + layer.bias + layer.bias_sigma * outs

    x = obs.float() / 255
    for conv, stride in ((network.conv1, 4), (network.conv2, 2), (network.conv3, 1)):
        x = torch.relu(torch.nn.functional.conv2d(x, conv.weight, conv.bias, stride))
    x = x.reshape(len(x), -1)
    value = linear(
        network.values, torch.relu(linear(network.value_hidden, x, noises[0])), noises[1]
    )
    advantages = linear(
        network.advantages, torch.relu(linear(network.advantage_hidden, x, noises[2])), noises[3]
    )
    num_atoms = len(network.atoms)
    advantages = [
        advantages[:, start : start + num_atoms]
        for start in range(0, advantages.shape[1], num_atoms)
    ]
    return torch.stack(
        [value + advantage - sum(advantages) / len(advantages) for advantage in advantages], 1
    )


def test_rainbow_2_values_and_advantages(file, tmp_path):
    """A distribution for each action, of the logits value + advantage - the mean advantage of all actions at that atom."""
    torch.manual_seed(1)
    network = runpy.run_path(str(file))["QNetwork"](spaces(), torch.arange(5.0)).eval()
    obs = torch.randint(256, (7, 4, 84, 84), dtype=torch.uint8)
    with torch.no_grad():
        expected, before = by_hand(network, obs, [0.0] * 4).log_softmax(-1), network(obs)
        torch.testing.assert_close(before, expected, atol=1e-5, rtol=0)
        torch.testing.assert_close(network.q_values(obs), before.exp() @ torch.arange(5.0))
        network.advantages.bias.add_(
            torch.tensor([1.0, -2, 3, 0, 5]).repeat(6)
        )  # as much for each action
        torch.testing.assert_close(network(obs), before, atol=1e-5, rtol=0)
        network.values.bias.add_(torch.tensor([1.0, -2, 3, 0, 5]))
        assert (network(obs) - before).abs().max() > 1, (
            "what is common to all is the value's to say"
        )


def test_atari_8_the_nature_cnn(file, tmp_path):
    """And from there two streams, one for the value and one for the advantages."""
    network = runpy.run_path(str(file))["QNetwork"](spaces(), torch.arange(5.0))
    layers = [layer for layer in network.modules() if hasattr(layer, "weight")]
    shapes = [
        (32, 4, 8, 8),
        (64, 32, 4, 4),
        (64, 64, 3, 3),
        (512, 3136),
        (512, 3136),
        (5, 512),
        (30, 512),
    ]
    assert [tuple(layer.weight.shape) for layer in layers] == shapes
    assert [layer.stride for layer in layers[:3]] == [(4, 4), (2, 2), (1, 1)]
    assert [tuple(layer.weight_sigma.shape) for layer in layers[3:]] == shapes[3:], (
        "all but the convolutions have noise"
    )


# the ring of frames, and returns over n steps


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_frames_1_every_frame_is_kept_once(file, tmp_path):
    """A million steps with their priorities in 7.1 GB, of which none is taken before it is needed."""

    def resident():
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    small = replay_of(file, 1000, 8, (4, 84, 84), n_step=3)
    assert sum(x.numel() * x.element_size() for x in small.buffers()) < 7100 * 1000
    gc.collect()
    before = resident()
    replay = replay_of(file, 1_000_000, 8, (4, 84, 84), n_step=3)
    assert sum(x.numel() * x.element_size() for x in replay.buffers()) < 7100 * 1_000_000
    assert resident() - before < 50e6, "an empty one takes next to nothing"
    frames, none = (
        np.random.default_rng(1).integers(1, 256, (8, 84, 84), np.uint8),
        np.zeros(8, bool),
    )
    before = resident()
    for _ in range(20_000 // 8):
        replay.add(frames, np.ones((8, 4), bool), none, none, none, none)
    assert 7056 <= (resident() - before) / 20_000 < 7400


def followed(happened, number, num_envs, n_step, gamma):
    """In a loop over what happened: the return of up to n steps from one on, what they led to, whether that is the end, and
    the discount of what comes after."""
    total, discount = 0.0, 1.0
    for step in range(number, number + n_step * num_envs, num_envs):
        if step not in happened:  # it only reset, or nobody knows what it led to
            break
        total, discount = total + discount * step, discount * gamma  # rewards number the steps
        _, _, next_obs, terminated = happened[step]
    return total, next_obs, terminated, discount


def numbers_of(replay, rows):
    """The numbers of the newest steps that these rows were written with."""
    newest = int(replay.count[0]) - 1
    return newest - (newest - rows) % replay.size


N_SHAPES = SHAPES | {"rows": st.integers(12, 18), "n_step": st.integers(1, 5)}


def test_rainbow_3_returns_of_n_steps_and_of_fewer_before_an_end(file, tmp_path):
    """Against plain lists, with several environments, ends of both kinds, resumes and a ring that goes round: what can be
    drawn are all steps but those whose followers are not there yet, or whose stacks are overwritten; each is drawn exactly."""
    lengths, gamma = set(), 0.9

    @FUZZ
    @given(**N_SHAPES, seed=st.integers(0, 2**32))
    def check(num_envs, rows, more, turns, n_step, seed):
        rng = random.Random(seed)
        steps, happened = made_up_steps(
            rng, num_envs, max(n_step + 1, int(turns * rows)), *small_frames(rng)
        )
        replay = replay_of(
            file, num_envs * rows + more % num_envs, num_envs, n_step=n_step, gamma=gamma
        )
        fill(replay, steps)
        kept = range(max(0, len(steps) - rows + 3) * num_envs, (len(steps) - n_step) * num_envs)
        expected = {number for number in kept if number in happened}
        assert set(numbers_of(replay, np.flatnonzero(leaves(replay)))) == expected
        if not expected:
            return
        torch.manual_seed(seed)
        for count in (40 * replay.size, 1, 1, 1):
            rows_drawn, sample = replay.sample(count, 0.5)
            numbers = numbers_of(replay, rows_drawn)
            for number, obs, action, total, next_obs, end, discount, weight in zip(
                numbers, *sample, strict=True
            ):
                wanted = followed(happened, number, num_envs, n_step, gamma)
                got = happened[number][:2] == (obs.numpy().tobytes(), action)
                assert (
                    got and (next_obs.numpy().tobytes(), bool(end)) == wanted[1:3] and weight == 1
                )
                assert total.item() == pytest.approx(
                    wanted[0], rel=1e-5
                ) and discount.item() == pytest.approx(wanted[3])
                lengths.add((n_step, round(math.log(discount) / math.log(gamma)), bool(end)))
            assert count == 1 or set(numbers) == expected

    check()
    assert {
        (3, 1, True),
        (3, 1, False),
        (3, 2, True),
        (3, 2, False),
        (3, 3, True),
        (3, 3, False),
    } <= lengths


def test_rainbow_3_late_starts_by_hand(file, tmp_path):
    """Three steps with rewards 1, 2 and 4 and the end, or a cut: starts with 3, 2 and 1 of them, discounted by a half each."""
    for terminated in (True, False):
        replay = replay_of(file, 20, n_step=3)
        frame, shown = (lambda t: np.full((1, 2, 2), 10 * (t + 1), np.uint8)), np.ones((1, 4), bool)
        for t, reward in enumerate(
            [1, 2, 4, 0]
        ):  # the last row only resets; its observation is the episode's last
            replay.add(
                frame(t),
                shown,
                np.array([t == 0]),
                np.array([t]),
                np.array([reward]),
                np.array([terminated and t == 2]),
            )
        assert list(np.flatnonzero(leaves(replay))) == [0]
        for t in range(4, 7):
            replay.add(
                frame(t),
                shown,
                np.array([t == 4]),
                np.array([t]),
                np.array([64]),
                np.array([False]),
            )
        assert list(np.flatnonzero(leaves(replay))) == [0, 1, 2]
        rows, (_, actions, returns, next_obs, ends, discounts, _) = replay.sample(3, 1.0)
        assert sorted(rows) == sorted(actions.tolist()) == [0, 1, 2]
        order = np.argsort(rows)
        assert returns[order].tolist() == [1 + 1 + 1, 2 + 2, 4] and discounts[order].tolist() == [
            1 / 8,
            1 / 4,
            1 / 2,
        ]
        assert (next_obs[:, -1] == 40).all() and ends.tolist() == [terminated] * 3


class Chronicle(Witness):
    """Writes down the steps of each environment, episode by episode: (obs, action, reward, next obs, terminated, time)."""

    def reset(self, **kwargs):
        self.open, self.time = [[] for _ in range(self.num_envs)], 0
        self.happened["episodes"] = [*self.happened.get("episodes", []), *self.open]
        return super().reset(**kwargs)

    def step(self, actions):
        before, was_over = self.obs, self.is_over
        answer = super().step(actions)
        _, rewards, terminated, truncated, _ = answer
        for e in np.flatnonzero(~was_over):
            is_end = bool(self.is_over[e] and (terminated[e] or not truncated[e]))
            reward = float(self.reward_as_learned(rewards[e]))
            self.open[e].append(
                (
                    before[e].tobytes(),
                    int(actions[e]),
                    reward,
                    self.obs[e].tobytes(),
                    is_end,
                    self.time,
                )
            )
            if self.is_over[e]:
                self.open[e] = []
                self.happened["episodes"].append(self.open[e])
        self.time += 1
        return answer


def chronicle(monkeypatch, **flags):
    """Has a file make environments with these flags more and a chronicle, which is returned."""
    happened, make_vec = {}, gym.make_vec
    make = lambda *args, **kwargs: Chronicle(make_vec(*args, **kwargs, **flags), happened, np.sign)  # noqa: E731
    monkeypatch.setattr(gym, "make_vec", make)
    return happened


def n_step_transitions(episodes, n_step, gamma):
    """{(obs, action, return, next obs, terminated, discount): number of steps} of all starts, in a loop over each."""
    found = {}
    for episode in episodes:
        for start in range(len(episode)):
            total, discount = 0.0, 1.0
            for step in episode[start : start + n_step]:
                total, discount = total + discount * step[2], discount * gamma
            taken = len(episode[start : start + n_step])
            found[(*episode[start][:2], round(total, 3), *step[3:5], round(discount, 3))] = taken
    return found


def learned(names):
    """What an update learned from, in the same words."""
    columns = "b_obs", "b_actions", "b_rewards", "b_next_obs", "b_terminated", "b_discounts"
    obs, actions, rewards, next_obs, terminated, discounts = (
        names[name].numpy() for name in columns
    )
    rounded = [round(float(x), 3) for x in rewards], [round(float(x), 3) for x in discounts]
    seen = [x.tobytes() for x in obs], [x.tobytes() for x in next_obs]
    return list(
        zip(
            seen[0],
            actions.tolist(),
            rounded[0],
            seen[1],
            terminated.tolist(),
            rounded[1],
            strict=True,
        )
    )


def test_dqn_2_only_what_happened_is_learned_from(file, tmp_path, monkeypatch):
    """Bit for bit, with ends of both kinds, more steps than the buffer holds, and a resume in the middle."""
    happened, batches = chronicle(monkeypatch), []
    flags = (
        "--env-id",
        probe(file, "RandomEnds"),
        *SMALL,
        "--checkpoint-interval",
        60,
        "--checkpoint-buffer",
    )
    run = interrupted(file, tmp_path, *flags, step=180)
    for episode in happened[
        "episodes"
    ]:  # what the checkpoint, of step 180, knows of: what its last row led to it does not
        episode[:] = [step for step in episode if step[-1] < 60 - 1]
    saved = len(happened["episodes"])
    train(file, tmp_path, "--resume", run, on_update=lambda names: batches.extend(learned(names)))
    expected = n_step_transitions(happened["episodes"], 3, 0.9)
    assert len(batches) == 20 * 16 and set(batches) <= expected.keys()
    before = n_step_transitions(happened["episodes"][:saved], 3, 0.9).keys()
    assert len(set(batches) & before) > 20 and len(set(batches) - before) > 20, (
        "from before and from after the resume"
    )
    kinds = {(expected[step], step[4]) for step in batches}
    assert kinds >= {(1, True), (1, False), (2, True), (2, False), (3, True), (3, False)}


@pytest.mark.parametrize(
    ("env_id", "max_steps", "steps"), [(BREAKOUT, 27_000, 750), (PONG, 60, 540)]
)
def test_frames_2_what_is_drawn_was_seen(file, tmp_path, monkeypatch, env_id, max_steps, steps):
    """On the emulator, bit for bit, with lost lives, games that end, games that are cut, and a ring that has gone round."""
    happened = chronicle(monkeypatch, max_num_frames_per_episode=4 * max_steps)
    flags = (
        "--env-id",
        env_id,
        "--num-envs",
        3,
        "--total-timesteps",
        steps,
        "--buffer-size",
        steps - 150,
    )
    names = train(
        file, tmp_path, *flags, "--start-e", 1, "--end-e", 1, "--gamma", 0.9
    )  # random play
    columns = (
        "b_obs",
        "b_actions",
        "b_rewards",
        "b_next_obs",
        "b_terminated",
        "b_discounts",
        "b_weights",
    )
    drawn = set(learned(dict(zip(columns, names["buffer"].sample(4000, 0.5)[1], strict=True))))
    expected = n_step_transitions(happened["episodes"], 3, 0.9)
    assert drawn <= expected.keys() and len(drawn) > 250
    ends, cuts = (
        sum(step[4] for step in drawn),
        sum(expected[step] < 3 and not step[4] for step in drawn),
    )
    assert ends > 20 if env_id == BREAKOUT else cuts > 6


# priorities


def test_rainbow_4_sums_are_those_of_a_plain_list(file, tmp_path):
    """However often, and to whatever, priorities are set: each sum is that of its priorities, and no rest of old ones."""

    @FUZZ
    @given(size=st.integers(10, 3000), seed=st.integers(0, 2**32))
    def check(size, seed):
        rng, replay = np.random.default_rng(seed), replay_of(file, size)
        plain, largest = np.zeros(replay.size), 1.0
        for _ in range(50):
            rows = rng.integers(size, size=rng.integers(1, 40))
            values = 10.0 ** rng.uniform(-12, 6, size)
            plain[rows] = values[rows]  # twice the same row, twice the same value
            replay.prioritize(rows, values[rows])
            largest = max(largest, *values[rows])
        np.testing.assert_array_equal(leaves(replay), plain)
        assert (
            replay.tree[0] == pytest.approx(plain.sum(), rel=1e-12) and replay.largest[0] == largest
        )
        level, nodes = (
            np.pad(plain, (0, len(replay.tree) - replay.first_leaf - size)),
            replay.first_leaf,
        )
        while len(level) > 1:
            level, nodes = level.reshape(-1, 32).sum(1), (nodes - 1) // 32
            np.testing.assert_allclose(
                replay.tree[nodes : nodes + len(level)], level, rtol=1e-12, atol=0
            )
        replay.prioritize(np.flatnonzero(plain), 0.0)
        assert not replay.tree.any(), "no rest remains"

    check()


def test_rainbow_4_rows_are_drawn_as_often_as_their_priorities_say(file, tmp_path):
    replay, rng = replay_of(file, 1500), np.random.default_rng(1)
    torch.manual_seed(1)
    priorities = rng.exponential(size=1500) * (rng.random(1500) < 0.8)
    replay.prioritize(np.arange(1500), priorities)
    counts = np.bincount(np.concatenate([replay.draw(64) for _ in range(2000)]), minlength=1500)
    assert counts.sum() == 128_000 and not counts[priorities == 0].any()
    expected = (128_000 * priorities / priorities.sum())[priorities > 0]
    errors, usual = counts[priorities > 0] - expected, np.sqrt(expected * (1 - expected / 128_000))
    assert (np.abs(errors) < 5 * usual + 1).all() and (errors**2).sum() < 1.1 * (usual**2).sum()
    replay.prioritize(np.arange(1500), np.where(np.arange(1500) < 64, 0.3, 0.0))
    assert all(sorted(replay.draw(64)) == list(range(64)) for _ in range(20)), (
        "one from each of 64 equal parts"
    )


def test_rainbow_4_what_has_no_priority_is_never_drawn(file, tmp_path, monkeypatch):
    """Not even where the sums are rounded, at the very ends of the range, and with priorities of all sizes."""
    rng, real = np.random.default_rng(1), torch.rand
    for extreme in (0.0, 1 - 2.0**-53, None):
        with monkeypatch.context() as patch:
            if extreme is not None:
                patch.setattr(
                    torch,
                    "rand",
                    lambda *shape, extreme=extreme, **kw: torch.full_like(
                        real(*shape, **kw), extreme
                    ),
                )
            for _ in range(100):
                replay, size = replay_of(file, 1200), rng.integers(1, 1200)
                priorities = np.zeros(1200)
                priorities[rng.choice(1200, size, replace=False)] = 10.0 ** rng.uniform(
                    -300, 12, size
                )
                replay.prioritize(np.arange(1200), priorities)
                assert (priorities[replay.draw(37)] > 0).all()


def test_rainbow_4_new_rows_have_the_largest_priority_so_far(file, tmp_path):
    """Whatever was set since: a row keeps its priority until its stack is overwritten, a new one gets the largest ever set."""

    @FUZZ
    @given(**N_SHAPES, seed=st.integers(0, 2**32))
    def check(num_envs, rows, more, turns, n_step, seed):
        rng = random.Random(seed)
        steps, happened = made_up_steps(
            rng, num_envs, n_step + 1 + int(turns * rows), *small_frames(rng)
        )
        replay, plain, largest = (
            replay_of(file, num_envs * rows + more % num_envs, num_envs, n_step=n_step),
            {},
            1.0,
        )
        for t, step in enumerate(steps):
            fill(replay, [step])
            new = [
                number
                for number in range((t - n_step) * num_envs, (t - n_step + 1) * num_envs)
                if number in happened
            ]
            plain |= dict.fromkeys(new, largest)
            plain = {
                number: value
                for number, value in plain.items()
                if number >= (t - rows + 4) * num_envs
            }
            got = {
                int(numbers_of(replay, row)): leaves(replay)[row]
                for row in np.flatnonzero(leaves(replay))
            }
            assert got == plain
            if plain and rng.random() < 0.5:
                chosen = rng.sample(sorted(plain), rng.randint(1, len(plain)))
                plain |= {number: rng.uniform(0.1, 3) for number in chosen}
                replay.prioritize(
                    np.array(chosen) % replay.size, np.array([plain[number] for number in chosen])
                )
                largest = max([largest, *plain.values()])

    check()


def test_rainbow_5_weights_make_up_for_the_priorities(file, tmp_path):
    """(size * probability) ** -beta, over the largest in the batch: with beta 1, means of what is drawn are those of all."""
    replay, rng = replay_of(file, 200), np.random.default_rng(1)
    torch.manual_seed(1)
    for t in range(150):
        reward = np.array([t % 7], np.float32)
        replay.add(
            np.ones((1, 2, 2), np.uint8),
            np.ones((1, 4), bool),
            np.array([t == 0]),
            np.zeros(1, int),
            reward,
            np.zeros(1, bool),
        )
    started = np.flatnonzero(leaves(replay))
    assert len(started) == 149
    replay.prioritize(started, rng.uniform(0.1, 4, 149))
    chances = leaves(replay) / leaves(replay).sum()
    for beta in (0.0, 0.4, 1.0):
        rows, (*_, weights) = replay.sample(64, beta)
        expected = [(149 * chances[row]) ** -beta for row in rows]
        np.testing.assert_allclose(
            weights, [weight / max(expected) for weight in expected], rtol=1e-6
        )
        assert (
            weights.max() == 1
            and weights.dtype == torch.float32
            and (weights.min() < 0.7 or beta == 0)
        )
    drawn, weights = (
        torch.cat(x)
        for x in zip(*(replay.sample(1000, 1.0)[1][2::4] for _ in range(50)), strict=True)
    )
    plain = replay.columns[4][started].mean()
    assert (drawn * weights).sum() / weights.sum() == pytest.approx(plain, abs=0.05)
    assert replay.draw(1).shape == (1,)


def test_rainbow_5_beta_rises_to_1(file, tmp_path):
    seen = {}
    flags = (
        *SMALL,
        "--env-id",
        probe(file, "RandomEnds"),
        "--num-envs",
        2,
        "--train-frequency",
        2,
        "--learning-starts",
        180,
    )
    flags = (*flags, "--total-timesteps", 240, "--prioritized-replay-beta", 0.6, "--batch-size", 4)
    names = train(
        file,
        tmp_path,
        *flags,
        on_update=lambda names: seen.update({names["global_step"]: names["beta"]}),
    )
    assert (
        seen == pytest.approx({step: 0.6 + 0.4 * step / 240 for step in range(180, 241, 2)})
        and names["beta"] == 1
    )
    assert scalars(only_run(tmp_path))["charts/beta"] == [
        (200, pytest.approx(0.6 + 0.4 * 200 / 240))
    ]


# learning


@pytest.mark.parametrize(("n_step", "alpha"), [(3, 0.5), (1, 1.0)])
def test_rainbow_6_one_update_by_the_book(file, tmp_path, monkeypatch, n_step, alpha):
    """From what was drawn, the noise, and the networks as they were before it: the gradient that reaches the optimizer is that
    of the weighted cross-entropy to a target whose action the network chose and the target network valued, row by row, left to
    autograd; and what was drawn has the priority that its divergence from the target gives it."""
    listener, chosen, priorities, weighed = Listener(monkeypatch), [], {}, []

    def check_priorities(names):
        for row, divergence in priorities.items():
            assert leaves(names["buffer"])[row] == pytest.approx(
                (divergence + 0.01) ** alpha, rel=1e-3, abs=1e-4
            )

    def look(names):
        network, target_network, atoms = (
            copy.deepcopy(names["q_network"]),
            names["target_network"],
            names["atoms"].tolist(),
        )
        check_priorities(names)  # of the update before
        priorities.clear()
        drawn = listener.drawn[
            -12:
        ]  # in each call of a network: for the value's two layers, then for the advantages'
        online, target, taken = drawn[:4], drawn[4:8], drawn[8:]
        with torch.no_grad():
            online = by_hand(network, names["b_next_obs"], online).softmax(-1).tolist()
            target = by_hand(target_network, names["b_next_obs"], target).softmax(-1).tolist()
        log_pmfs, losses = by_hand(network, names["b_obs"], taken).log_softmax(-1), []
        for row, (reward, discount, end) in enumerate(
            zip(
                *(names[name].tolist() for name in ("b_rewards", "b_discounts", "b_terminated")),
                strict=True,
            )
        ):
            best = int(np.argmax(means(online[row], atoms)))
            returns = [reward + discount * atom * (not end) for atom in atoms]
            pmf = projected(target[row][best], returns, atoms)
            log_pmf = log_pmfs[row, int(names["b_actions"][row])]
            entropy = -sum(p * math.log(p) for p in pmf if p > 0)
            cross_entropy = -sum(p * log_p for p, log_p in zip(pmf, log_pmf, strict=True))
            losses.append(float(names["b_weights"][row]) * cross_entropy)
            priorities[int(names["rows"][row])] = max(0.0, cross_entropy.item() - entropy)
            chosen.append(best == int(np.argmax(means(target[row], atoms))))
        weighed.extend(names["b_weights"].tolist())
        loss = sum(losses) / len(losses)
        expected = torch.autograd.grad(loss, list(network.parameters()))
        torch.testing.assert_close(
            flat_grad(names["q_network"]),
            torch.cat([g.flatten() for g in expected]),
            atol=1e-5,
            rtol=1e-3,
        )
        assert names["td_loss"].item() == pytest.approx(loss.item(), rel=1e-4)

    flags = (*SMALL, "--total-timesteps", 150, "--buffer-size", 300, "--train-frequency", 10)
    flags = (
        *flags,
        "--target-network-frequency",
        1000,
        "--n-atoms",
        7,
        "--v-min",
        -2,
        "--v-max",
        2,
        "--n-step",
        n_step,
    )
    flags = (*flags, "--prioritized-replay-alpha", alpha, "--prioritized-replay-eps", 0.01)
    names = train(file, tmp_path, "--env-id", probe(file, "RandomEnds"), *flags, on_update=look)
    check_priorities(names)
    assert len(chosen) == 10 * 16 and 5 < sum(chosen) < 155, "they must disagree at times"
    assert 1 in weighed and min(weighed) < 0.9


def test_rainbow_7_adam_epsilon(file, tmp_path):
    """Adam's first step is lr * g / (|g| + eps): how it differs from lr * sign(g) tells the epsilon, 1.5e-4."""
    seen = []

    def look(names):
        seen.append((copy.deepcopy(names["q_network"]), flat_grad(names["q_network"])))

    train(
        file,
        tmp_path,
        *SMALL,
        "--env-id",
        probe(file, "RandomEnds"),
        "--total-timesteps",
        66,
        on_update=look,
    )
    (before, grad), (after, _) = seen
    step = torch.cat(
        [(b - a).flatten() for b, a in zip(before.parameters(), after.parameters(), strict=True)]
    )
    torch.testing.assert_close(step, 0.001 * grad / (grad.abs() + 1.5e-4), atol=2e-7, rtol=0)
    assert (grad.abs() < 1.5e-4).float().mean() > 0.1, "it must matter"


@pytest.mark.parametrize(
    ("num_envs", "train_frequency", "learning_starts"),
    [(1, 4, 4), (1, 1, 40), (3, 4, 20), (4, 10, 33), (8, 3, 40)],
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
    ends = [
        step + -step % num_envs
        for step in range(train_frequency, 63 - 63 % num_envs + 1, train_frequency)
    ]
    assert seen == [step for step in ends if step >= learning_starts] and len(seen) >= 3


def test_dqn_3_actions_are_the_networks_best_with_its_noise(file, tmp_path, monkeypatch):
    """Of the four draws before each step; without noise they would be others at times."""
    happened, listener, taken = chronicle(monkeypatch), Listener(monkeypatch), []

    def look(names):
        witness = names["envs"]
        while not isinstance(witness, Witness):
            witness = witness.env
        obs = torch.from_numpy(witness.obs_before)
        with torch.no_grad():
            best = (
                by_hand(names["q_network"], obs, listener.drawn[-16:-12]).softmax(-1)
                @ names["atoms"]
            ).argmax(1)
        np.testing.assert_array_equal(witness.actions, best)
        taken.extend(zip(best.tolist(), quiet_values(names, obs).argmax(1).tolist(), strict=True))

    flags = (*SMALL, "--train-frequency", 3, "--total-timesteps", 150)
    train(file, tmp_path, "--env-id", probe(file, "ActionAndObsMatter"), *flags, on_update=look)
    assert len(taken) == 93 and 3 < sum(best != quiet for best, quiet in taken) < 80 and happened


def test_dqn_3_so_many_actions_are_random(file, tmp_path):
    """None unless it is asked for; with a chance that falls from 1 to 0.5 in the first half of the steps, in the end every
    fourth action is the one that the network, here without noise, would not take."""
    source = file.read_text().replace("0.5 / inputs**0.5", "0.0")
    (tmp_path / "rainbow_atari.py").write_text(source)
    flags = (
        "--env-id",
        probe(file, "ConstantValue"),
        "--num-envs",
        8,
        "--learning-starts",
        10**6,
        "--total-timesteps",
        4000,
    )
    quiet = train(tmp_path / "rainbow_atari.py", tmp_path / "quiet", *flags, "--buffer-size", 4000)[
        "buffer"
    ].actions
    best, actions = quiet[0], quiet.reshape(-1, 2, 8)[:, 0]  # every second step only resets
    assert (actions == best).all()
    flags = (
        *flags,
        "--start-e",
        1,
        "--end-e",
        0.5,
        "--exploration-fraction",
        0.5,
        "--buffer-size",
        4000,
    )
    actions = train(tmp_path / "rainbow_atari.py", tmp_path / "random", *flags)[
        "buffer"
    ].actions.reshape(-1, 2, 8)[:, 0]
    others = (actions != best).float()
    assert others[:50].mean().item() == pytest.approx(0.45, abs=0.1)
    assert others[125:].mean().item() == pytest.approx(0.25, abs=0.06)


def test_metrics(file, tmp_path):
    seen = {}

    def look(names):
        values = (names["log_pmfs"].detach().exp() * names["atoms"]).sum(-1)
        seen[names["global_step"]] = values.mean().item(), names["td_loss"].item()

    flags = ("--env-id", probe(file, "RandomEnds"), *SMALL, "--train-frequency", 1, "--num-envs", 1)
    train(file, tmp_path, *flags, "--total-timesteps", 110, on_update=look)
    logged = scalars(only_run(tmp_path))
    assert logged.keys() == {
        *(f"charts/{name}" for name in ("episodic_return", "episodic_length", "SPS", "beta")),
        *("losses/td_loss", "losses/q_values"),
    }
    assert logged["losses/q_values"] == [(100, pytest.approx(seen[100][0], rel=1e-4))]
    assert logged["losses/td_loss"] == [(100, pytest.approx(seen[100][1], rel=1e-4))]


def test_priorities_are_kept_with_the_buffer(file, tmp_path):
    """A resumed run starts with those of the checkpoint; what is new since then has the largest of before."""
    flags = (
        "--env-id",
        probe(file, "RandomEnds"),
        *SMALL,
        "--total-timesteps",
        120,
        "--checkpoint-interval",
        90,
    )
    run, first = interrupted(file, tmp_path, *flags, "--checkpoint-buffer", step=96), []
    saved = read_checkpoint(run)["buffer"]
    train(
        file,
        tmp_path,
        "--resume",
        run,
        on_update=lambda names: first.append(leaves(names["buffer"]).copy()),
    )
    before, after = saved["priorities"].numpy()[-1024:][:150], first[0]
    assert len(first) == 5 and (before > 0).sum() > 40 and len(set(before)) > 20
    np.testing.assert_array_equal(after[before > 0], before[before > 0])
    new = after[(before == 0) & (after > 0)]
    assert len(new) > 0 and (new == saved["max_priority"].item()).all()


# known answers


PROBE_FLAGS = (
    "--num-envs",
    4,
    "--learning-starts",
    32,
    "--train-frequency",
    4,
    "--learning-rate",
    0.001,
    "--gamma",
    0.5,
)
PROBE_FLAGS = (
    *PROBE_FLAGS,
    "--batch-size",
    16,
    "--target-network-frequency",
    16,
    "--buffer-size",
    800,
)
PROBE_FLAGS = (*PROBE_FLAGS, "--v-min", -3, "--v-max", 3, "--n-atoms", 31)
BOTH_ACTIONS = ("--start-e", 1, "--end-e", 1)  # all the time: there is a value to learn for each


@pytest.mark.parametrize(
    ("name", "steps", "values"),
    [
        ("Discounting", 400, {(0,): 0.5, (0, 1): 1}),
        ("ThreeLives", 400, {(0,): 1.5, (0, 0.5): 1}),
        pytest.param("LateEnds", 1200, {(-0.5,) * 4: 1, (0.5,) * 4: 2}, marks=pytest.mark.slow),
    ],
)
def test_values_of_probes(file, tmp_path, name, steps, values):
    """The reward comes at the second step; the value ends with a life, but not with a cut."""
    names = train(
        file,
        tmp_path,
        "--env-id",
        probe(file, name),
        *PROBE_FLAGS,
        *BOTH_ACTIONS,
        "--total-timesteps",
        steps,
    )
    expected = torch.tensor([[value, value] for value in values.values()]).float()
    torch.testing.assert_close(
        quiet_values(names, images_of(list(values))), expected, atol=0.25, rtol=0
    )


def test_actions_of_probes(file, tmp_path):
    """Learned with no other exploration than the noise; acting through load_policy in fresh environments."""
    flags = ("--env-id", probe(file, "ActionAndObsMatter"), *PROBE_FLAGS, "--total-timesteps", 400)
    names = train(file, tmp_path, *flags)
    assert play(names, only_run(tmp_path), games=40) == [1] * 40


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_learns_to_look_back(file, tmp_path, seed):
    """The reward of the third step is for the action that the first image told."""
    flags = (
        "--env-id",
        probe(file, "ShortRecall"),
        *PROBE_FLAGS,
        "--gamma",
        0.9,
        "--total-timesteps",
        2400,
        "--seed",
        seed,
    )
    names = train(file, tmp_path, *flags)
    assert np.mean(play(names, only_run(tmp_path), games=80)) >= 0.9
