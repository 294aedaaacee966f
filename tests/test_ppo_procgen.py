"""cleanrl/ppo_procgen.py. test_procgen_N guards detail N of docs/rl-algorithms/ppo-procgen.md.

tests/mutations shows that each test can fail.
"""

import copy
import os
import runpy
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.harness import flat_grad, only_run, probe, scalars, train

envpool = pytest.importorskip("envpool")
SMALL = ("--num-envs", 4, "--num-steps", 8, "--num-minibatches", 2, "--update-epochs", 1)
JUMPER = ("--env-id", "jumper", "--num-levels", 1, "--num-pools", 1)
JUMPER = (*JUMPER, "--gamma", 0.9, "--learning-rate", 0.001)


def make_envs(file, env_id, num_envs=2, **flags):
    names = runpy.run_path(str(file))
    return names["make_envs"](names["Args"](env_id=env_id, **flags), num_envs)


# EnvPool's games


@pytest.mark.parametrize(
    ("env_id", "mode", "number"),
    [
        ("starpilot", "easy", 0),
        ("bigfish", "hard", 1),
        ("leaper", "extreme", 2),
        ("maze", "memory", 10),
        ("ninja", "exploration", 20),
    ],
)
def test_procgen_1_games_and_levels(file, tmp_path, env_id, mode, number):
    envs = make_envs(file, env_id, distribution_mode=mode)
    config = envs.env.config
    assert (config["env_name"], config["distribution_mode"], config["num_levels"]) == (
        env_id,
        number,
        0,
    )
    obs, _ = envs.reset(seed=3)
    assert (
        obs.shape == (2, 3, 64, 64) and obs.dtype == np.uint8 and envs.single_action_space.n == 15
    )
    again, other = envs.reset(seed=3)[0].copy(), envs.reset(seed=4)[0]
    assert np.array_equal(obs, again)
    assert mode == "exploration" or not (
        np.array_equal(obs, other) or np.array_equal(obs[0], obs[1])
    ), "that has one level"
    (image, _) = envs.render()
    np.testing.assert_array_equal(
        image[::4, ::4].transpose(2, 0, 1), other[0], "videos show what the agents see"
    )
    assert image.shape == (256, 256, 3)


def test_num_levels(file, tmp_path):
    """The seeds of the levels that are played, of episodes that end soon."""
    envs, seeds = make_envs(file, "jumper", num_envs=8, num_levels=3), set()
    envs.reset(seed=1)
    for t in range(60):
        seeds.update(envs.step(np.full(8, t % 9))[-1]["level_seed"].tolist())
    assert seeds == {0, 1, 2}


