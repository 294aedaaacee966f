"""cleanrl/ppo_continuous_action.py. test_continuous_N guards detail N of docs/rl-algorithms/ppo.md."""

import copy
import importlib.util
import math
import sys

import gymnasium as gym
import numpy as np
import pytest
import torch

from tests.harness import FILES, flat_grad, only_run, probe, same, scalars, train, weights
from tests.test_contract import edit

SMALL = (
    "--num-envs",
    3,
    "--num-steps",
    32,
    "--num-minibatches",
    2,
    "--update-epochs",
    3,
    "--gamma",
    0.9,
)
PROBE_FLAGS = (
    "--total-timesteps",
    10_240,
    "--num-envs",
    8,
    "--num-steps",
    32,
    "--num-minibatches",
    4,
)
PROBE_FLAGS = (*PROBE_FLAGS, "--learning-rate", 0.01, "--gamma", 0.5, "--no-clip-vloss")


@pytest.fixture
def file():
    return FILES["ppo_continuous_action"]


# the 9 details of continuous actions


def test_continuous_1_gaussian_policy(file, tmp_path):
    names = train(file, tmp_path, "--env-id", "Pendulum-v1", *SMALL, "--total-timesteps", 96)
    mean, logstd = torch.tensor([0.5, -2.0]).expand(50_000, 2), torch.tensor([0.0, -1.0])
    draws = names["sample"](mean, logstd)
    torch.testing.assert_close(draws.mean(0), mean[0], atol=0.02, rtol=0)
    torch.testing.assert_close(draws.std(0), logstd.exp(), atol=0.02, rtol=0)
    below = (draws[:, 0] < 0.5 + 1.0).float().mean()  # one standard deviation above the mean
    assert below == pytest.approx(0.8413, abs=0.01)
    expected = torch.distributions.Normal(mean, logstd.exp()).log_prob(draws).sum(1)
    torch.testing.assert_close(names["log_prob"](mean, logstd, draws), expected)


def test_continuous_2_one_standard_deviation_for_all_states(file, tmp_path):
    seen = []

    def look(names):
        seen.append(names["agent"].logstd.detach().clone())

    agent = train(
        file, tmp_path, "--env-id", "Pendulum-v1", *SMALL, "--total-timesteps", 96, on_update=look
    )["agent"]
    assert seen[0].tolist() == [0.0] and seen[-1].tolist() != [0.0], "it starts at 0 and is learned"
    assert isinstance(agent.logstd, torch.nn.Parameter) and agent.logstd.shape == (1,)


def test_continuous_3_components_are_independent(file, tmp_path):
    """Log-probabilities and entropies are sums over the two components of the action."""

    def look(names):
        mb, agent = names["mb"], names["agent"]
        normal = torch.distributions.Normal(
            names["shaken_mean" if "shaken_mean" in names else "mean"], agent.logstd.exp()
        )
        expected = normal.log_prob(names["b_actions"][mb]).sum(1) - names["b_logprobs"][mb]
        torch.testing.assert_close(names["logratio"], expected, atol=1e-5, rtol=1e-4)
        assert names["entropy"].item() == pytest.approx(
            normal.entropy().sum(1).mean().item(), rel=1e-5
        )
        assert names["entropy"].item() > 2, "twice 1.42"

    train(
        file,
        tmp_path,
        "--env-id",
        "Probe/ContinuousTarget-v0",
        *SMALL,
        "--total-timesteps",
        96,
        on_update=look,
    )


def test_continuous_4_separate_networks_of_64_tanh_units(file, tmp_path):
    agent = train(file, tmp_path, "--env-id", "Pendulum-v1", *SMALL, "--total-timesteps", 96)[
        "agent"
    ]
    for network, outputs in ((agent.actor, 1), (agent.critic, 1)):
        assert [type(layer).__name__ for layer in network] == [
            "Linear",
            "Tanh",
            "Linear",
            "Tanh",
            "Linear",
        ]
        assert [tuple(p.shape) for p in network.parameters() if p.dim() == 2] == [
            (64, 3),
            (64, 64),
            (outputs, 64),
        ]
    obs = torch.randn(5, 3)
    value, policy = agent.value(obs), agent.policy(obs)
    with torch.no_grad():
        for parameter in agent.actor.parameters():
            parameter.add_(1.0)
    assert torch.equal(agent.value(obs), value) and not torch.equal(agent.policy(obs), policy)


