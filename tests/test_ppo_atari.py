"""cleanrl/ppo_atari.py. test_atari_N guards Atari detail N of docs/rl-algorithms/ppo-atari.md.

tests/mutations shows that each test bites.
"""

import copy
import functools
import runpy
import subprocess
import sys
from itertools import pairwise

import ale_py
import cv2
import gymnasium as gym
import numpy as np
import pytest
import torch

from tests.harness import flat_grad, only_run, probe, scalars, train
from tests.probes import ImageProbes, Probe

BREAKOUT, PONG, MS_PACMAN, SPACE_INVADERS = (
    "BreakoutNoFrameskip-v4",
    "ALE/Pong-v5",
    "ALE/MsPacman-v5",
    "ALE/SpaceInvaders-v5",
)
ROMS = {BREAKOUT: "breakout", "ALE/Breakout-v5": "breakout", PONG: "pong", MS_PACMAN: "ms_pacman"}
ROMS = {**ROMS, SPACE_INVADERS: "space_invaders"}
SMALL = tuple(
    "--num-envs 4 --num-steps 8 --num-minibatches 2 --update-epochs 1 --total-timesteps 32".split()
)


def make_envs(file, env_id, num_envs=2, **flags):
    names = runpy.run_path(str(file))
    return names["make_envs"](names["Args"](env_id=env_id, **flags), num_envs)


class PlainGame:
    """One game on the bare emulator: all that should happen to it, written out step by step."""

    def __init__(self, env_id, max_steps):
        ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
        self.ale, self.max_steps = ale_py.ALEInterface(), max_steps
        self.ale.setFloat("repeat_action_probability", 0.0)
        self.ale.loadROM(ale_py.roms.get_rom_path(ROMS[env_id]))
        self.action_set = self.ale.getMinimalActionSet()
        self.has_fire = ale_py.Action.FIRE in self.action_set

    def look(self, screen):
        self.frames = [*self.frames[1:], cv2.resize(screen, (84, 84), interpolation=cv2.INTER_AREA)]
        return np.stack(self.frames)

    def reset(self, waited):
        """A new game after so many frames: ale_py presses FIRE first, then nothing for a while."""
        self.ale.reset_game()
        self.frames, self.score, self.steps, self.is_over, self.lost = (
            [np.zeros((84, 84), np.uint8)] * 4,
            0,
            0,
            False,
            False,
        )
        for i in range(waited):
            self.ale.act(ale_py.Action.FIRE if i == 0 and self.has_fire else ale_py.Action.NOOP)
        return self.look(self.ale.getScreenGrayscale())

    def step(self, action):
        """Observation, reward, terminated, truncated; score and length of a game that is over."""
        action = (
            self.action_set[action]
            if not self.lost
            else ale_py.Action.FIRE
            if self.has_fire
            else ale_py.Action.NOOP
        )
        lives, reward, screens = self.ale.lives(), 0, []
        for _ in range(4):
            if not self.ale.game_over():
                reward += self.ale.act(action)
                screens.append(self.ale.getScreenGrayscale())
        self.score, self.steps = self.score + reward, self.steps + 1
        terminated, truncated = self.ale.game_over(), self.steps == self.max_steps
        self.is_over = terminated or truncated
        self.lost = not self.is_over and not self.lost and 0 < self.ale.lives() < lives
        result = (self.score, self.steps) if self.is_over else (0, 0)
        if self.is_over:  # ale_py leaves out a game's last frame, and shows the last step instead
            screens = [self.screen, *screens[2:3]]
        self.screen = np.max(screens[-2:], axis=0)
        return self.look(self.screen), reward, terminated or self.lost, truncated, *result


