"""cleanrl/dqn_atari.py. test_frames_N guards detail N of docs/rl-algorithms/dqn-atari.md.

test_dqn_N guards that of dqn.md, test_atari_N that of ppo-atari.md.
"""

import gc
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

from tests.harness import only_run, probe, scalars, train
from tests.test_dqn import (  # noqa: F401  the imported tests run here on this file
    CPU,
    FUZZ,
    SHAPES,
    SMALL,
    drawn_evenly,
    few_atoms,
    fill,
    made_up_steps,
    play,
    q_values,
    replay_of,
    test_dqn_2_few_transitions,
    test_dqn_2_only_what_happened_is_learned_from,
    test_dqn_3_other_actions_are_the_networks_best,
    test_dqn_4_a_cut_is_bootstrapped_and_an_end_is_not,
    test_dqn_5_learning_waits_for_a_buffer_that_was_not_kept,
    test_dqn_5_updates_are_counted_in_environment_steps,
    test_dqn_6_tau_moves_the_target_network_part_of_the_way,
    test_dqn_6_the_target_network_is_a_frozen_copy,
    test_metrics,
    test_same_seed_same_bits,
    transitions,
    watch,
)
from tests.test_ppo_atari import (  # noqa: F401  the quick ones of the environments
    BREAKOUT,
    MS_PACMAN,
    PONG,
    images_of,
    test_a_life_lost_to_fire_ends_no_episode,
    test_a_new_game_is_not_a_lost_life,
    test_after_a_lost_life_the_action_does_not_count,
    test_atari_3_a_lost_life_ends_the_episode_but_not_the_game,
    test_atari_4_fire_starts_a_game_and_every_life,
    test_atari_5_gray_and_84_by_84,
    test_atari_7_the_last_four_frames_are_stacked,
)

