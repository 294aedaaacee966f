"""cleanrl/rainbow_atari.py. test_rainbow_N guards detail N of docs/rl-algorithms/rainbow.md.

test_dqn_N and test_frames_N guard those of dqn.md, test_c51_N of c51.md, test_atari_N of ppo.md;
some are those of the files where that comes from.
"""

import copy
import functools
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

from tests.harness import flat_grad, only_run, probe, read_checkpoint, scalars, train
from tests.test_c51 import (  # noqa: F401  the imported tests run here on this file
    means,
    projected,
    test_c51_2_by_hand,
    test_c51_2_projection_matches_a_loop_over_the_atoms,
)
from tests.test_dqn import Witness, interrupted
from tests.test_dqn_atari import (  # noqa: F401
    BREAKOUT,
    CPU,
    FUZZ,
    PONG,
    PROBE_FLAGS,
    SHAPES,
    SMALL,
    fill,
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

FEW_ATOMS = ("--v-min", -3, "--v-max", 3, "--n-atoms", 31)
BOTH_ACTIONS = ("--start-e", 1, "--end-e", 1)  # all the time: there is a value to learn for each
NO_EXPLORING = ("--start-e", 0, "--end-e", 0)  # but that of the noise
names_of = functools.cache(runpy.run_path)


def spaces(num_actions=6, shape=(4, 84, 84), num_envs=1):
    """What networks and buffers ask of environments."""
    return SimpleNamespace(
        num_envs=num_envs,
        single_observation_space=gym.spaces.Box(0, 255, shape, np.uint8),
        single_action_space=gym.spaces.Discrete(num_actions),
    )


def replay_of(file, size, num_envs=1, shape=(4, 2, 2), n_step=1, gamma=0.5):
    envs = spaces(shape=shape, num_envs=num_envs)
    return names_of(str(file))["ReplayBuffer"](size, envs, n_step, gamma)


def leaves(replay):
    """The priorities of all rows."""
    return replay.tree.nodes[replay.tree.first_leaf :][: replay.size]


def quiet_values(names, obs):
    """The network's values of all actions, without its noise."""
    with torch.no_grad():
        return copy.deepcopy(names["q_network"]).eval().q_values(obs)


# the noise


def noise_of(layer):
    """The noise of one call: of each weight and of each bias, in units of its scale."""
    inputs = torch.cat([torch.zeros(1, layer.in_features), torch.eye(layer.in_features)])
    with torch.no_grad():
        bias, *weights = layer(inputs).double()
        weights = (torch.stack(weights, 1) - bias[:, None] - layer.weight) / layer.weight_sigma
        return weights, (bias - layer.bias) / layer.bias_sigma


def test_rainbow_1_noise_is_factorized(file, tmp_path):
    """A weight's is the product of its input's and its output's, which is the bias's.

    Each is sign(x) sqrt(|x|) of a Gaussian x. Means are uniform within 1 / sqrt(inputs), scales are
    0.5 / sqrt(inputs).
    """
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
    assert values.mean().abs() < 4 / 7000**0.5
    assert (values.square().mean() - 1).abs() < 4 * (2 / 7000) ** 0.5
    share_within_1 = (values.abs() < 1).double().mean().item()
    assert share_within_1 == pytest.approx(0.683, abs=0.025), "as a Gaussian's"
    assert (values.T.corrcoef() - torch.eye(70)).abs().max() < 0.6, "each has its own"
    assert (values.corrcoef() - torch.eye(100)).abs().max() < 0.65, "new in each call"


class Listener:
    """Notes what torch.randn has drawn."""

    def __init__(self, monkeypatch):
        self.drawn, real = [], torch.randn

        def randn(*shape, **options):
            self.drawn.append(real(*shape, **options))
            return self.drawn[-1]

        monkeypatch.setattr(torch, "randn", randn)


def test_rainbow_1_noise_is_new_for_acting_learning_and_the_target(file, tmp_path, monkeypatch):
    """Four noisy layers: four draws for each step, twelve for each update.

    Those are for what was done, for the choice of what comes next, and for the target.
    """
    listener, counts = Listener(monkeypatch), []

    def look(names):
        counts.append(len(listener.drawn))

    env_id = probe(file, "RandomEnds")
    flags = (*SMALL, "--total-timesteps", 90)
    names = train(file, tmp_path, "--env-id", env_id, *flags, on_update=look)
    for update, step in enumerate(range(60, 91, 6)):
        assert counts[update] == 4 * step // 3 + 12 * (update + 1)
    assert len(counts) == 6
    assert names["q_network"].training and names["target_network"].training
    assert len({x.sum().item() for x in listener.drawn}) == len(listener.drawn), "none twice"


def test_rainbow_1_evaluation_is_without_noise(file, tmp_path):
    """A loaded policy takes the best actions by the mean weights, whatever the noise's scale."""
    torch.manual_seed(1)
    names, envs = runpy.run_path(str(file)), spaces()
    network = names["QNetwork"](envs, torch.linspace(-1, 1, 5))
    obs = torch.randint(256, (50, 4, 84, 84), dtype=torch.uint8)
    with torch.no_grad():
        noisy = [network.q_values(obs).argmax(1) for _ in range(3)]
        logits = torch.cat([by_hand(network, one[None], [0.0] * 4) for one in obs])
        expected = (logits.softmax(-1) @ network.atoms).argmax(1)
    assert not torch.equal(noisy[0], noisy[1]) and not torch.equal(noisy[1], noisy[2])
    louder = {name: 9 * x if "sigma" in name else x for name, x in network.state_dict().items()}
    for weights in (network.state_dict(), louder):
        policy = names["load_policy"]({"q_network": weights}, envs)
        for _ in range(2):
            np.testing.assert_array_equal(policy(obs.numpy(), np.zeros(50, bool)), expected)
    assert len(set(expected.tolist())) > 1


def test_rainbow_1_the_scales_of_the_noise_are_learned(file, tmp_path):
    flags = ("--env-id", probe(file, "RandomEnds"), *SMALL, "--total-timesteps", 90)
    network = train(file, tmp_path, *flags)["q_network"]
    layers = network.value_hidden, network.values, network.advantage_hidden, network.advantages
    for layer in layers:
        start = 0.5 / layer.in_features**0.5
        assert (layer.weight_sigma != start).float().mean() > 0.1
        assert (layer.bias_sigma != start).float().mean() > 0.1


# the network


def by_hand(network, obs, noises):
    """The logits of all atoms, with the noise written into the weights, and the sum in loops.

    noises has for each of the four noisy layers what was drawn, or a number for all of it.
    """

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
    hidden = torch.relu(linear(network.value_hidden, x, noises[0]))
    value = linear(network.values, hidden, noises[1])
    hidden = torch.relu(linear(network.advantage_hidden, x, noises[2]))
    advantages = linear(network.advantages, hidden, noises[3]).split(len(network.atoms), 1)
    mean = sum(advantages) / len(advantages)
    return torch.stack([value + advantage - mean for advantage in advantages], 1)


def test_rainbow_2_values_and_advantages(file, tmp_path):
    """Logits are value + advantage - the mean advantage of all actions at that atom."""
    torch.manual_seed(1)
    network = runpy.run_path(str(file))["QNetwork"](spaces(), torch.arange(5.0)).eval()
    obs = torch.randint(256, (7, 4, 84, 84), dtype=torch.uint8)
    shift = torch.tensor([1.0, -2, 3, 0, 5])
    with torch.no_grad():
        expected, before = by_hand(network, obs, [0.0] * 4).log_softmax(-1), network(obs)
        torch.testing.assert_close(before, expected, atol=1e-5, rtol=0)
        torch.testing.assert_close(network.q_values(obs), before.exp() @ torch.arange(5.0))
        network.advantages.bias.add_(shift.repeat(6))  # as much for each action: no difference
        torch.testing.assert_close(network(obs), before, atol=1e-5, rtol=0)
        network.values.bias.add_(shift)  # what is common to all is the value's to say
        assert (network(obs) - before).abs().max() > 1


def test_atari_8_the_nature_cnn(file, tmp_path):
    """And from there two streams, one for the value and one for the advantages."""
    network = runpy.run_path(str(file))["QNetwork"](spaces(), torch.arange(5.0))
    layers = [layer for layer in network.modules() if hasattr(layer, "weight")]
    convolutions = [(32, 4, 8, 8), (64, 32, 4, 4), (64, 64, 3, 3)]
    noisy = [(512, 3136), (512, 3136), (5, 512), (30, 512)]
    assert [tuple(layer.weight.shape) for layer in layers] == convolutions + noisy
    assert [layer.stride for layer in layers[:3]] == [(4, 4), (2, 2), (1, 1)]
    assert [tuple(layer.weight_sigma.shape) for layer in layers[3:]] == noisy


# the ring of frames, and returns over n steps


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_frames_1_every_frame_is_kept_once(file, tmp_path):
    """A million steps and priorities in 7.1 GB, of which none is taken before it is needed."""

    def resident():
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def size_of(replay):
        return sum(x.numel() * x.element_size() for x in replay.buffers())

    small = replay_of(file, 1000, 8, (4, 84, 84), n_step=3)
    assert size_of(small) < 7100 * 1000
    gc.collect()
    before = resident()
    replay = replay_of(file, 1_000_000, 8, (4, 84, 84), n_step=3)
    assert size_of(replay) < 7100 * 1_000_000
    assert resident() - before < 50e6, "an empty one takes next to nothing"
    stacks = np.random.default_rng(1).integers(1, 256, (8, 4, 84, 84), np.uint8)
    none = np.zeros(8, bool)
    step = dict(obs=stacks, is_first=none, actions=none, rewards=none, terminated=none)
    before = resident()
    fill(replay, [step] * (20_000 // 8))
    assert 7056 <= (resident() - before) / 20_000 < 7400


def followed(happened, number, num_envs, n_step, gamma):
    """In a loop: the return of up to n steps from one on, what they led to, whether that is the
    end, and the discount of what comes after."""
    total, discount = 0.0, 1.0
    for step in range(number, number + n_step * num_envs, num_envs):
        if step not in happened:  # it only reset, or nobody knows what it led to
            break
        total, discount = total + discount * step, discount * gamma  # rewards number the steps
        _, _, next_obs, terminated = happened[step]
    return total, next_obs, terminated, discount


def numbers_of(replay, rows):
    """The numbers of the newest steps that these rows were written with."""
    newest = replay.num_added - 1
    return newest - (newest - rows) % replay.size


N_SHAPES = SHAPES | {"rows": st.integers(12, 18), "n_step": st.integers(1, 5)}


def test_rainbow_3_returns_of_n_steps_and_of_fewer_before_an_end(file, tmp_path):
    """Against plain lists, with several environments, both ends, resumes, a ring that goes round.

    Not drawn are steps whose followers are not there yet, or whose stacks are overwritten.
    """
    lengths, gamma = set(), 0.9

    @FUZZ
    @given(**N_SHAPES, seed=st.integers(0, 2**32))
    def check(num_envs, rows, more, turns, n_step, seed):
        rng = random.Random(seed)
        count = max(n_step + 1, int(turns * rows))
        steps, happened = made_up_steps(rng, num_envs, count, *small_frames(rng))
        size = num_envs * rows + more % num_envs
        replay = replay_of(file, size, num_envs, n_step=n_step, gamma=gamma)
        fill(replay, steps)
        kept = range(max(0, len(steps) - rows + 3) * num_envs, (len(steps) - n_step) * num_envs)
        expected = {number for number in kept if number in happened}
        assert set(numbers_of(replay, np.flatnonzero(leaves(replay)))) == expected
        if not expected:
            return
        torch.manual_seed(seed)
        for count in (40 * replay.size, 1, 1, 1):
            rows_drawn, b = replay.sample(count, 0.5, CPU)
            numbers = numbers_of(replay, rows_drawn)
            assert (b["weights"] == 1).all()
            for i, number in enumerate(numbers):
                total, *rest, discount = followed(happened, number, num_envs, n_step, gamma)
                got = b["obs"][i].numpy().tobytes(), b["actions"][i]
                assert got == happened[number][:2]
                end = bool(b["terminated"][i])
                assert [b["next_obs"][i].numpy().tobytes(), end] == rest
                assert b["rewards"][i].item() == pytest.approx(total, rel=1e-5)
                assert b["discounts"][i].item() == pytest.approx(discount)
                lengths.add((n_step, round(math.log(discount) / math.log(gamma)), end))
            assert count == 1 or set(numbers) == expected

    check()
    assert {(3, length, end) for length in (1, 2, 3) for end in (True, False)} <= lengths


def one_step(t, **changes):
    """A step of one environment at time t, whose frames are 10 * (t + 1)."""
    stacks = np.full((1, 4, 2, 2), 10 * (t + 1), np.uint8)
    step = dict(is_first=[False], actions=[t], rewards=[0], terminated=[False]) | changes
    return {"obs": stacks} | {name: np.array(x) for name, x in step.items()}


def test_rainbow_3_late_starts_by_hand(file, tmp_path):
    """Rewards 1, 2, 4 and an end of either kind: starts with 3, 2 and 1 of them, halved each."""
    for terminated in (True, False):
        replay = replay_of(file, 20, n_step=3)
        for t, reward in enumerate([1, 2, 4]):
            is_end = [terminated and t == 2]
            fill(replay, [one_step(t, is_first=[t == 0], rewards=[reward], terminated=is_end)])
        fill(replay, [one_step(3)])  # only resets; its observation is the episode's last
        assert list(np.flatnonzero(leaves(replay))) == [0]
        fill(replay, [one_step(t, is_first=[t == 4], rewards=[64]) for t in range(4, 7)])
        assert list(np.flatnonzero(leaves(replay))) == [0, 1, 2]
        rows, b = replay.sample(3, 1.0, CPU)
        assert sorted(rows) == sorted(b["actions"].tolist()) == [0, 1, 2]
        order = np.argsort(rows)
        assert b["rewards"][order].tolist() == [1 + 1 + 1, 2 + 2, 4]
        assert b["discounts"][order].tolist() == [1 / 8, 1 / 4, 1 / 2]
        assert (b["next_obs"][:, -1] == 40).all() and b["terminated"].tolist() == [terminated] * 3


class Chronicle(Witness):
    """Notes the steps of each environment, episode by episode.

    A step is (obs, action, reward, next obs, terminated, time).
    """

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
            start = before[e].tobytes(), int(actions[e]), reward
            self.open[e].append((*start, self.obs[e].tobytes(), is_end, self.time))
            if self.is_over[e]:
                self.open[e] = []
                self.happened["episodes"].append(self.open[e])
        self.time += 1
        return answer


def chronicle(monkeypatch, **flags):
    """Make a file's environments with these settings and a chronicle, whose notes it returns."""
    happened, make_vec = {}, gym.make_vec

    def make(*args, **kwargs):
        return Chronicle(make_vec(*args, **kwargs, **flags), happened, np.sign)

    monkeypatch.setattr(gym, "make_vec", make)
    return happened


def n_step_transitions(episodes, n_step, gamma):
    """All starts in loops: {(obs, action, return, next obs, terminated, discount): steps}."""
    found = {}
    for episode in episodes:
        for start in range(len(episode)):
            total, discount = 0.0, 1.0
            for step in episode[start : start + n_step]:
                total, discount = total + discount * step[2], discount * gamma
            taken = len(episode[start : start + n_step])
            found[(*episode[start][:2], round(total, 3), *step[3:5], round(discount, 3))] = taken
    return found


def learned(b):
    """A batch in the same words."""
    return list(
        zip(
            [x.tobytes() for x in b["obs"].numpy()],
            b["actions"].tolist(),
            [round(x, 3) for x in b["rewards"].tolist()],
            [x.tobytes() for x in b["next_obs"].numpy()],
            b["terminated"].tolist(),
            [round(x, 3) for x in b["discounts"].tolist()],
            strict=True,
        )
    )


def test_dqn_2_only_what_happened_is_learned_from(file, tmp_path, monkeypatch):
    """Bit for bit, with ends of both kinds, a ring that went round, and a resume in the middle."""
    happened, batches = chronicle(monkeypatch), []

    def look(names):
        batches.extend(learned(names["b"]))

    env_id = probe(file, "RandomEnds")
    flags = ("--checkpoint-interval", 60, "--checkpoint-buffer")
    run = interrupted(file, tmp_path, "--env-id", env_id, *SMALL, *flags, step=180)
    for episode in happened["episodes"]:  # the checkpoint, of step 180, does not know
        episode[:] = [step for step in episode if step[-1] < 60 - 1]  # what its last row led to
    saved = len(happened["episodes"])
    train(file, tmp_path, "--resume", run, on_update=look)
    expected = n_step_transitions(happened["episodes"], 3, 0.9)
    assert len(batches) == 20 * 16 and set(batches) <= expected.keys()
    before = n_step_transitions(happened["episodes"][:saved], 3, 0.9).keys()
    assert len(set(batches) & before) > 20, "from before the resume"
    assert len(set(batches) - before) > 20, "from after it"
    kinds = {(expected[step], step[4]) for step in batches}
    assert kinds >= {(1, True), (1, False), (2, True), (2, False), (3, True), (3, False)}


@pytest.mark.parametrize(
    ("env_id", "max_steps", "steps"), [(BREAKOUT, 27_000, 750), (PONG, 60, 540)]
)
def test_frames_2_what_is_drawn_was_seen(file, tmp_path, monkeypatch, env_id, max_steps, steps):
    """On the emulator, bit for bit, with lost lives, both ends of games, a ring that went round."""
    happened = chronicle(monkeypatch, max_num_frames_per_episode=4 * max_steps)
    flags = ("--num-envs", 3, "--total-timesteps", steps, "--buffer-size", steps - 150)
    random_play = ("--start-e", 1, "--end-e", 1, "--gamma", 0.9)
    names = train(file, tmp_path, "--env-id", env_id, *flags, *random_play)
    _, b = names["buffer"].sample(4000, 0.5, CPU)
    drawn = set(learned(b))
    expected = n_step_transitions(happened["episodes"], 3, 0.9)
    assert drawn <= expected.keys() and len(drawn) > 250
    ends = sum(step[4] for step in drawn)
    cuts = sum(expected[step] < 3 and not step[4] for step in drawn)
    assert ends > 20 if env_id == BREAKOUT else cuts > 6


# priorities


def test_rainbow_4_sums_are_those_of_a_plain_list(file, tmp_path):
    """However often priorities are set: each sum is that of its parts, no rest of old ones."""

    @FUZZ
    @given(size=st.integers(10, 3000), seed=st.integers(0, 2**32))
    def check(size, seed):
        rng, replay = np.random.default_rng(seed), replay_of(file, size)
        nodes, first_leaf = replay.tree.nodes, replay.tree.first_leaf
        plain, largest = np.zeros(replay.size), 1.0
        for _ in range(50):
            rows = rng.integers(size, size=rng.integers(1, 40))
            values = 10.0 ** rng.uniform(-12, 6, size)
            plain[rows] = values[rows]  # twice the same row, twice the same value
            replay.prioritize(rows, values[rows])
            largest = max(largest, *values[rows])
        np.testing.assert_array_equal(leaves(replay), plain)
        assert nodes[0] == pytest.approx(plain.sum(), rel=1e-12)
        assert replay.max_priority.item() == largest
        level, first = np.pad(plain, (0, len(nodes) - first_leaf - size)), first_leaf
        while len(level) > 1:
            level, first = level.reshape(-1, 32).sum(1), (first - 1) // 32
            got = nodes[first : first + len(level)]
            np.testing.assert_allclose(got, level, rtol=1e-12, atol=0)
        rows = np.flatnonzero(plain)
        replay.prioritize(rows, np.zeros(len(rows)))
        assert not nodes.any(), "no rest remains"

    check()


def test_rainbow_4_rows_are_drawn_as_often_as_their_priorities_say(file, tmp_path):
    replay, rng = replay_of(file, 1500), np.random.default_rng(1)
    torch.manual_seed(1)
    priorities = rng.exponential(size=1500) * (rng.random(1500) < 0.8)
    replay.prioritize(np.arange(1500), priorities)
    drawn = np.concatenate([replay.tree.draw(64) for _ in range(2000)])
    counts = np.bincount(drawn, minlength=1500)
    assert counts.sum() == 128_000 and not counts[priorities == 0].any()
    expected = (128_000 * priorities / priorities.sum())[priorities > 0]
    errors, usual = counts[priorities > 0] - expected, np.sqrt(expected * (1 - expected / 128_000))
    assert (np.abs(errors) < 5 * usual + 1).all() and (errors**2).sum() < 1.1 * (usual**2).sum()
    replay.prioritize(np.arange(1500), np.where(np.arange(1500) < 64, 0.3, 0.0))
    for _ in range(20):  # one from each of 64 equal parts
        assert sorted(replay.tree.draw(64)) == list(range(64))


def test_rainbow_4_what_has_no_priority_is_never_drawn(file, tmp_path, monkeypatch):
    """Not even where sums are rounded, at the ends of the range, with priorities of all sizes."""
    rng, rand = np.random.default_rng(1), torch.rand

    def lowest(*shape, **kwargs):
        return torch.zeros_like(rand(*shape, **kwargs))

    def highest(*shape, **kwargs):
        return torch.full_like(rand(*shape, **kwargs), 1 - 2.0**-53)

    for draw in (lowest, highest, rand):
        monkeypatch.setattr(torch, "rand", draw)
        for _ in range(100):
            replay, size = replay_of(file, 1200), rng.integers(1, 1200)
            priorities, chosen = np.zeros(1200), rng.choice(1200, size, replace=False)
            priorities[chosen] = 10.0 ** rng.uniform(-300, 12, size)
            replay.prioritize(np.arange(1200), priorities)
            assert (priorities[replay.tree.draw(37)] > 0).all()


def test_rainbow_4_none_can_be_drawn(file, tmp_path):
    """Because each step only resets, for example: that is an error in one line."""
    replay = replay_of(file, 200)
    fill(replay, [one_step(0, is_first=[True]) for _ in range(100)])
    with pytest.raises(SystemExit, match="no transition to learn from"):
        replay.sample(32, 0.5, CPU)


def test_rainbow_4_new_rows_have_the_largest_priority_so_far(file, tmp_path):
    """A row keeps its priority until its stack is overwritten, new ones get the largest ever."""

    @FUZZ
    @given(**N_SHAPES, seed=st.integers(0, 2**32))
    def check(num_envs, rows, more, turns, n_step, seed):
        rng = random.Random(seed)
        count = n_step + 1 + int(turns * rows)
        steps, happened = made_up_steps(rng, num_envs, count, *small_frames(rng))
        replay = replay_of(file, num_envs * rows + more % num_envs, num_envs, n_step=n_step)
        plain, largest = {}, 1.0
        for t, step in enumerate(steps):
            fill(replay, [step])
            for number in range((t - n_step) * num_envs, (t - n_step + 1) * num_envs):
                if number in happened:
                    plain[number] = largest
            oldest = (t - rows + 4) * num_envs
            plain = {number: value for number, value in plain.items() if number >= oldest}
            drawable = np.flatnonzero(leaves(replay))
            got = {int(numbers_of(replay, row)): leaves(replay)[row] for row in drawable}
            assert got == plain
            if plain and rng.random() < 0.5:
                chosen = rng.sample(sorted(plain), rng.randint(1, len(plain)))
                plain |= {number: rng.uniform(0.1, 3) for number in chosen}
                values = np.array([plain[number] for number in chosen])
                replay.prioritize(np.array(chosen) % replay.size, values)
                largest = max([largest, *plain.values()])

    check()


def test_rainbow_5_weights_make_up_for_the_priorities(file, tmp_path):
    """(size * probability) ** -beta, over the largest of the batch.

    With beta 1, means of what is drawn are those of all.
    """
    replay, rng = replay_of(file, 200), np.random.default_rng(1)
    torch.manual_seed(1)
    steps = [one_step(0, is_first=[t == 0], rewards=[t % 7]) for t in range(150)]
    fill(replay, steps)
    started = np.flatnonzero(leaves(replay))
    assert len(started) == 149
    replay.prioritize(started, rng.uniform(0.1, 4, 149))
    chances = leaves(replay) / leaves(replay).sum()
    for beta in (0.0, 0.4, 1.0):
        rows, b = replay.sample(64, beta, CPU)
        weights, expected = b["weights"], (149 * chances[rows]) ** -beta
        np.testing.assert_allclose(weights, expected / expected.max(), rtol=1e-6)
        assert weights.max() == 1 and weights.dtype == torch.float32
        assert weights.min() < 0.7 or beta == 0
    batches = [replay.sample(1000, 1.0, CPU)[1] for _ in range(50)]
    drawn, weights = (torch.cat([b[name] for b in batches]) for name in ("rewards", "weights"))
    plain = replay.columns["rewards"][started].mean()
    assert (drawn * weights).sum() / weights.sum() == pytest.approx(plain, abs=0.05)
    assert replay.tree.draw(1).shape == (1,)


def test_rainbow_5_beta_rises_to_1(file, tmp_path):
    seen = {}

    def look(names):
        seen[names["global_step"]] = names["beta"]

    flags = (
        "--num-envs 2 --train-frequency 2 --learning-starts 180 --total-timesteps 240 "
        "--prioritized-replay-beta 0.6 --batch-size 4"
    ).split()
    env_id = probe(file, "RandomEnds")
    names = train(file, tmp_path, "--env-id", env_id, *SMALL, *flags, on_update=look)
    assert seen == pytest.approx({step: 0.6 + 0.4 * step / 240 for step in range(180, 241, 2)})
    assert names["beta"] == 1
    expected = pytest.approx(0.6 + 0.4 * 200 / 240)
    assert scalars(only_run(tmp_path))["charts/beta"] == [(200, expected)]


# learning


@pytest.mark.parametrize(("n_step", "alpha"), [(3, 0.5), (1, 1.0)])
def test_rainbow_6_one_update_by_the_book(file, tmp_path, monkeypatch, n_step, alpha):
    """The gradient and the new priorities, from the batch, the noise and the networks before it.

    The gradient at the optimizer is that of the weighted cross-entropy to a target whose action
    the network chose and the target network valued, row by row, by autograd; what was drawn has
    the priority that its divergence from the target gives it.
    """
    listener, chosen, priorities, weighed = Listener(monkeypatch), [], {}, []

    def check_priorities(names):
        for row, divergence in priorities.items():
            expected = pytest.approx((divergence + 0.01) ** alpha, rel=1e-3, abs=1e-4)
            assert leaves(names["buffer"])[row] == expected

    def look(names):
        b, atoms = names["b"], names["atoms"].tolist()
        network, target_network = copy.deepcopy(names["q_network"]), names["target_network"]
        check_priorities(names)  # of the update before
        priorities.clear()
        drawn = listener.drawn[-12:]  # in each call: for the value's two layers, the advantages'
        with torch.no_grad():
            online = by_hand(network, b["next_obs"], drawn[:4]).softmax(-1).tolist()
            target = by_hand(target_network, b["next_obs"], drawn[4:8]).softmax(-1).tolist()
        log_pmfs, losses = by_hand(network, b["obs"], drawn[8:]).log_softmax(-1), []
        for i, row in enumerate(names["rows"].tolist()):
            reward, discount, end = (
                b[name][i].item() for name in ("rewards", "discounts", "terminated")
            )
            best = int(np.argmax(means(online[i], atoms)))
            returns = [reward + discount * atom * (not end) for atom in atoms]
            pmf = projected(target[i][best], returns, atoms)
            log_pmf = log_pmfs[i, int(b["actions"][i])]
            entropy = -sum(p * math.log(p) for p in pmf if p > 0)
            cross_entropy = -sum(p * log_p for p, log_p in zip(pmf, log_pmf, strict=True))
            losses.append(float(b["weights"][i]) * cross_entropy)
            priorities[row] = max(0.0, cross_entropy.item() - entropy)
            chosen.append(best == int(np.argmax(means(target[i], atoms))))
        weighed.extend(b["weights"].tolist())
        loss = sum(losses) / len(losses)
        expected = torch.autograd.grad(loss, list(network.parameters()))
        expected = torch.cat([g.flatten() for g in expected])
        torch.testing.assert_close(flat_grad(names["q_network"]), expected, atol=1e-5, rtol=1e-3)
        assert names["td_loss"].item() == pytest.approx(loss.item(), rel=1e-4)

    flags = (
        "--total-timesteps 150 --buffer-size 300 --train-frequency 10 --n-atoms 7 --v-min -2 "
        "--v-max 2 --target-network-frequency 1000 --prioritized-replay-eps 0.01"
    ).split()
    flags = (*SMALL, *flags, "--n-step", n_step, "--prioritized-replay-alpha", alpha)
    names = train(file, tmp_path, "--env-id", probe(file, "RandomEnds"), *flags, on_update=look)
    check_priorities(names)
    assert len(chosen) == 10 * 16 and 5 < sum(chosen) < 155, "they must disagree at times"
    assert 1 in weighed and min(weighed) < 0.9


def test_rainbow_7_adam_epsilon(file, tmp_path):
    """1.5e-4: Adam's first step is lr * g / (|g| + eps), not lr * sign(g)."""
    seen = []

    def look(names):
        seen.append((copy.deepcopy(names["q_network"]), flat_grad(names["q_network"])))

    flags = (*SMALL, "--total-timesteps", 66)
    train(file, tmp_path, "--env-id", probe(file, "RandomEnds"), *flags, on_update=look)
    (before, grad), (after, _) = seen
    pairs = zip(before.parameters(), after.parameters(), strict=True)
    step = torch.cat([(b - a).flatten() for b, a in pairs])
    torch.testing.assert_close(step, 0.001 * grad / (grad.abs() + 1.5e-4), atol=2e-7, rtol=0)
    assert (grad.abs() < 1.5e-4).float().mean() > 0.1, "it must matter"


@pytest.mark.parametrize(
    ("num_envs", "train_frequency", "learning_starts"),
    [(1, 4, 4), (1, 1, 40), (3, 4, 20), (4, 10, 33), (8, 3, 40)],
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
    dues = range(train_frequency, 63 - 63 % num_envs + 1, train_frequency)
    ends = [step + -step % num_envs for step in dues]
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
            logits = by_hand(names["q_network"], obs, listener.drawn[-16:-12])
            best = (logits.softmax(-1) @ names["atoms"]).argmax(1)
        np.testing.assert_array_equal(witness.actions, best)
        taken.extend(zip(best.tolist(), quiet_values(names, obs).argmax(1).tolist(), strict=True))

    flags = (*SMALL, "--train-frequency", 3, "--total-timesteps", 150)
    train(file, tmp_path, "--env-id", probe(file, "ActionAndObsMatter"), *flags, on_update=look)
    assert len(taken) == 93 and 3 < sum(best != quiet for best, quiet in taken) < 80 and happened


def test_dqn_3_so_many_actions_are_random(file, tmp_path):
    """None unless it is asked for, then with a chance that falls from 1 to 0.5 in half the steps.

    In the end every fourth action is the one that the network, here without noise, would not take.
    """
    source = file.read_text()
    assert "0.5 / in_features**0.5" in source
    copied = tmp_path / "rainbow_atari.py"
    copied.write_text(source.replace("0.5 / in_features**0.5", "0.0"))
    flags = "--num-envs 8 --learning-starts 1000000 --buffer-size 2400 --total-timesteps"
    flags = ("--env-id", probe(file, "ConstantValue"), *flags.split())
    quiet = train(copied, tmp_path / "quiet", *flags, 800)["buffer"].actions[:800]
    best, actions = quiet[0], quiet.reshape(-1, 2, 8)[:, 0]  # every second step only resets
    assert (actions == best).all()
    flags = (*flags, 2400, "--start-e", 1, "--end-e", 0.5, "--exploration-fraction", 0.5)
    actions = train(copied, tmp_path / "random", *flags)["buffer"].actions
    others = (actions.reshape(-1, 2, 8)[:, 0] != best).float()
    assert others[:30].mean().item() == pytest.approx(0.45, abs=0.1)
    assert others[75:].mean().item() == pytest.approx(0.25, abs=0.06)


def test_metrics(file, tmp_path):
    seen = {}

    def look(names):
        values = (names["log_pmfs"].detach().exp() * names["atoms"]).sum(-1)
        seen[names["global_step"]] = values.mean().item(), names["td_loss"].item()

    flags = ("--train-frequency", 1, "--num-envs", 1, "--total-timesteps", 110)
    train(file, tmp_path, "--env-id", probe(file, "RandomEnds"), *SMALL, *flags, on_update=look)
    logged = scalars(only_run(tmp_path))
    charts = {"charts/episodic_return", "charts/episodic_length", "charts/SPS", "charts/beta"}
    assert logged.keys() == charts | {"losses/td_loss", "losses/q_values"}
    assert logged["losses/q_values"] == [(100, pytest.approx(seen[100][0], rel=1e-4))]
    assert logged["losses/td_loss"] == [(100, pytest.approx(seen[100][1], rel=1e-4))]


def test_priorities_are_kept_with_the_buffer(file, tmp_path):
    """A resumed run starts with those of the checkpoint; new ones have the largest of before."""
    first = []

    def look(names):
        first.append(leaves(names["buffer"]).copy())

    flags = ("--total-timesteps", 120, "--checkpoint-interval", 90, "--checkpoint-buffer")
    env_id = probe(file, "RandomEnds")
    run = interrupted(file, tmp_path, "--env-id", env_id, *SMALL, *flags, step=96)
    saved = read_checkpoint(run)["buffer"]
    train(file, tmp_path, "--resume", run, on_update=look)
    before, after = saved["priorities"].numpy()[-1024:][:150], first[0]
    assert len(first) == 5 and (before > 0).sum() > 40 and len(set(before)) > 20
    np.testing.assert_array_equal(after[before > 0], before[before > 0])
    new = after[(before == 0) & (after > 0)]
    assert len(new) > 0 and (new == saved["max_priority"].item()).all()


# known answers


@pytest.mark.parametrize(
    ("name", "steps", "values"),
    [
        pytest.param("Discounting", 400, {(0,): 0.5, (0, 1): 1}, marks=pytest.mark.slow),
        # which the next one does as well: its first step is worth half of the second's value
        ("ThreeLives", 400, {(0,): 1.5, (0, 0.5): 1}),
        pytest.param("LateEnds", 1200, {(-0.5,) * 4: 1, (0.5,) * 4: 2}, marks=pytest.mark.slow),
    ],
)
def test_values_of_probes(file, tmp_path, name, steps, values):
    """The reward comes at the second step; the value ends with a life, but not with a cut."""
    flags = (*PROBE_FLAGS, *FEW_ATOMS, *BOTH_ACTIONS, "--total-timesteps", steps)
    names = train(file, tmp_path, "--env-id", probe(file, name), *flags)
    learned = quiet_values(names, images_of(list(values)))
    expected = torch.tensor([[value, value] for value in values.values()]).float()
    torch.testing.assert_close(learned, expected, atol=0.25, rtol=0)


def test_actions_of_probes(file, tmp_path):
    """Exploring by noise alone; acting through load_policy in fresh environments."""
    flags = (*PROBE_FLAGS, *FEW_ATOMS, *NO_EXPLORING, "--total-timesteps", 400)
    names = train(file, tmp_path, "--env-id", probe(file, "ActionAndObsMatter"), *flags)
    assert play(names, only_run(tmp_path), games=40) == [1] * 40


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_learns_to_look_back(file, tmp_path, seed):
    """The reward of the third step is for the action that the first image told."""
    flags = (*PROBE_FLAGS, *FEW_ATOMS, *NO_EXPLORING, "--gamma", 0.9, "--total-timesteps", 2400)
    names = train(file, tmp_path, "--env-id", probe(file, "ShortRecall"), *flags, "--seed", seed)
    assert np.mean(play(names, only_run(tmp_path), games=80)) >= 0.9