def play(envs, env_id, steps, max_steps=None):
    """What happens to random actions in envs, and in as many plain games, step by step."""
    games = [PlainGame(env_id, max_steps) for _ in range(envs.num_envs)]
    obs, infos = envs.reset(seed=3)
    assert obs.shape == (len(games), 4, 84, 84) and obs.dtype == np.uint8
    expected = [
        game.reset(waited)
        for game, waited in zip(games, infos["episode_frame_number"], strict=True)
    ]
    history = [[(first, *[np.zeros(len(games))] * 5)] for first in (obs, np.stack(expected))]
    rng = np.random.default_rng(4)
    for _ in range(steps):
        actions = rng.integers(0, envs.single_action_space.n, len(games))
        *answer, infos = envs.step(actions)
        episode = infos.get("episode", {"r": np.zeros(len(games)), "l": np.zeros(len(games))})
        history[0].append((*answer, episode["r"], episode["l"]))
        expected = [
            (game.reset(waited), 0, False, False, 0, 0) if game.is_over else game.step(action)
            for game, action, waited in zip(
                games, actions, infos["episode_frame_number"], strict=True
            )
        ]
        history[1].append([np.stack(x) for x in zip(*expected, strict=True)])
    envs.close()
    names = ("obs", "rewards", "terminated", "truncated", "returns", "lengths")
    return [
        dict(zip(names, map(np.stack, zip(*rows, strict=True)), strict=True)) for rows in history
    ]


# the 9 Atari details


def test_atari_1_up_to_30_no_ops_start_a_game(file, tmp_path):
    envs, game = make_envs(file, MS_PACMAN), PlainGame(MS_PACMAN, None)
    envs.reset(seed=1)
    waits = set()
    for _ in range(50):
        obs, infos = envs.reset()
        waits |= {
            (int(waited), frames.tobytes())
            for waited, frames in zip(infos["episode_frame_number"], obs, strict=True)
        }
    assert {waited for waited, _ in waits} <= set(range(31)) and len(waits) > 20
    assert min(waits)[0] < 3 and max(waits)[0] > 27
    assert all(frames == game.reset(waited).tobytes() for waited, frames in waits)


def test_atari_2_four_frames_a_step_and_the_brighter_of_the_last_two(file, tmp_path):
    seen, expected = play(
        make_envs(file, BREAKOUT, num_envs=1), BREAKOUT, 12
    )  # in which the ball is at two places
    np.testing.assert_array_equal(seen["obs"], expected["obs"])


def test_atari_3_a_lost_life_ends_the_episode_but_not_the_game(file, tmp_path):
    seen, expected = play(make_envs(file, BREAKOUT), BREAKOUT, 70)
    assert expected["terminated"].sum() >= 4 and not expected["lengths"].any(), (
        "lives must be lost, but no game"
    )
    for name in ("terminated", "truncated", "obs", "lengths"):
        np.testing.assert_array_equal(seen[name], expected[name])


def test_atari_4_fire_starts_a_game_and_every_life(file, tmp_path):
    seen, expected = play(make_envs(file, BREAKOUT), BREAKOUT, 40)
    assert expected["terminated"][:35].any(), "a life must be lost, and some steps follow"
    np.testing.assert_array_equal(
        seen["obs"][:10], expected["obs"][:10], "from the start of the game"
    )
    np.testing.assert_array_equal(seen["obs"], expected["obs"], "and after a lost life")


def test_atari_5_gray_and_84_by_84(file, tmp_path):
    envs = make_envs(file, PONG, num_envs=1)
    assert envs.single_observation_space == gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)
    seen, expected = play(envs, PONG, 10)
    np.testing.assert_array_equal(seen["obs"][:, :, -1], expected["obs"][:, :, -1])


def test_atari_6_rewards_are_clipped_to_their_sign_for_learning_only(file, tmp_path):
    names = train(file, tmp_path, "--env-id", probe(file, "RandomEnds"), *SMALL)
    assert {-1, 1} <= set(names["rewards"].flatten().tolist()) <= {-1, 0, 1}
    returns = [value for _, value in scalars(only_run(tmp_path))["charts/episodic_return"]]
    assert len(returns) > 4 and all(value != round(value) for value in returns), (
        "what is reported is not clipped"
    )


