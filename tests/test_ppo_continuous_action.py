"""cleanrl/ppo_continuous_action.py. test_continuous_N: rl-algorithms/ppo-continuous-action.md."""

import copy
import importlib.util
import math
import sys

import gymnasium as gym
import numpy as np
import pytest
import torch

from tests.harness import flat_grad, only_run, probe, same, scalars, train, weights
from tests.probes import ContinuousTarget, Probe

SMALL = "--num-envs 3 --num-steps 32 --num-minibatches 2 --update-epochs 3 --gamma 0.9".split()
PENDULUM = ["--env-id", "Pendulum-v1", *SMALL, "--total-timesteps", 96]
TARGET = ["--env-id", "Probe/ContinuousTarget-v0", *SMALL]
PROBE_FLAGS = (
    "--total-timesteps 10240 --num-envs 8 --num-steps 32 --num-minibatches 4 --update-epochs 4"
    " --learning-rate 0.01 --gamma 0.5 --no-clip-vloss"
).split()


class ScalarActions(Probe):
    """The action is a number without a shape; the reward is minus its squared distance to 0.5."""

    action_space = gym.spaces.Box(-1, 1, (), np.float32)

    def reward(self, action):
        assert self.action_space.contains(np.asarray(action)), f"{action} is not an action"
        return -float((action - 0.5) ** 2)


class DictAndScalar(ScalarActions):
    """ScalarActions with a dictionary for an observation."""

    observation_space = gym.spaces.Dict({"a": Probe.observation_space, "b": gym.spaces.Discrete(3)})

    def observe(self):
        return {"a": super().observe(), "b": 1}


class HugeBounds(ContinuousTarget):
    """ContinuousTarget with bounds whose distance is not a float32."""

    action_space = gym.spaces.Box(-3e38, 3e38, (2,), np.float32)


class IntegerActions(Probe):
    """Two whole numbers between 0 and 5 in one Box."""

    action_space = gym.spaces.Box(0, 5, (2,), np.int64)


for probe_class in (ScalarActions, DictAndScalar, HugeBounds, IntegerActions):
    gym.register(f"Probe/{probe_class.__name__}-v0", probe_class)


# the 9 details of continuous actions


def test_continuous_1_gaussian_policy(file, tmp_path):
    names = train(file, tmp_path, *PENDULUM)
    mean, log_std = torch.tensor([0.5, -2.0]).expand(50_000, 2), torch.tensor([0.0, -1.0])
    draws = names["sample"](mean, log_std)
    torch.testing.assert_close(draws.mean(0), mean[0], atol=0.02, rtol=0)
    torch.testing.assert_close(draws.std(0), log_std.exp(), atol=0.02, rtol=0)
    below = (draws[:, 0] < 0.5 + 1.0).float().mean()  # one standard deviation above the mean
    assert below == pytest.approx(0.8413, abs=0.01)
    expected = torch.distributions.Normal(mean, log_std.exp()).log_prob(draws).sum(1)
    torch.testing.assert_close(names["log_prob"](mean, log_std, draws), expected)


def test_continuous_2_one_standard_deviation_for_all_states(file, tmp_path):
    seen = []

    def look(names):
        seen.append(names["agent"].log_std.detach().clone())

    agent = train(file, tmp_path, *PENDULUM, on_update=look)["agent"]
    assert seen[0].tolist() == [0.0] and seen[-1].tolist() != [0.0], "it starts at 0 and is learned"
    assert isinstance(agent.log_std, torch.nn.Parameter) and agent.log_std.shape == (1,)


