"""cleanrl/dqn_atari.py. test_frames_N and test_dqn_N guard details of docs/rl-algorithms/dqn.md, test_atari_N of ppo.md."""

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

from tests.harness import FILES, only_run, probe, scalars, train
from tests.test_dqn import (  # noqa: F401  the imported tests run here on this file
    FUZZ,
    SHAPES,
    SMALL,
    drawn_evenly,
    few_atoms,
    made_up_steps,
    play,
    q_values,
    replay_of,
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
from tests.test_ppo_atari import (  # noqa: F401  those of the environments, as far as they are quick
    BREAKOUT,
    MS_PACMAN,
    PONG,
    images_of,
    test_a_new_game_is_not_a_lost_life,
    test_after_a_lost_life_the_action_does_not_count,
    test_atari_3_a_lost_life_ends_the_episode_but_not_the_game,
    test_atari_4_fire_starts_a_game_and_every_life,
    test_atari_5_gray_and_84_by_84,
    test_atari_7_the_last_four_frames_are_stacked,
)


@pytest.fixture
def file():
    return FILES["dqn_atari"]


# the ring of frames


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_frames_1_every_frame_is_kept_once(file, tmp_path):
    """A million steps in 7.1 GB, of which none is taken before it is needed."""

    def resident():
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    names, rng = runpy.run_path(str(file)), np.random.default_rng(1)
    assert (
        sum(x.numel() * x.element_size() for x in replay_of(names, 1000, 8, (4, 84, 84)).buffers())
        < 7100 * 1000
    )
    gc.collect()
    before = resident()
    replay = replay_of(names, 1_000_000, 8, (4, 84, 84))
    assert resident() - before < 50e6, "an empty one takes next to nothing"
    frames, none = rng.integers(1, 256, (8, 84, 84), np.uint8), np.zeros(8, bool)
    before = resident()
    for _ in range(20_000 // 8):
        replay.add(frames, np.ones((8, 4), bool), none, none, none, none)
    assert 7056 <= (resident() - before) / 20_000 < 7300


def small_frames(rng):
    """Frames of four pixels, some of them as black as what is shown before a game; how a game starts, how it goes on."""
    frame = lambda: (
        np.uint8([[rng.randrange(256) for _ in range(2)] for _ in range(2)]) * (rng.random() > 0.2)
    )  # noqa: E731
    return lambda: [np.zeros((2, 2), np.uint8)] * 3 + [frame()], lambda stack: [*stack[1:], frame()]


def fill(replay, steps):
    for obs, *step in steps:
        replay.add(obs[:, -1], obs.any((2, 3)), *step)


def test_frames_2_stacks_are_rebuilt(file, tmp_path):
    """Against plain lists, as test_dqn_1 does it; the oldest three steps lack a part of their stacks, and are not drawn."""
    names = runpy.run_path(str(file))

    @FUZZ
    @given(**SHAPES | {"rows": st.integers(8, 14)}, seed=st.integers(0, 2**32))
    def check(num_envs, rows, more, turns, seed):
        rng = random.Random(seed)
        steps, happened = made_up_steps(
            rng, num_envs, max(2, int(turns * rows)), *small_frames(rng)
        )
        size = num_envs * rows + more % num_envs
        replay = replay_of(names, size, num_envs, (4, 2, 2))
        fill(replay, steps)
        kept = range(max(0, len(steps) - rows + 3) * num_envs, (len(steps) - 1) * num_envs)
        expected = {number for number in kept if number in happened}
        if not expected:
            return
        torch.manual_seed(seed)
        for sample in [replay.sample(40 * size), *[replay.sample(1) for _ in range(5)]]:
            for stacks, action, number, terminated in zip(
                *(x.numpy() for x in sample), strict=True
            ):
                step = stacks[:4].tobytes(), action, stacks[1:].tobytes(), terminated
                assert number in expected and step == happened[int(number)]
        assert len(sample[0]) == 1 and set(replay.sample(40 * size)[2].tolist()) == expected

    check()


def test_dqn_2_every_transition_is_as_likely(file, tmp_path):
    rng, num_envs, rows = random.Random(1), 3, 30
    steps, happened = made_up_steps(rng, num_envs, 80, *small_frames(rng))
    replay = replay_of(runpy.run_path(str(file)), num_envs * rows, num_envs, (4, 2, 2))
    fill(replay, steps)
    torch.manual_seed(1)
    expected = [number for number in range(53 * num_envs, 79 * num_envs) if number in happened]
    assert drawn_evenly([replay.sample(128)[2] for _ in range(500)], expected)


@pytest.mark.parametrize(
    ("env_id", "max_steps", "steps"),
    [(BREAKOUT, 27_000, 750), (PONG, 60, 540), (MS_PACMAN, 60, 540)],
)
def test_frames_2_what_is_drawn_was_seen(file, tmp_path, monkeypatch, env_id, max_steps, steps):
    """On the emulator, bit for bit, with lost lives, games that end, games that are cut, and a ring that has gone round."""
    happened = watch(file, monkeypatch, max_num_frames_per_episode=4 * max_steps)
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
    names = train(file, tmp_path, *flags, "--start-e", 1, "--end-e", 1)  # random play
    drawn = dict(
        zip(
            ("b_stacks", "b_actions", "b_rewards", "b_terminated"),
            names["buffer"].sample(4000),
            strict=True,
        )
    )
    drawn, games = transitions(drawn), len(scalars(only_run(tmp_path))["charts/episodic_return"])
    assert set(drawn) <= happened.keys() and len(set(drawn)) > 250
    ends, cuts = (
        sum(terminated for *_, terminated in set(drawn)),
        sum(happened[step] for step in set(drawn)),
    )
    assert (ends > 10 and games > 2) if env_id == BREAKOUT else (cuts > 3 and games > 5)


# the Atari details of ppo.md, as far as this file has its own code for them


def test_atari_6_rewards_are_clipped_to_their_sign_for_learning_only(file, tmp_path):
    names = train(
        file, tmp_path, "--env-id", probe(file, "RandomEnds"), *SMALL, "--learning-starts", 1000
    )
    rewards = names["buffer"].rewards
    assert set(rewards.tolist()) == {-1, 0, 1} and 0 < (rewards == 0).float().mean() < 0.5, (
        "0 where they only reset"
    )
    returns = [value for _, value in scalars(only_run(tmp_path))["charts/episodic_return"]]
    assert len(returns) > 20 and all(value != round(value) for value in returns), (
        "what is reported is not clipped"
    )


def make_network(file):
    """The network of a file for six actions and, where it takes them, five atoms."""
    space = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)
    envs = SimpleNamespace(
        single_observation_space=space, single_action_space=gym.spaces.Discrete(6)
    )
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
PROBE_FLAGS = (
    *PROBE_FLAGS,
    "--end-e",
    1,
)  # both actions all the time: there is a value to learn for each


def test_values_of_probes(file, tmp_path):
    """The reward comes at the second step, in which the image of the first one is still to be seen."""
    flags = (*PROBE_FLAGS, *few_atoms(file), "--total-timesteps", 320)
    names = train(file, tmp_path, "--env-id", probe(file, "Discounting"), *flags)
    expected = torch.tensor([[0.5, 0.5], [1, 1]])
    torch.testing.assert_close(q_values(names, images_of([0, (0, 1)])), expected, atol=0.25, rtol=0)


def test_a_cut_is_worth_more_than_an_end(file, tmp_path):
    """C51, whose Adam is slow where gradients are small, takes too long for a test."""
    names = train(
        file, tmp_path, "--env-id", probe(file, "LateEnds"), *PROBE_FLAGS, "--total-timesteps", 640
    )
    learned = q_values(names, images_of([(-0.5,) * 4, (0.5,) * 4]))
    torch.testing.assert_close(learned, torch.tensor([[1.0, 1], [2, 2]]), atol=0.25, rtol=0)


def test_actions_of_probes(file, tmp_path):
    """Acting through load_policy in fresh environments, as every evaluation does."""
    flags = (*PROBE_FLAGS, *few_atoms(file), "--total-timesteps", 320)
    names = train(file, tmp_path, "--env-id", probe(file, "ActionAndObsMatter"), *flags)
    learned, expected = (
        q_values(names, images_of([-1, 1])),
        torch.tensor([[1.0, -1.0], [-1.0, 1.0]]),
    )
    torch.testing.assert_close(learned, expected, atol=0.25, rtol=0)
    assert play(names, only_run(tmp_path), games=40) == [1] * 40


def test_lives_are_learned_and_whole_games_reported(file, tmp_path):
    """The value ends with the life, the return with the game."""
    flags = (*PROBE_FLAGS, *few_atoms(file), "--total-timesteps", 360)
    names = train(file, tmp_path, "--env-id", probe(file, "ThreeLives"), *flags)
    expected = torch.tensor([[1.5, 1.5], [1, 1]])
    torch.testing.assert_close(
        q_values(names, images_of([0, (0, 0.5)])), expected, atol=0.25, rtol=0
    )
    logged = scalars(only_run(tmp_path))
    assert len(logged["charts/episodic_return"]) == 4 * (360 // 4 // 9)  # eight steps and a reset
    assert {
        value for _, value in logged["charts/episodic_return"] + logged["charts/episodic_length"]
    } == {8}