def test_atari_7_the_last_four_frames_are_stacked(file, tmp_path):
    envs = make_envs(file, BREAKOUT, num_envs=1)
    obs = [envs.reset(seed=1)[0][0], *[envs.step(np.array([t % 4]))[0][0] for t in range(15)]]
    assert len({frames[-1].tobytes() for frames in obs}) == 16, "the picture must move"
    for before, after in pairwise(obs):
        assert len(after) == 4 and np.array_equal(after[:-1], before[1:]), (
            "oldest first, newest last"
        )


def test_atari_8_one_nature_cnn_for_policy_and_value(file, tmp_path):
    names = runpy.run_path(str(file))
    spaces = {"single_observation_space": gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)}
    spaces["single_action_space"] = gym.spaces.Discrete(6)
    agent = names["Agent"](type("Envs", (), spaces))
    layers = [layer for layer in agent.modules() if hasattr(layer, "weight")]
    shapes = [(32, 4, 8, 8), (64, 32, 4, 4), (64, 64, 3, 3), (512, 3136), (6, 512), (1, 512)]
    assert [tuple(layer.weight.shape) for layer in layers] == shapes
    assert [layer.stride for layer in layers[:3]] == [(4, 4), (2, 2), (1, 1)]
    for layer, gain in zip(layers, (2**0.5, 2**0.5, 2**0.5, 2**0.5, 0.01, 1.0), strict=True):
        weight = layer.weight.flatten(1)
        torch.testing.assert_close(
            weight @ weight.T, gain**2 * torch.eye(len(weight)), atol=1e-4, rtol=0
        )
        assert layer.bias.abs().max() == 0

    obs = torch.randint(256, (5, 4, 84, 84), dtype=torch.uint8)
    hidden = agent_by_hand(agent, obs)[2]
    assert hidden.shape == (5, 512) and hidden.min() == 0 < hidden.max(), (
        "a rectifier ends the shared part"
    )
    for output in (0, 1):
        agent.zero_grad()
        agent(obs)[output].square().sum().backward()
        grads = [layer.weight.grad for layer in layers[:4]]
        assert all(grad is not None and grad.abs().max() > 0 for grad in grads), (
            "both heads teach the shared part"
        )


def test_atari_9_pixels_are_scaled_to_0_and_1(file, tmp_path):
    names = train(file, tmp_path, "--env-id", probe(file, "RandomEnds"), *SMALL)
    obs = torch.randint(256, (5, 4, 84, 84), dtype=torch.uint8)
    with torch.no_grad():
        log_probs, value = names["agent"](obs)
        expected_log_probs, expected_value, _ = agent_by_hand(names["agent"], obs)
    torch.testing.assert_close(log_probs, expected_log_probs, atol=1e-5, rtol=0)
    torch.testing.assert_close(value, expected_value, atol=1e-5, rtol=0)
    assert names["b_obs"].dtype == torch.uint8, "bytes are stored"


def agent_by_hand(agent, obs):
    """Log-probabilities, values and what both heads look at, layer by layer."""
    conv1, conv2, conv3, linear, actor, critic = (
        layer for layer in agent.modules() if hasattr(layer, "weight")
    )
    x = obs.float() / 255
    for conv, stride in ((conv1, 4), (conv2, 2), (conv3, 1)):
        x = torch.relu(torch.nn.functional.conv2d(x, conv.weight, conv.bias, stride))
    x = torch.relu(x.reshape(len(x), -1) @ linear.weight.T + linear.bias)
    logits = x @ actor.weight.T + actor.bias
    return logits - logits.logsumexp(1, keepdim=True), (x @ critic.weight.T + critic.bias)[:, 0], x


# whole games