def test_returns_and_ends(file, tmp_path):
    """Lost games and time limits: returns are whole and raw, the last image is of that level."""
    for env_id, choose, steps in (
        ("starpilot", lambda rng: rng.integers(0, 15, 8), 250),
        ("leaper", lambda rng: np.full(8, 4), 502),
    ):
        envs, rng = make_envs(file, env_id, num_envs=8), np.random.default_rng(0)
        envs.reset(seed=5)
        scores, lengths, was_last, level, ended = (
            np.zeros(8),
            np.zeros(8),
            np.zeros(8, bool),
            None,
            [],
        )
        for _ in range(steps):
            _, rewards, terminated, truncated, infos = envs.step(choose(rng))
            scores, lengths, is_last = scores + rewards, lengths + ~was_last, terminated | truncated
            np.testing.assert_array_equal(infos.get("_episode", np.zeros(8, bool)), is_last)
            if level is not None:
                assert np.array_equal(infos["level_seed"] != level, was_last), (
                    "a new level comes with the step after the end"
                )
            for i in np.flatnonzero(is_last):
                assert (infos["episode"]["r"][i], infos["episode"]["l"][i]) == (
                    scores[i],
                    lengths[i],
                )
                ended.append((bool(truncated[i]), int(lengths[i]), scores[i]))
            scores[is_last], lengths[is_last], was_last, level = (
                0,
                0,
                is_last,
                infos["level_seed"].copy(),
            )
        if env_id == "leaper":
            assert ended == [(True, 500, 0)] * 8, "time is up"
        else:
            assert (
                len(ended) > 12
                and not any(is_cut for is_cut, _, _ in ended)
                and sum(score for _, _, score in ended) > 5
            )


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="from Python 3.12 on EnvPool has Qt inside")
def test_qt_comes_with_pip(file, tmp_path):
    """In a new process, where EnvPool may not have found Qt; a system's own Qt is as good."""
    code = f"import runpy, envpool; names = runpy.run_path({str(file)!r})\n"
    code += "names['make_envs'](names['Args'](), 1).reset()\n"
    code += "print({line.split()[-1] for line in open('/proc/self/maps') if 'libQt5Gui' in line})"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0 and "libQt5Gui" in done.stdout, done.stderr
    if not any(
        os.path.exists(f"{folder}/libQt5Gui.so.5")
        for folder in ("/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/lib")
    ):
        assert "/PyQt5/Qt5/lib/libQt5Gui.so.5" in done.stdout


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            ("--env-id", "starpilot", "--distribution-mode", "memory"),
            "cannot train on starpilot: StarpilotMemory-v0",
        ),
        (
            ("--env-id", "bigfish", "--distribution-mode", "extreme"),
            "cannot train on bigfish: BigfishExtreme-v0",
        ),
        (("--env-id", "StarpilotEasy-v0"), "cannot train on StarpilotEasy-v0"),
        (("--env-id", "CartPole-v1"), "cannot train on CartPole-v1"),
        (
            ("--distribution-mode", "medium"),
            "distribution_mode is none of easy, hard, extreme, memory, exploration",
        ),
        (("--num-steps", 1), "num_steps must be at least 2"),
        (("--num-levels", -1), "num_levels must not be negative"),
        (("--num-levels", 2**31), "cannot train on starpilot"),
        (("--num-pools", 3), "num_pools must divide num_envs"),
        (("--num-minibatches", 3), "num_minibatches must divide a rollout of 16384 steps"),
        (("--num-steps", 10**9, "--total-timesteps", 10**12), "GB of memory needed"),
        (("--capture-video",), "rgb_array"),
    ],
)
def test_bad_commands_get_one_line(file, tmp_path, flags, words):
    with pytest.raises(SystemExit) as refusal:
        train(file, tmp_path, *flags)
    assert (
        words in refusal.value.code
        and "\n" not in refusal.value.code
        and not list(tmp_path.iterdir())
    )


# the network


def hidden_by_hand(agent, obs):
    """The features layer by layer: thrice a convolution, max pooling and two residual blocks."""
    layers = [
        module
        for module in agent.network.modules()
        if isinstance(module, torch.nn.Conv2d | torch.nn.Linear)
    ]
    assert [tuple(layer.weight.shape[:2]) for layer in layers] == [
        *((16, 3), *[(16, 16)] * 4),
        *((32, 16), *[(32, 32)] * 4),
        *((32, 32), *[(32, 32)] * 4),
        (256, 2048),
    ]
    x = obs.float() / 255
    for stage in range(3):
        first, *rest = layers[5 * stage : 5 * stage + 5]
        x = F.max_pool2d(F.conv2d(x, first.weight, first.bias, padding=1), 3, 2, 1)
        for one, two in (rest[:2], rest[2:]):
            y = F.conv2d(torch.relu(x), one.weight, one.bias, padding=1)
            x = x + F.conv2d(torch.relu(y), two.weight, two.bias, padding=1)
    return torch.relu(torch.relu(x).flatten(1) @ layers[-1].weight.T + layers[-1].bias)


def agent_by_hand(agent, obs):
    hidden = hidden_by_hand(agent, obs)
    logits = hidden @ agent.actor.weight.T + agent.actor.bias
    return logits - logits.logsumexp(1, keepdim=True), (
        hidden @ agent.critic.weight.T + agent.critic.bias
    )[:, 0]


def test_procgen_2_impala_network(file, tmp_path):
    torch.manual_seed(1)
    agent = runpy.run_path(str(file))["Agent"](make_envs(file, "starpilot"))
    obs = torch.randint(0, 256, (3, 3, 64, 64), dtype=torch.uint8)
    for seen, expected in zip(agent(obs), agent_by_hand(agent, obs), strict=False):
        torch.testing.assert_close(seen, expected, atol=1e-5, rtol=1e-4)
    assert agent(obs)[0].exp().sum(1).tolist() == pytest.approx([1] * 3) and agent(obs)[1].std() > 0