def test_continuous_3_components_are_independent(file, tmp_path):
    """Log-probabilities and entropies are sums over the two components of the action."""

    def look(names):
        mb, agent = names["mb"], names["agent"]
        mean = names["noisy_mean"] if "noisy_mean" in names else names["mean"]
        normal = torch.distributions.Normal(mean, agent.log_std.exp())
        log_ratio = normal.log_prob(names["b_actions"][mb]).sum(1) - names["b_log_probs"][mb]
        torch.testing.assert_close(names["log_ratio"], log_ratio, atol=1e-5, rtol=1e-4)
        entropy = normal.entropy().sum(1).mean().item()
        assert names["entropy"].item() == pytest.approx(entropy, rel=1e-5)
        assert entropy > 2, "twice 1.42"

    train(file, tmp_path, *TARGET, "--total-timesteps", 96, on_update=look)


def test_continuous_4_separate_networks_of_64_tanh_units(file, tmp_path):
    agent = train(file, tmp_path, *PENDULUM)["agent"]
    for network in (agent.actor, agent.critic):
        layers = [type(layer).__name__ for layer in network]
        assert layers == ["Linear", "Tanh", "Linear", "Tanh", "Linear"]
        shapes = [tuple(p.shape) for p in network.parameters() if p.dim() == 2]
        assert shapes == [(64, 3), (64, 64), (1, 64)]
    obs = torch.randn(5, 3)
    value, policy = agent.value(obs), agent.policy(obs)
    with torch.no_grad():
        for parameter in agent.actor.parameters():
            parameter.add_(1.0)
    assert torch.equal(agent.value(obs), value) and not torch.equal(agent.policy(obs), policy)


def test_continuous_5_the_environment_gets_clipped_actions(file, tmp_path):
    """The probe refuses actions beyond 1; what is learned from goes far beyond."""
    flags = ["--env-id", probe(file, "ActionMatters"), *SMALL, "--total-timesteps", 96]
    names = train(file, tmp_path, *flags)
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

    flags = ["--env-id", "Probe/FarAndWide-v0", *SMALL, "--total-timesteps", 96 * 3]
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
    agent = train(file, tmp_path, *PENDULUM)["agent"]
    assert agent.normalize(np.full((2, 3), 1e9)).tolist() == [[10.0] * 3] * 2
    assert agent.normalize(np.full((2, 3), -1e9)).tolist() == [[-10.0] * 3] * 2
    assert np.abs(agent.normalize(agent.obs_moments.mean.numpy()[None] + 1e-3)).max() < 1


def test_continuous_8_rewards_are_scaled_by_the_spread_of_returns(file, tmp_path):
    """Against a slow reference that walks each episode by itself, over three rollouts."""
    rollouts = []

    def look(names):
        if len(rollouts) <= names["iteration"]:
            arrays = ("rewards", "scaled_rewards", "is_last")
            rollouts.append({name: names[name].copy() for name in arrays})

    flags = ["--env-id", probe(file, "RandomEnds"), *SMALL, "--total-timesteps", 96 * 3]
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
        expected = (rollout["rewards"] / math.sqrt(np.var(sums) + 1e-8)).clip(-10, 10)
        np.testing.assert_allclose(rollout["scaled_rewards"], expected, rtol=1e-4, atol=1e-6)
    assert any(rollout["is_last"].any() for rollout in rollouts), "there must have been resets"


def test_continuous_9_scaled_rewards_are_clipped(file, tmp_path):
    flags = "--num-envs 1 --num-steps 256 --num-minibatches 2 --gamma 0 --total-timesteps 512"
    names = train(file, tmp_path, "--env-id", probe(file, "Outlier"), *flags.split())
    rewards = names["scaled_rewards"]
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
    """In units of the scaled reward that a raw reward of 1 has in the last rollout."""
    flags = [*PROBE_FLAGS, "--total-timesteps", 5120]
    names = train(file, tmp_path, "--env-id", probe(file, name), *flags)
    unit = names["scaled_rewards"].max()
    obs = names["agent"].normalize(np.array([[obs] for obs in values]))
    with torch.no_grad():
        learned = (names["agent"].value(torch.from_numpy(obs)) / unit).tolist()
    assert learned == pytest.approx(list(values.values()), abs=0.1)