@pytest.mark.parametrize("env_id", [BREAKOUT, PONG, MS_PACMAN])
def test_games_match_a_plain_reference(file, tmp_path, monkeypatch, env_id):
    """Bit for bit, also where a game is cut short and the next one starts."""
    monkeypatch.setattr(
        gym, "make_vec", functools.partial(gym.make_vec, max_num_frames_per_episode=4 * 40)
    )
    seen, expected = play(make_envs(file, env_id), env_id, 60, max_steps=40)
    assert expected["truncated"].sum() == 2
    for name in seen:
        np.testing.assert_array_equal(seen[name], expected[name], name)


@pytest.mark.parametrize(
    ("env_id", "steps", "max_steps"), [(BREAKOUT, 200, None), (SPACE_INVADERS, 105, 100)]
)
def test_returns_match_the_emulators_score(file, tmp_path, monkeypatch, env_id, steps, max_steps):
    """Over all lives, whether the game ends or is cut short, and not clipped."""
    monkeypatch.setattr(
        gym,
        "make_vec",
        functools.partial(gym.make_vec, max_num_frames_per_episode=4 * (max_steps or 27_000)),
    )
    seen, expected = play(make_envs(file, env_id), env_id, steps, max_steps)
    assert expected["returns"].sum() > 2 and (expected["lengths"] > 0).sum() >= 2, (
        "there must be games with points"
    )
    assert env_id == BREAKOUT or expected["rewards"].max() > 1, (
        "one of them in which clipping would show"
    )
    for name in ("rewards", "returns", "lengths"):
        np.testing.assert_array_equal(seen[name], expected[name], name)


def test_classic_and_new_ids_are_the_same_game(file, tmp_path):
    histories = []
    for env_id in (BREAKOUT, "ALE/Breakout-v5"):
        envs = make_envs(file, env_id, num_envs=1)
        envs.reset(seed=1)
        histories.append([envs.step(np.array([t % 4]))[:4] for t in range(40)])
    for classic, new in zip(*histories, strict=True):
        for a, b in zip(classic, new, strict=True):
            np.testing.assert_array_equal(a, b)


def test_sticky_actions_and_full_games(file, tmp_path):
    """A step right after a pause moves the paddle in all 4 frames unless the pause sticks."""
    envs, plain = make_envs(file, BREAKOUT, sticky=True), PlainGame(BREAKOUT, None)
    assert envs.unwrapped.spec.kwargs["repeat_action_probability"] == 0.25
    plain.reset(16)
    before = plain.step(2)[0][-1, 77:80]  # the rows of the paddle
    envs.reset(seed=1)
    moved = []
    for _ in range(40):
        envs.reset()
        envs.step(np.array([0, 0]))
        obs = envs.step(np.array([2, 2]))[0]
        moved += [np.array_equal(frames[-1, 77:80], before) for frames in obs]
    assert 0.62 < np.mean(moved) < 0.88

    lost = 0
    for _ in range(60):
        lives = envs.lives
        _, _, terminated, truncated, infos = envs.step(np.array([1, 1]))
        lost += (infos["lives"] < lives).sum()
        assert not (terminated | truncated).any()
    assert lost > 1, "lives must have been lost"


@pytest.mark.parametrize(("env_id", "pressed"), [(BREAKOUT, 1), (MS_PACMAN, 0)])
def test_after_a_lost_life_the_action_does_not_count(file, tmp_path, env_id, pressed):
    """FIRE is pressed, or nothing where there is no FIRE: action 1 of Ms. Pac-Man is UP."""
    envs, sent = make_envs(file, env_id), []
    inner_step = envs.env.step
    envs.env.step = lambda actions: sent.append(actions.tolist()) or inner_step(actions)
    envs.reset(seed=1)
    envs.lives = envs.lives + np.array([1, 0])  # as if the first game had had one more
    _, _, terminated, truncated, _ = envs.step(np.array([3, 3]))
    assert terminated.tolist() == [True, False] and not truncated.any()
    for _ in range(2):
        _, _, terminated, _, _ = envs.step(np.array([3, 3]))
        assert not terminated.any(), "a life is lost once"
    assert sent == [[3, 3], [pressed, 3], [3, 3]]