def test_procgen_3_scaled_weights(file, tmp_path):
    agent = runpy.run_path(str(file))["Agent"](make_envs(file, "starpilot"))
    scales = {
        "network.0": 1,
        "network.4": 1,
        "network.8": 1,
        "network.14": 1.4,
        "actor": 0.1,
        "critic": 0.1,
        "aux_critic": 0.1,
    }
    layers = {name: layer for name, layer in agent.named_modules() if hasattr(layer, "weight")}
    assert len(layers) >= 18
    for name, layer in layers.items():
        expected = scales.get(
            name, (3**-0.5 * 2**-0.5) ** 0.5
        )  # three stages of two blocks, each of two layers
        torch.testing.assert_close(
            layer.weight.flatten(1).norm(dim=1), torch.full((len(layer.weight),), float(expected))
        )
        assert layer.bias.abs().max() == 0 and layer.weight.std() > 0


# rewards


def test_rewards_are_scaled_by_the_returns_with_the_own_gamma(file, tmp_path):
    """Against sums over each episode by itself; what is reported is not scaled."""
    rollouts = []

    def look(names):
        if not rollouts or rollouts[-1]["step"] != names["global_step"]:
            kept = {name: names[name].copy() for name in ("rewards", "is_last", "scaled_rewards")}
            rollouts.append(kept | {"step": names["global_step"]})

    flags = ("--num-minibatches", 1, "--gamma", 0.6, "--total-timesteps", 96)
    train(file, tmp_path, "--env-id", probe(file, "RandomEnds"), *SMALL, *flags, on_update=look)
    assert len(rollouts) == 3
    sums, seen = np.zeros(4), []
    for rollout in rollouts:
        for t in range(8):
            for i in range(4):
                if rollout["is_last"][t, i]:
                    sums[i] = 0
                    continue
                sums[i] = rollout["rewards"][t, i] + 0.6 * sums[i]
                seen.append(sums[i])
        expected = rollout["rewards"] / np.sqrt(np.var(seen) + 1e-8)
        np.testing.assert_allclose(rollout["scaled_rewards"], expected.clip(-10, 10), rtol=1e-4)
    assert len(seen) < 96 and np.std(seen) > 1.02, "some rows only reset, and the scale must matter"


def test_rewards_are_clipped(file, tmp_path):
    """A constant reward has returns without a spread, and would be scaled to 10,000."""
    names = train(
        file, tmp_path, "--env-id", probe(file, "ConstantValue"), *SMALL, "--total-timesteps", 32
    )
    real = ~names["is_last"][:-1]
    assert set(names["scaled_rewards"][real].tolist()) == {10.0} and set(
        names["rewards"][real].tolist()
    ) == {1.0}
    assert {value for _, value in scalars(only_run(tmp_path))["charts/episodic_return"]} == {1.0}


def test_core_5_advantages(file, tmp_path):
    """Of scaled rewards, against a slow reference that walks each episode by itself."""
    flags = "--num-envs 4 --num-steps 16 --gamma 0.9 --gae-lambda 0.7 --num-minibatches 1".split()
    names = train(
        file,
        tmp_path,
        "--env-id",
        probe(file, "RandomEnds"),
        *SMALL,
        *flags,
        "--total-timesteps",
        64,
    )
    values, rewards, terminated, is_last = (
        names[n] for n in ("values", "scaled_rewards", "terminated", "is_last")
    )
    ends = is_last[1:] & ~is_last[:-1]
    assert terminated.any() and (ends & ~terminated).any() and is_last[:-1].any(), (
        "the rollout must hold every case"
    )
    for e in range(4):
        for t in np.flatnonzero(~is_last[:-1, e]):
            expected, weight, k = 0.0, 1.0, t
            while True:
                following = 0.0 if terminated[k, e] else float(values[k + 1, e])
                expected += weight * (float(rewards[k, e]) + 0.9 * following - float(values[k, e]))
                if is_last[k + 1, e] or k == 15:
                    break
                weight, k = weight * 0.9 * 0.7, k + 1
            assert names["advantages"][t, e] == pytest.approx(expected, abs=1e-5)
            assert names["b_returns"].view(16, 4)[t, e].item() == pytest.approx(
                expected + values[t, e], abs=1e-5
            )


# rows of no weight, and pools