@pytest.mark.parametrize(
    ("env_id", "least"),
    [
        ("ContinuousProbe/ActionMatters-v0", 0.9),
        ("ContinuousProbe/ActionAndObsMatter-v0", 0.9),
        ("Probe/ContinuousTarget-v0", -0.1),
        ("Probe/ContinuousTargetFromObs-v0", -0.1),
        ("Probe/FarAndWide-v0", -0.1),
        ("Probe/ScalarActions-v0", -0.1),
        ("Probe/HugeBounds-v0", -0.1),
    ],
)
def test_actions_of_probes(file, tmp_path, env_id, least):
    """Acting through load_policy in fresh environments, as every evaluation does."""
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
    names = train(file, tmp_path, *PENDULUM)
    checkpoint = torch.load(only_run(tmp_path) / "checkpoint.pt", weights_only=True)
    policy = names["load_policy"](checkpoint, names["envs"])
    answers = []
    for _ in range(2):
        torch.manual_seed(0)
        answers.append(policy(np.ones((3, 3)), np.ones(3, bool)))
        policy(np.full((3, 3), 1e6), np.ones(3, bool))
    assert np.array_equal(*answers)


def test_checkpoints_hold_both_normalizers(file, tmp_path):
    flags = ["--env-id", probe(file, "RandomEnds"), *SMALL, "--total-timesteps", 96]
    names = train(file, tmp_path, *flags)
    checkpoint = torch.load(only_run(tmp_path) / "checkpoint.pt", weights_only=True)
    assert "return_moments" in checkpoint
    assert same(checkpoint["return_moments"], names["return_moments"].state_dict())
    assert checkpoint["return_moments"]["count"] > 50
    assert checkpoint["agent"]["obs_moments.count"] == 99
    resumed = train(file, tmp_path, "--resume", only_run(tmp_path), "--total-timesteps", 192)
    assert resumed["return_moments"].count > checkpoint["return_moments"]["count"]
    assert resumed["agent"].obs_moments.count == 99 + 99


def test_advantages_are_of_the_scaled_rewards(file, tmp_path):
    """core 5 and continuous 8 together, against a slow reference that walks each episode."""
    flags = ["--env-id", probe(file, "RandomEnds"), *SMALL, "--gae-lambda", 0.7]
    names = train(file, tmp_path, *flags, "--total-timesteps", 288)
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
        agent, mb, adv = copy.deepcopy(names["agent"]), names["mb"], names["adv"]
        policy = torch.distributions.Normal(agent.actor(names["b_obs"][mb]), agent.log_std.exp())
        value = agent.critic(names["b_obs"][mb])[:, 0]
        ratio = torch.exp(policy.log_prob(names["b_actions"][mb]).sum(1) - names["b_log_probs"][mb])
        gain = torch.minimum(ratio * adv, torch.clip(ratio, 0.8, 1.2) * adv)
        error = (value - names["b_returns"][mb]) ** 2
        loss = -gain.mean() + 0.7 * error.mean() / 2 - 0.3 * policy.entropy().sum(1).mean()
        expected = torch.autograd.grad(loss, list(agent.parameters()))
        expected = torch.cat([gradient.flatten() for gradient in expected])
        torch.testing.assert_close(flat_grad(names["agent"]), expected, atol=1e-5, rtol=1e-3)

    flags = "--vf-coef 0.7 --ent-coef 0.3 --no-clip-vloss --max-grad-norm 1e9 --learning-rate 0.01"
    train(file, tmp_path, *TARGET, "--total-timesteps", 192, *flags.split(), on_update=look)


# what it refuses, and what it takes