def test_a_new_game_is_not_a_lost_life(file, tmp_path, monkeypatch):
    """Even with fewer lives than the truncated game had: some games give lives as prizes."""
    monkeypatch.setattr(
        gym, "make_vec", functools.partial(gym.make_vec, max_num_frames_per_episode=4)
    )
    envs = make_envs(file, MS_PACMAN, num_envs=1)
    envs.reset(seed=1)
    envs.lives = envs.lives + 1  # as if it had won one
    step = envs.env.step

    def with_a_prize(actions):
        obs, rewards, terminated, truncated, infos = step(actions)
        return obs, rewards, terminated, truncated, infos | {"lives": infos["lives"] + truncated}

    envs.env.step = with_a_prize
    assert envs.step(np.array([3]))[3].all()
    assert not envs.step(np.array([3]))[2].any()


def test_seeds_fit_the_emulators_31_bits(file, tmp_path):
    """Of this one, NumPy makes a number beyond them."""
    assert int(np.random.SeedSequence((2, 0)).generate_state(1)[0]) >= 2**31
    flags = "--num-envs 1 --num-steps 4 --num-minibatches 1 --total-timesteps 4 --seed 2".split()
    assert train(file, tmp_path, *SMALL, *flags)["global_step"] == 4


def test_the_last_output_is_the_progress_bar(file, tmp_path):
    """ale_py reports a leak, in 14 lines, if an emulator outlives the interpreter."""
    words = [sys.executable, str(file), "--env-id", BREAKOUT, *SMALL]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "leak" not in done.stderr
    assert "32.0/32.0" in done.stderr.splitlines()[-1]


def test_videos_show_the_newest_frame(file, tmp_path):
    envs = make_envs(file, BREAKOUT)
    envs.reset(seed=1)
    for _ in range(3):
        obs, *_ = envs.step(np.array([1, 2]))
    images = envs.render()
    assert (
        envs.render_mode == "rgb_array"
        and "rgb_array" in envs.metadata["render_modes"]
        and len(images) == 2
    )
    for image, frames in zip(images, obs, strict=True):
        assert image.shape == (336, 336, 3) and image.dtype == np.uint8
        enlarged = cv2.resize(frames[-1], (336, 336), interpolation=cv2.INTER_NEAREST)
        np.testing.assert_array_equal(image, np.stack([enlarged] * 3, axis=-1))


# known answers


PROBE_FLAGS = (
    *"--num-envs 4 --num-steps 8 --num-minibatches 4 --learning-rate 0.001 --gamma 0.5".split(),
    *"--ent-coef 0 --no-clip-vloss".split(),  # clipped, the value moves too slowly for a short test
)
ACTION_FLAGS = (
    *PROBE_FLAGS,
    *"--total-timesteps 384 --learning-rate 0.0005 --ent-coef 0.1".split(),
)


def images_of(histories):
    """Stacks of images, as a probe shows them after these observations; black before the first."""
    grays = [[0, 0, 0, *(127.5 * (1 + np.atleast_1d(history)))][-4:] for history in histories]
    return torch.tensor(np.array(grays).astype(np.uint8))[:, :, None, None].expand(-1, -1, 84, 84)


@pytest.mark.parametrize(
    ("name", "values"), [("ConstantValue", {0: 1}), ("LateEnds", {(-0.5,) * 4: 1, (0.5,) * 4: 2})]
)
def test_values_of_probes(file, tmp_path, name, values):
    names = train(
        file, tmp_path, "--env-id", probe(file, name), *PROBE_FLAGS, "--total-timesteps", 384
    )
    with torch.no_grad():
        learned = names["agent"](images_of(values))[1].tolist()
    assert learned == pytest.approx(list(values.values()), abs=0.25)