def test_continuous_5_the_environment_gets_clipped_actions(file, tmp_path):
    """The probe refuses actions beyond 1; what is learned from goes far beyond."""
    names = train(
        file, tmp_path, "--env-id", probe(file, "ActionMatters"), *SMALL, "--total-timesteps", 96
    )
    assert np.abs(names["actions"]).max() > 1.5
    assert names["b_actions"].abs().max() > 1.5


def recorded(monkeypatch):
    """Everything that the environments show, in order."""
    shown = []
    for name in ("reset", "step"):
        real = getattr(gym.vector.SyncVectorEnv, name)

        def record(self, *args, real=real, **kwargs):
            answer = real(self, *args, **kwargs)
            shown.append(np.array(answer[0], dtype=np.float64))
            return answer

        monkeypatch.setattr(gym.vector.SyncVectorEnv, name, record)
    return shown


def test_continuous_6_observations_are_normalized(file, tmp_path, monkeypatch):
    """By mean and variance of all that all environments have shown so far."""
    shown, obs = recorded(monkeypatch), []

    def look(names):
        if len(obs) <= names["iteration"]:
            obs.append(names["obs"].copy())

    flags = ("--env-id", "Probe/FarAndWide-v0", *SMALL, "--total-timesteps", 96 * 3)
    agent = train(file, tmp_path, *flags, on_update=look)["agent"]
    rows = np.concatenate(shown)
    assert agent.obs_moments.count == len(rows) == 3 * (1 + 3 * 32)
    np.testing.assert_allclose(agent.obs_moments.mean, rows.mean(0), rtol=1e-9)
    np.testing.assert_allclose(agent.obs_moments.var, rows.var(0), rtol=1e-6)
    for iteration in range(3):
        for t in range(33):
            before = np.concatenate(shown[: 32 * iteration + t + 1])
            expected = (shown[32 * iteration + t] - before.mean(0)) / np.sqrt(before.var(0) + 1e-8)
            np.testing.assert_allclose(obs[iteration][t], expected.clip(-10, 10), atol=1e-3)


def test_continuous_7_normalized_observations_are_clipped(file, tmp_path):
    agent = train(file, tmp_path, "--env-id", "Pendulum-v1", *SMALL, "--total-timesteps", 96)[
        "agent"
    ]
    assert agent.normalize(np.full((2, 3), 1e9)).tolist() == [[10.0] * 3] * 2
    assert agent.normalize(np.full((2, 3), -1e9)).tolist() == [[-10.0] * 3] * 2
    assert agent.normalize(agent.obs_moments.mean.numpy()[None] + 1e-3).abs().max() < 1


def test_continuous_8_rewards_are_scaled_by_the_spread_of_returns(file, tmp_path):
    """Against a slow reference that walks each episode by itself, over three rollouts."""
    rollouts = []

    def look(names):
        if len(rollouts) <= names["iteration"]:
            rollouts.append(
                {name: names[name].copy() for name in ("rewards", "scaled_rewards", "is_last")}
            )

    flags = ("--env-id", probe(file, "RandomEnds"), *SMALL, "--total-timesteps", 96 * 3)
    train(file, tmp_path, *flags, on_update=look)
    sums, running = [], [0.0] * 3
    for rollout in rollouts:
        for t in range(32):
            for e in range(3):
                if rollout["is_last"][t, e]:
                    running[e] = 0.0  # a reset: no reward, no return
                else:
                    running[e] = 0.9 * running[e] + float(rollout["rewards"][t, e])
                    sums.append(running[e])
        expected = rollout["rewards"] / math.sqrt(np.var(sums) + 1e-8)
        np.testing.assert_allclose(
            rollout["scaled_rewards"], expected.clip(-10, 10), rtol=1e-4, atol=1e-6
        )
    assert np.concatenate([rollout["is_last"] for rollout in rollouts]).any(), (
        "there must have been resets"
    )