def test_reset_rows_weigh_nothing(file, tmp_path):
    """The gradient is that of the textbook loss over the other rows, by autograd."""
    left_out = 0

    def look(names):
        nonlocal left_out
        np.testing.assert_array_equal(names["b_is_real"], ~names["is_last"][:-1].flatten())
        agent, mb = copy.deepcopy(names["agent"]), names["mb"][names["b_is_real"][names["mb"]] > 0]
        left_out += len(names["mb"]) - len(mb)
        log_probs, value = agent_by_hand(agent, names["b_obs"][mb])
        policy = torch.distributions.Categorical(logits=log_probs)
        ratio = torch.exp(policy.log_prob(names["b_actions"][mb]) - names["b_log_probs"][mb])
        advantages = names["b_advantages"][mb]
        advantages = (advantages - advantages.mean()) / advantages.std(correction=0)
        gain = torch.minimum(ratio * advantages, torch.clip(ratio, 0.8, 1.2) * advantages)
        near = names["b_values"][mb] + torch.clip(value - names["b_values"][mb], -0.2, 0.2)
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

    flags = (
        "--vf-coef 0.7 --ent-coef 0.3 --max-grad-norm 1e9 --total-timesteps 64 "
        "--learning-rate 0.002"
    ).split()
    train(file, tmp_path, "--env-id", probe(file, "RandomEnds"), *SMALL, *flags, on_update=look)
    assert left_out > 5


def test_episodes_are_logged_where_they_end(file, tmp_path):
    """Terminations and truncations, at their step and environment, in two pools that take turns."""
    expected, lengths = {}, np.zeros(4, dtype=int)

    def look(names):  # once an iteration
        is_last, start = names["is_last"], names["global_step"] - 64
        for t in range(16):
            for i in range(4):
                lengths[i] = 0 if is_last[t, i] else lengths[i] + 1
                if is_last[t + 1, i]:
                    expected[start + 4 * t + i + 1] = lengths[i]
        with torch.no_grad():
            log_probs, values = names["agent"](names["obs"].flatten(0, 1))[:2]
        taken = log_probs.view(17, 4, 2)[:-1].gather(2, names["actions"][..., None]).squeeze(2)
        torch.testing.assert_close(names["old_values"], values.view(17, 4), atol=1e-5, rtol=0)
        torch.testing.assert_close(names["old_log_probs"], taken, atol=1e-5, rtol=0)

    flags = (
        "--num-envs 4 --num-steps 16 --num-minibatches 1 --num-pools 2 --total-timesteps 128"
    ).split()
    train(file, tmp_path, "--env-id", probe(file, "RandomEnds"), *SMALL, *flags, on_update=look)
    logged = scalars(only_run(tmp_path))
    assert len(expected) > 24 and len({step % 4 for step in expected}) == 4
    assert logged["charts/episodic_length"] == list(expected.items())
    assert [step for step, _ in logged["charts/episodic_return"]] == list(expected)


# learning


@pytest.mark.slow
def test_actions_of_probes(file, tmp_path):
    """Acting through load_policy in fresh environments, as every evaluation does."""
    flags = (
        "--num-envs 16 --num-steps 8 --num-minibatches 2 --update-epochs 2 --total-timesteps 768"
    ).split()
    flags = (*flags, "--learning-rate", 0.002, "--gamma", 0.5, "--ent-coef", 0)
    names = train(file, tmp_path, "--env-id", probe(file, "ActionAndObsMatter"), *flags)
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


def mean_of_last(folder, episodes):
    return np.mean(
        [value for _, value in scalars(only_run(folder))["charts/episodic_return"]][-episodes:]
    )


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_learns_four_levels_of_jumper(file, tmp_path):
    """Return 10 for the carrot, 0 for a fall.

    The carrot lies a step to the left in one level and behind jumps in others, so the agent has to
    look. Random play has a mean of 5.2 (864 episodes). The last hundred episodes had 8.2 with seed
    1 and 9.3 with seed 2; after half of the steps 5.9 and 8.8, and 9.1 with seed 1 on another CPU.
    """
    flags = (
        "--num-envs 16 --num-steps 32 --num-minibatches 4 --gamma 0.95 --total-timesteps 24576"
    ).split()
    train(file, tmp_path, *JUMPER, "--num-levels", 4, *flags)
    assert mean_of_last(tmp_path, 100) > 7.5