@pytest.mark.parametrize(
    ("env_id", "words"),
    [
        ("CartPole-v1", "continuous actions are needed"),
        ("Probe/MultiDiscreteActions-v0", "continuous actions are needed"),
        ("Probe/IntegerActions-v0", "continuous actions are needed"),
        ("NoSuchEnv-v0", "NoSuchEnv"),
    ],
)
def test_other_actions_are_refused(file, tmp_path, env_id, words):
    with pytest.raises(SystemExit, match=f"^cannot train on {env_id}: .*{words}"):
        train(file, tmp_path, "--env-id", env_id, *SMALL, "--total-timesteps", 96)
    assert not (tmp_path / "runs").exists()


def test_scalar_actions_have_a_log_density(file, tmp_path):
    """Of an action without a shape, there is nothing to sum over."""
    flags = ["--env-id", "Probe/ScalarActions-v0", *SMALL, "--total-timesteps", 96]
    names = train(file, tmp_path, *flags)
    agent, mb = names["agent"], names["mb"]
    assert agent.log_std.shape == () and names["actions"].shape == (32, 3)
    mean = torch.randn(7)
    expected = torch.distributions.Normal(mean, agent.log_std.exp()).log_prob(torch.ones(7))
    torch.testing.assert_close(names["log_prob"](mean, agent.log_std, torch.ones(7)), expected)
    assert names["log_ratio"].shape == mb.shape


def test_a_machine_that_cannot_draw_says_so(file, tmp_path, monkeypatch):
    """Before anything is written."""
    monkeypatch.setenv("MUJOCO_GL", "disabled")  # which MuJoCo accepts, and cannot draw with
    flags = ["--env-id", "Hopper-v4", "--capture-video", "--total-timesteps", 10_000]
    try:
        train(file, tmp_path, *flags)
        message = "trained"
    except (SystemExit, RuntimeError) as error:
        message = str(error)
    assert message.startswith("cannot train on Hopper-v4: "), message
    assert "MUJOCO_GL must be one of" in message and not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "env_id", ["HalfCheetah-v5", "Hopper-v4", "dm_control/cartpole-balance-v0"]
)
def test_environments_of_all_kinds(file, tmp_path, env_id):
    if env_id.startswith("dm_control") and not importlib.util.find_spec("dm_control"):
        pytest.skip("needs dm_control")
    for name in list(gym.registry):
        if name.startswith("dm_control/"):  # the file registers them itself
            gym.registry.pop(name)
    sys.modules.pop("shimmy", None)
    names = train(file, tmp_path, "--env-id", env_id, *SMALL, "--total-timesteps", 96)
    obs_dim = {"HalfCheetah-v5": 17, "Hopper-v4": 11, "dm_control/cartpole-balance-v0": 5}[env_id]
    assert names["obs"].shape == (33, 3, obs_dim) and np.isfinite(names["obs"]).all()


def test_dictionaries_are_flattened(file, tmp_path):
    names = train(file, tmp_path, "--env-id", "Probe/DictAndScalar-v0", *PENDULUM[2:])
    assert names["obs"].shape == (33, 3, 1 + 3), "a number, and one of three"


# learning


@pytest.mark.slow  # by default, PPO learns CartPole, DDPG Pendulum, and this file its probes
def test_learns_inverted_pendulum(file, tmp_path):
    flags = "--total-timesteps 40960 --num-envs 4 --num-steps 256 --num-minibatches 8"
    flags = ["--env-id", "InvertedPendulum-v5", *flags.split(), "--learning-rate", 0.002]
    train(file, tmp_path, *flags)
    returns = [value for _, value in scalars(only_run(tmp_path))["charts/episodic_return"]]
    assert np.mean(returns[:20]) < 20 and np.mean(returns[-10:]) > 500


def test_same_seed_same_bits(file, tmp_path):
    flags = ["--env-id", "Hopper-v5", *SMALL, "--total-timesteps", 96 * 4]
    for name, seed in {"a": 1, "b": 1, "c": 2}.items():
        train(file, tmp_path / name, *flags, "--seed", seed)
    a, b, c = (weights(only_run(tmp_path / name)) for name in "abc")
    assert same(a, b) and not same(a, c)