def test_continuous_9_scaled_rewards_are_clipped(file, tmp_path):
    flags = (
        "--env-id",
        probe(file, "Outlier"),
        "--num-steps",
        256,
        "--num-minibatches",
        2,
        "--gamma",
        0,
    )
    flags = (*flags, "--num-envs", 2 if "lstm" in file.stem else 1)
    rewards = train(file, tmp_path, *flags, "--total-timesteps", 512)["scaled_rewards"]
    assert rewards.max() == 10.0 and (rewards > 0).sum() < 5


# known answers


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("ConstantValue", {0: 1}),
        ("ValueFromObs", {-1: -1, 1: 1}),
        ("Discounting", {0: 0.5, 1: 1}),
        ("TruncatedEveryStep", {0: 2}),
        ("TwoEnds", {-1: 1, 1: 2}),
    ],
)
def test_values_of_probes(file, tmp_path, name, values):
    """In units of the scaled reward, of which a raw reward of 1 is as many as the last rollout shows."""
    names = train(file, tmp_path, "--env-id", probe(file, name), *PROBE_FLAGS)
    unit = names["scaled_rewards"].max()
    with torch.no_grad():
        obs = names["agent"].normalize(np.array([[obs] for obs in values]))
        learned = (names["agent"].value(obs) / unit).tolist()
    assert learned == pytest.approx(list(values.values()), abs=0.1)


@pytest.mark.parametrize(
    ("env_id", "least"),
    [
        ("ContinuousProbe/ActionMatters-v0", 0.9),
        ("ContinuousProbe/ActionAndObsMatter-v0", 0.9),
        ("Probe/ContinuousTarget-v0", -0.1),
        ("Probe/ContinuousTargetFromObs-v0", -0.1),
        ("Probe/FarAndWide-v0", -0.1),
    ],
)
def test_actions_of_probes(file, tmp_path, env_id, least):
    """Acting through load_policy in fresh environments, as every evaluation does: normalizer and all."""
    names = train(file, tmp_path, "--env-id", env_id, *PROBE_FLAGS)
    assert np.mean(play(names, only_run(tmp_path))) > least


def play(names, run):
    envs = names["make_envs"](names["args"], 8)
    policy = names["load_policy"](torch.load(run / "checkpoint.pt", weights_only=True), envs)
    returns, (obs, _), is_last = [], envs.reset(seed=5), np.zeros(8, bool)
    while len(returns) < 80:
        obs, _, terminated, truncated, infos = envs.step(policy(obs, is_last))
        is_last = terminated | truncated
        returns += list(infos["episode"]["r"][infos["_episode"]]) if "episode" in infos else []
    return returns


def test_evaluation_leaves_the_normalizer_alone(file, tmp_path):
    names = train(file, tmp_path, "--env-id", "Pendulum-v1", *SMALL, "--total-timesteps", 96)
    checkpoint = torch.load(only_run(tmp_path) / "checkpoint.pt", weights_only=True)
    policy = names["load_policy"](checkpoint, names["envs"])
    answers = []
    for _ in range(2):
        torch.manual_seed(0)
        answers.append(policy(np.ones((3, 3)), np.ones(3, bool)))
        policy(np.full((3, 3), 1e6), np.ones(3, bool))
    assert np.array_equal(*answers)


def test_checkpoints_hold_both_normalizers(file, tmp_path):
    names = train(
        file, tmp_path, "--env-id", probe(file, "RandomEnds"), *SMALL, "--total-timesteps", 96
    )
    checkpoint = torch.load(only_run(tmp_path) / "checkpoint.pt", weights_only=True)
    assert "return_moments" in checkpoint
    assert (
        same(checkpoint["return_moments"], names["return_moments"].state_dict())
        and checkpoint["return_moments"]["count"] > 50
    )
    assert checkpoint["agent"]["obs_moments.count"] == 99
    edit(only_run(tmp_path), total_timesteps=192)
    resumed = train(file, tmp_path, "--resume", only_run(tmp_path))
    assert resumed["return_moments"].count > checkpoint["return_moments"]["count"]
    assert resumed["agent"].obs_moments.count == 99 + 99