# the ring of frames


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_frames_1_every_frame_is_kept_once(file, tmp_path):
    """A million steps in 7.1 GB, of which none is taken before it is needed."""

    def resident():
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    names, rng = runpy.run_path(str(file)), np.random.default_rng(1)
    small = replay_of(names, 1000, 8, (4, 84, 84))
    assert sum(x.numel() * x.element_size() for x in small.buffers()) < 7100 * 1000
    gc.collect()
    before = resident()
    replay = replay_of(names, 1_000_000, 8, (4, 84, 84))
    assert resident() - before < 50e6, "an empty one takes next to nothing"
    stacks, none = rng.integers(1, 256, (8, 4, 84, 84), np.uint8), np.zeros(8, bool)
    step = dict(obs=stacks, is_first=none, actions=none, rewards=none, terminated=none)
    before = resident()
    fill(replay, [step] * (20_000 // 8))
    assert 7056 <= (resident() - before) / 20_000 < 7300


def small_frames(rng):
    """Frames of four pixels, some black as before a game; how a game starts, how it goes on."""

    def frame():
        pixels = [[rng.randrange(256) for _ in range(2)] for _ in range(2)]
        return np.uint8(pixels) * (rng.random() > 0.2)

    def start():
        return [np.zeros((2, 2), np.uint8)] * 3 + [frame()]

    def follow(stack):
        return [*stack[1:], frame()]

    return start, follow


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
        torch.manual_seed(seed)
        many, *single = [replay.sample(n, CPU) for n in (40 * size, 1, 1, 1, 1, 1)]
        assert {len(x) for b in single for x in b.values()} == {1}
        assert set(many["rewards"].tolist()) == expected
        for b in (many, *single):
            b = {name: x.numpy() for name, x in b.items()}
            for i, number in enumerate(b["rewards"]):
                before, after = b["obs"][i].tobytes(), b["next_obs"][i].tobytes()
                step = before, b["actions"][i], after, b["terminated"][i]
                assert number in expected and step == happened[int(number)]

    check()


def test_dqn_2_every_transition_is_as_likely(file, tmp_path):
    rng, num_envs, rows = random.Random(1), 3, 30
    steps, happened = made_up_steps(rng, num_envs, 80, *small_frames(rng))
    replay = replay_of(runpy.run_path(str(file)), num_envs * rows, num_envs, (4, 2, 2))
    fill(replay, steps)
    torch.manual_seed(1)
    expected = [number for number in range(53 * num_envs, 79 * num_envs) if number in happened]
    assert drawn_evenly([replay.sample(128, CPU)["rewards"] for _ in range(500)], expected)


@pytest.mark.parametrize(
    ("env_id", "max_steps", "steps"),
    [(BREAKOUT, 27_000, 750), (PONG, 60, 540), (MS_PACMAN, 60, 540)],
)
def test_frames_2_what_is_drawn_was_seen(file, tmp_path, monkeypatch, env_id, max_steps, steps):
    """On the emulator, bit for bit, with lost lives, both ends of games, a ring that went round."""
    happened = watch(file, monkeypatch, max_num_frames_per_episode=4 * max_steps)
    flags = ("--num-envs", 3, "--total-timesteps", steps, "--buffer-size", steps - 150)
    random_play = ("--start-e", 1, "--end-e", 1)
    names = train(file, tmp_path, "--env-id", env_id, *flags, *random_play)
    drawn = set(transitions({"b": names["buffer"].sample(4000, CPU)}))
    games = len(scalars(only_run(tmp_path))["charts/episodic_return"])
    assert drawn <= happened.keys() and len(drawn) > 250
    ends = sum(terminated for *_, terminated in drawn)
    cuts = sum(happened[step] for step in drawn)
    assert (ends > 10 and games > 2) if env_id == BREAKOUT else (cuts > 3 and games > 5)


# the Atari details of ppo.md, as far as this file has its own code for them


def test_atari_6_rewards_are_clipped_to_their_sign_for_learning_only(file, tmp_path):
    env_id = probe(file, "RandomEnds")
    names = train(file, tmp_path, "--env-id", env_id, *SMALL, "--learning-starts", 1000)
    rewards = names["buffer"].rewards
    assert set(rewards.tolist()) == {-1, 0, 1}
    assert 0 < (rewards == 0).float().mean() < 0.5, "0 where they only reset"
    returns = [value for _, value in scalars(only_run(tmp_path))["charts/episodic_return"]]
    assert len(returns) > 20
    assert all(value != round(value) for value in returns), "what is reported is not clipped"


def make_network(file):
    """The network of a file for six actions and, where it takes them, five atoms."""
    space = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)
    actions = gym.spaces.Discrete(6)
    envs = SimpleNamespace(single_observation_space=space, single_action_space=actions)
    network = runpy.run_path(str(file))["CNN" if "sac" in file.stem else "QNetwork"]
    return network(envs, *[torch.arange(5.0)] * ("c51" in file.stem))


def test_atari_8_the_nature_cnn(file, tmp_path):
    network = make_network(file)
    layers = [layer for layer in network.modules() if hasattr(layer, "weight")]
    outputs = 6 * 5 if "c51" in file.stem else 6
    shapes = [(32, 4, 8, 8), (64, 32, 4, 4), (64, 64, 3, 3), (512, 3136), (outputs, 512)]
    assert [tuple(layer.weight.shape) for layer in layers] == shapes
    assert [layer.stride for layer in layers[:3]] == [(4, 4), (2, 2), (1, 1)]


def test_atari_9_pixels_are_scaled_to_0_and_1(file, tmp_path):
    """Layer by layer, from bytes, with a rectifier after each layer but the last."""
    network, obs = make_network(file), torch.randint(256, (5, 4, 84, 84), dtype=torch.uint8)
    conv1, conv2, conv3, hidden, head = (
        layer for layer in network.modules() if hasattr(layer, "weight")
    )
    x = obs.float() / 255
    for conv, stride in ((conv1, 4), (conv2, 2), (conv3, 1)):
        x = torch.relu(torch.nn.functional.conv2d(x, conv.weight, conv.bias, stride))
    x = torch.relu(x.reshape(5, -1) @ hidden.weight.T + hidden.bias) @ head.weight.T + head.bias
    expected = torch.log_softmax(x.reshape(5, 6, 5), -1) if "c51" in file.stem else x
    torch.testing.assert_close(network(obs), expected, atol=1e-5, rtol=0)


def test_the_smallest_buffer(file, tmp_path):
    """It holds a transition at each update, also where two of three steps only reset."""
    flags = (
        "--env-id ImageProbe/DeadlyFire-v0 --learning-starts 4 --buffer-size 8 --batch-size 4 "
        "--train-frequency 1 --total-timesteps 40"
    ).split()
    updates = []

    def look(names):
        updates.append(names["global_step"])

    train(file, tmp_path, *flags, on_update=look)
    assert updates == list(range(4, 41))


# known answers


PROBE_FLAGS = (
    "--num-envs 4 --learning-starts 32 --train-frequency 4 --learning-rate 0.001 --gamma 0.5 "
    "--batch-size 16 --target-network-frequency 16 --buffer-size 800 "
    "--end-e 1"  # both actions all the time: there is a value to learn for each
).split()


def test_values_of_probes(file, tmp_path):
    """The reward comes at the second step, whose stack still has the image of the first."""
    flags = (*PROBE_FLAGS, *few_atoms(file), "--total-timesteps", 320)
    names = train(file, tmp_path, "--env-id", probe(file, "Discounting"), *flags)
    expected = torch.tensor([[0.5, 0.5], [1, 1]])
    torch.testing.assert_close(q_values(names, images_of([0, (0, 1)])), expected, atol=0.25, rtol=0)


def test_a_cut_is_worth_more_than_an_end(file, tmp_path):
    """C51, whose Adam is slow where gradients are small, takes too long for a test."""
    flags = (*PROBE_FLAGS, "--total-timesteps", 640)
    names = train(file, tmp_path, "--env-id", probe(file, "LateEnds"), *flags)
    learned = q_values(names, images_of([(-0.5,) * 4, (0.5,) * 4]))
    torch.testing.assert_close(learned, torch.tensor([[1.0, 1], [2, 2]]), atol=0.25, rtol=0)


def test_actions_of_probes(file, tmp_path):
    """Acting through load_policy in fresh environments, as every evaluation does."""
    flags = (*PROBE_FLAGS, *few_atoms(file), "--total-timesteps", 320)
    names = train(file, tmp_path, "--env-id", probe(file, "ActionAndObsMatter"), *flags)
    learned, expected = q_values(names, images_of([-1, 1])), torch.tensor([[1.0, -1], [-1, 1]])
    torch.testing.assert_close(learned, expected, atol=0.25, rtol=0)
    assert play(names, only_run(tmp_path), games=40) == [1] * 40


def test_lives_are_learned_and_whole_games_reported(file, tmp_path):
    """The value ends with the life, the return with the game."""
    flags = (*PROBE_FLAGS, *few_atoms(file), "--total-timesteps", 360)
    names = train(file, tmp_path, "--env-id", probe(file, "ThreeLives"), *flags)
    learned, expected = (
        q_values(names, images_of([0, (0, 0.5)])),
        torch.tensor([[1.5, 1.5], [1, 1]]),
    )
    torch.testing.assert_close(learned, expected, atol=0.25, rtol=0)
    logged = scalars(only_run(tmp_path))
    for name in ("charts/episodic_return", "charts/episodic_length"):
        values = [value for _, value in logged[name]]
        assert values == [8] * 4 * (360 // 4 // 9)  # eight steps and a reset