def test_actions_of_probes(file, tmp_path):
    """Acting through load_policy in fresh environments, as every evaluation does."""
    names = train(file, tmp_path, "--env-id", probe(file, "ActionAndObsMatter"), *ACTION_FLAGS)
    envs = names["make_envs"](names["args"], 8)
    policy = names["load_policy"](
        torch.load(only_run(tmp_path) / "checkpoint.pt", weights_only=True), envs
    )
    returns, is_last, (obs, _) = [], np.zeros(8, dtype=bool), envs.reset(seed=5)
    while len(returns) < 80:
        obs, _, terminated, truncated, infos = envs.step(policy(obs, is_last))
        is_last = terminated | truncated
        returns += list(infos["episode"]["r"][infos["_episode"]]) if "episode" in infos else []
    assert np.mean(returns) > 0.5


def test_lives_are_learned_and_whole_games_reported(file, tmp_path):
    """The value ends with the life, the return with the game; FIRE is not learned from."""
    learned_from = set()

    def look(names):
        learned_from.update(names["b_obs"][names["mb"], -1, 0, 0].tolist())

    flags = (*PROBE_FLAGS, "--total-timesteps", 512, "--learning-rate", 0.0005, "--vf-coef", 2)
    names = train(file, tmp_path, "--env-id", probe(file, "ThreeLives"), *flags, on_update=look)
    with torch.no_grad():
        values = names["agent"](images_of([0, (0, 0.5)]))[1].tolist()
    assert values == pytest.approx([1.5, 1], abs=0.25)
    assert learned_from == {127, 191}, "not from 255, the image of a lost life"
    logged = scalars(only_run(tmp_path))
    assert len(logged["charts/episodic_return"]) == 4 * (512 // 4 // 9)  # eight steps and a reset
    assert {value for _, value in logged["charts/episodic_return"]} == {8}
    assert {value for _, value in logged["charts/episodic_length"]} == {8}


class DeadlyFire(Probe):
    """Every step costs a life, also the one that presses FIRE."""

    length = 4

    def observe(self):
        self.lives = 4 - self.t
        return np.zeros(1, np.float32)


if "ImageProbe/DeadlyFire-v0" not in gym.registry:
    entry_point = functools.partial(ImageProbes, DeadlyFire)
    gym.register("ImageProbe/DeadlyFire-v0", vector_entry_point=entry_point)


def test_a_life_lost_to_fire_ends_no_episode(file, tmp_path):
    envs = make_envs(file, "ImageProbe/DeadlyFire-v0", num_envs=1)
    envs.reset(seed=1)
    ends = [envs.step(np.array([0]))[2].item() for _ in range(10)]
    assert ends == [True, False, True, True, False] * 2, "the fourth step is the end of the game"


def test_no_minibatch_is_empty(file, tmp_path):
    """With as many minibatches as the file allows, where two of three steps only reset."""
    flags = "--env-id ImageProbe/DeadlyFire-v0 --num-envs 2 --update-epochs 1".split()
    flags = (*flags, "--total-timesteps", 60, "--num-steps")
    sizes = []

    def look(names):
        sizes.append(len(names["mb"]))

    train(file, tmp_path, *flags, 3, "--num-minibatches", 2, on_update=look)
    assert len(sizes) == 20 and min(sizes) == 1
    assert all(np.isfinite(value) for _, value in scalars(only_run(tmp_path))["losses/value_loss"])
    with pytest.raises(SystemExit, match="num_minibatches must be at most 2"):
        train(file, tmp_path / "refused", *flags, 5, "--num-minibatches", 3)


# core details, as far as this file has its own code for them


def test_core_5_advantages(file, tmp_path):
    """Against a slow reference that walks each episode by itself."""
    flags = "--num-envs 3 --num-steps 32 --gamma 0.9 --gae-lambda 0.7 --update-epochs 1".split()
    env_id = probe(file, "RandomEnds")
    names = train(file, tmp_path, "--env-id", env_id, *flags, "--total-timesteps", 3 * 32 * 2)
    values, rewards, terminated, is_last = (
        names[name] for name in ("values", "rewards", "terminated", "is_last")
    )
    ends = is_last[1:] & ~is_last[:-1]
    assert terminated.any() and (ends & ~terminated).any() and is_last[:-1].any(), (
        "the rollout must hold every case"
    )
    for e in range(3):
        for t in np.flatnonzero(~is_last[:-1, e]):
            expected, weight, k = 0.0, 1.0, t
            while True:
                following = 0.0 if terminated[k, e] else float(values[k + 1, e])
                expected += weight * (float(rewards[k, e]) + 0.9 * following - float(values[k, e]))
                if is_last[k + 1, e] or k == 31:
                    break
                weight, k = weight * 0.9 * 0.7, k + 1
            assert names["advantages"][t, e] == pytest.approx(expected, abs=1e-5)
            assert names["returns"][t, e] == pytest.approx(expected + values[t, e], abs=1e-5)


def test_acting_and_learning_see_the_same_policy(file, tmp_path):
    """Before the first update the network gives the stored values and log-probabilities."""
    looked = []

    def look(names):
        if looked:
            return
        looked.append(True)
        with torch.no_grad():
            log_probs, values = names["agent"](torch.from_numpy(names["obs"]).flatten(0, 1))
        real = ~names["is_last"][:-1]
        taken = (
            log_probs.view(9, 4, 2)[:-1]
            .gather(2, torch.from_numpy(names["actions"])[..., None])
            .squeeze(2)
        )
        np.testing.assert_allclose(names["old_log_probs"], taken, atol=1e-5)
        np.testing.assert_allclose(names["values"], values.view(9, 4), atol=1e-5)
        for name, stored in {
            "b_log_probs": "old_log_probs",
            "b_actions": "actions",
            "b_obs": "obs",
            "b_returns": "returns",
        }.items():
            np.testing.assert_array_equal(names[name], names[stored][:8][real])
        np.testing.assert_array_equal(names["b_values"], names["values"][:-1][real])
        torch.testing.assert_close(
            names["ratio"].detach(), torch.ones(len(names["mb"])), atol=1e-5, rtol=0
        )
        assert len({*names["actions"].flatten().tolist()}) == 2 and 0 < real.sum() < 32

    train(file, tmp_path, "--env-id", probe(file, "RandomEnds"), *SMALL, on_update=look)
    assert looked


def test_core_10_one_loss_for_policy_value_and_entropy(file, tmp_path):
    """The optimizer gets the gradient of the textbook loss, written anew here."""

    def look(names):
        agent, mb = copy.deepcopy(names["agent"]), names["mb"]
        log_probs, value, _ = agent_by_hand(agent, names["b_obs"][mb])
        policy = torch.distributions.Categorical(logits=log_probs)
        ratio = torch.exp(policy.log_prob(names["b_actions"][mb]) - names["b_log_probs"][mb])
        advantages = names["b_advantages"][mb]
        advantages = (advantages - advantages.mean()) / advantages.std(correction=0)
        gain = torch.minimum(ratio * advantages, torch.clip(ratio, 0.9, 1.1) * advantages)
        near = names["b_values"][mb] + torch.clip(value - names["b_values"][mb], -0.1, 0.1)
        error = torch.maximum(
            (value - names["b_returns"][mb]) ** 2, (near - names["b_returns"][mb]) ** 2
        )
        loss = -gain.mean() + 0.7 * error.mean() / 2 - 0.3 * policy.entropy().mean()
        expected = torch.autograd.grad(loss, list(agent.parameters()))
        torch.testing.assert_close(
            flat_grad(names["agent"]),
            torch.cat([g.flatten() for g in expected]),
            atol=1e-4,
            rtol=1e-3,
        )

    flags = ("--vf-coef", 0.7, "--ent-coef", 0.3, "--max-grad-norm", 1e9, "--update-epochs", 2)
    train(file, tmp_path, "--env-id", probe(file, "RandomEnds"), *SMALL, *flags, on_update=look)