def test_advantages_are_of_the_scaled_rewards(file, tmp_path):
    """core 5 and continuous 8 together, against a slow reference that walks each episode by itself."""
    names = train(
        file,
        tmp_path,
        "--env-id",
        probe(file, "RandomEnds"),
        *SMALL,
        "--gae-lambda",
        0.7,
        "--total-timesteps",
        288,
    )
    values, rewards, terminated, is_last = (
        names[name] for name in ("values", "scaled_rewards", "terminated", "is_last")
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


def test_core_10_the_gradient_is_that_of_the_textbook_loss(file, tmp_path):
    def look(names):
        agent, mb = copy.deepcopy(names["agent"]), names["mb"]
        policy = torch.distributions.Normal(agent.actor(names["b_obs"][mb]), agent.logstd.exp())
        value = agent.critic(names["b_obs"][mb])[:, 0]
        ratio = torch.exp(policy.log_prob(names["b_actions"][mb]).sum(1) - names["b_logprobs"][mb])
        gain = torch.minimum(
            ratio * names["mb_advantages"], torch.clip(ratio, 0.8, 1.2) * names["mb_advantages"]
        )
        error = (value - names["b_returns"][mb]) ** 2
        loss = -gain.mean() + 0.7 * error.mean() / 2 - 0.3 * policy.entropy().sum(1).mean()
        expected = torch.autograd.grad(loss, list(agent.parameters()))
        torch.testing.assert_close(
            flat_grad(names["agent"]),
            torch.cat([g.flatten() for g in expected]),
            atol=1e-5,
            rtol=1e-3,
        )

    flags = (
        "--vf-coef",
        0.7,
        "--ent-coef",
        0.3,
        "--no-clip-vloss",
        "--max-grad-norm",
        1e9,
        "--learning-rate",
        0.01,
    )
    flags = ("--env-id", "Probe/ContinuousTarget-v0", *SMALL, "--total-timesteps", 192, *flags)
    train(file, tmp_path, *flags, on_update=look)


# what it refuses, and what it takes


@pytest.mark.parametrize(
    ("env_id", "words"),
    [
        ("CartPole-v1", "needs continuous actions, which CartPole-v1 does not have"),
        ("Probe/MultiDiscreteActions-v0", "needs continuous actions"),
        ("NoSuchEnv-v0", "cannot make NoSuchEnv-v0: .*NoSuchEnv"),
    ],
)
def test_other_actions_are_refused(file, tmp_path, env_id, words):
    with pytest.raises(SystemExit, match=words):
        train(file, tmp_path, "--env-id", env_id, *SMALL, "--total-timesteps", 96)


@pytest.mark.parametrize(
    "env_id", ["HalfCheetah-v5", "Hopper-v4", "dm_control/cartpole-balance-v0"]
)
def test_environments_of_all_kinds(file, tmp_path, env_id):
    if env_id.startswith("dm_control") and not importlib.util.find_spec("dm_control"):
        pytest.skip("needs dm_control")
    for name in [
        name for name in gym.registry if name.startswith("dm_control/")
    ]:  # the file registers them itself
        gym.registry.pop(name)
    sys.modules.pop("shimmy", None)
    names = train(file, tmp_path, "--env-id", env_id, *SMALL, "--total-timesteps", 96)
    obs_dim = {"HalfCheetah-v5": 17, "Hopper-v4": 11, "dm_control/cartpole-balance-v0": 5}[env_id]
    assert names["obs"].shape == (33, 3, obs_dim) and np.isfinite(names["obs"]).all()


# learning


def test_learns_inverted_pendulum(file, tmp_path):
    flags = (
        "--env-id",
        "InvertedPendulum-v5",
        "--total-timesteps",
        40_960,
        "--num-envs",
        4,
        "--num-steps",
        256,
    )
    train(file, tmp_path, *flags, "--num-minibatches", 8, "--learning-rate", 0.002)
    returns = [value for _, value in scalars(only_run(tmp_path))["charts/episodic_return"]]
    assert np.mean(returns[:20]) < 20 and np.mean(returns[-10:]) > 500


def test_same_seed_same_bits(file, tmp_path):
    flags = ("--env-id", "Hopper-v5", *SMALL, "--total-timesteps", 96 * 4)
    for name, seed in {"a": 1, "b": 1, "c": 2}.items():
        train(file, tmp_path / name, *flags, "--seed", seed)
    a, b, c = (weights(only_run(tmp_path / name)) for name in "abc")
    assert same(a, b) and not same(a, c)
