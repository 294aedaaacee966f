"""cleanrl/pqn.py. test_pqn_N guards detail N of docs/rl-algorithms/pqn.md.

tests/mutations shows that each test can fail. The files of the same family import the tests that
hold for them too.
"""

import copy

import numpy as np
import pytest
import torch

from tests import test_ppo
from tests.harness import flat_grad, only_run, probe, scalars, train
from tests.test_dqn import play, watch
from tests.test_ppo import (  # noqa: F401  the imported tests run here on this file
    test_other_autoreset_modes_are_refused,
    test_reset_rows_are_not_learned_from,
    test_same_seed_same_bits,
)

SMALL = "--num-envs 3 --num-steps 16 --num-minibatches 2 --update-epochs 2 --total-timesteps 192"
SMALL = (*SMALL.split(), "--gamma", 0.9, "--learning-rate", 0.001)


def is_first_update(names):
    """Whether the network is still the one that acted."""
    first = names["order"].tensor_split(names["args"].num_minibatches)[0]
    return names["_"] == 0 and torch.equal(names["mb"], first)


def values_by_hand(network, obs):
    """The values of all actions, with layer normalization written out."""
    for layer, norm in ((network.hidden1, network.norm1), (network.hidden2, network.norm2)):
        obs = obs @ layer.weight.T + layer.bias
        obs = (obs - obs.mean(1, keepdim=True)) / (obs.var(1, False, keepdim=True) + 1e-5).sqrt()
        obs = (obs * norm.weight + norm.bias).clamp(min=0)
    return obs @ network.q_values.weight.T + network.q_values.bias


def test_pqn_1_each_rollout_is_learned_from_and_dropped(file, tmp_path, monkeypatch):
    """What is learned from is what happened since the last update, no less and no more."""
    happened, before, rollouts = watch(file, monkeypatch), set(), []

    def look(names):
        if names["_"] > 0 or len(rollouts) == names["iteration"] + 1:
            return
        new = sorted((obs, action) for obs, action, *_ in happened.keys() - before)
        rows = zip(names["b_obs"].numpy(), names["b_actions"].tolist(), strict=True)
        assert sorted((obs.tobytes(), action) for obs, action in rows) == new
        rollouts.append(len(new))
        before.update(happened)

    names = train(file, tmp_path, "--env-id", probe(file, "RandomEnds"), *SMALL, on_update=look)
    assert names["obs"].shape[:2] == (17, 3)
    assert len(rollouts) == 4 and all(30 < rows < 48 for rows in rollouts)


def test_pqn_1_episodes_run_on_across_rollouts(file, tmp_path):
    test_ppo.test_core_1_episodes_run_on_across_rollouts(file, tmp_path)


def test_pqn_2_layers_are_normalized(file, tmp_path):
    """Against the formula, after some updates; the scale of a hidden layer is of no importance."""
    network = copy.deepcopy(train(file, tmp_path, *SMALL)["q_network"])
    obs = torch.randn(50, 4)
    with torch.no_grad():
        values = network(obs)
        torch.testing.assert_close(values, values_by_hand(network, obs), atol=1e-5, rtol=1e-4)
        for layer in (network.hidden1, network.hidden2):
            layer.weight.mul_(100)
            layer.bias.mul_(100)
        torch.testing.assert_close(network(obs), values, atol=1e-3, rtol=1e-2)
    assert network.norm1.weight.std() > 0, "scale and shift are learned"


def test_pqn_3_orthogonal_weights_and_zero_biases(file, tmp_path):
    seen = []
    keep = lambda names: seen.append(copy.deepcopy(names["q_network"]))  # noqa: E731
    train(file, tmp_path, *SMALL, on_update=keep)
    for layer in (seen[0].hidden1, seen[0].hidden2, seen[0].q_values):
        rows, columns = layer.weight.shape
        weight = layer.weight if rows <= columns else layer.weight.T
        expected = 2 * torch.eye(min(rows, columns))
        torch.testing.assert_close(weight @ weight.T, expected, atol=1e-5, rtol=0)
        assert layer.bias.abs().max() == 0


@pytest.mark.parametrize("num_envs", [1, 3])
def test_pqn_4_the_chance_of_a_random_action_falls_linearly(file, tmp_path, num_envs):
    """From start_e to end_e over the first quarter of the steps of all environments together."""
    seen = {}
    flags = (
        "--env-id Probe/ConstantValue-v0 --num-steps 2 --num-minibatches 1 --update-epochs 1 "
        "--total-timesteps 240 --exploration-fraction 0.25 --start-e 0.9 --end-e 0.2"
    ).split()

    def look(names):
        seen[names["global_step"]] = names["epsilon"]

    train(file, tmp_path, *flags, "--num-envs", num_envs, on_update=look)
    expected = {}
    for step in range(2 * num_envs, 241, 2 * num_envs):
        expected[step] = max(0.2, 0.9 - 0.7 * (step - num_envs) / 60)
    assert seen == pytest.approx(expected)
    assert dict(scalars(only_run(tmp_path))["charts/epsilon"]) == pytest.approx(expected)


@pytest.mark.parametrize("num_envs", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_pqn_4_so_many_actions_are_random(file, tmp_path, num_envs):
    """A network that learns nothing has one favorite: half of the random actions are the other."""
    flags = (
        "--env-id Probe/ActionMatters-v0 --num-steps 50 --num-minibatches 1 --update-epochs 1 "
        "--learning-rate 1e-12 --total-timesteps 7200 --exploration-fraction 0.5 --end-e 0.1"
    ).split()
    train(file, tmp_path, *flags, "--num-envs", num_envs)
    returns = np.array(scalars(only_run(tmp_path))["charts/episodic_return"])
    other = returns[:, 1] != np.sign(np.median(returns[-500:, 1]))
    assert len(other) == 3600
    expected = np.maximum(0.1, 1 - 0.9 * returns[:, 0] / 3600) / 2
    for part in range(6):  # 600 actions each
        piece = slice(600 * part, 600 * (part + 1))
        assert other[piece].mean() == pytest.approx(expected[piece].mean(), abs=0.07)


def test_pqn_4_other_actions_are_the_networks_best(file, tmp_path):
    taken = []

    def look(names):
        if is_first_update(names):
            with torch.no_grad():
                best = names["q_network"](names["b_obs"]).argmax(1)
            assert torch.equal(names["b_actions"], best)
            taken.extend(best.tolist())

    flags = (*SMALL, "--start-e", 0, "--end-e", 0, "--env-id", probe(file, "RandomEnds"))
    train(file, tmp_path, *flags, on_update=look)
    assert 10 < sum(taken) < len(taken) - 10, "each action must be the best one at times"


def lambda_return(t, e, rewards, values, terminated, is_last, gamma, q_lambda):
    """The mean of all n-step returns until the episode or the rollout ends, by powers of lambda."""
    n_step_returns, rewarded, discount = [], 0.0, 1.0
    for k in range(t, len(rewards)):
        rewarded += discount * float(rewards[k, e])
        discount *= gamma
        best_value = 0.0 if terminated[k, e] else float(values[k + 1, e])
        n_step_returns.append(rewarded + discount * best_value)
        if is_last[k + 1, e]:
            break
    weights = [(1 - q_lambda) * q_lambda**n for n in range(len(n_step_returns))]
    weights[-1] = q_lambda ** (len(n_step_returns) - 1)
    return sum(w * n_step_return for w, n_step_return in zip(weights, n_step_returns, strict=True))


@pytest.mark.parametrize("q_lambda", [0, 0.7, 1])
def test_pqn_5_targets(file, tmp_path, q_lambda):
    """Against n-step returns, episode by episode; the values are those of the network that acted.

    Truncated episodes are bootstrapped from their own last observation, terminated ones are not.
    """
    seen = []

    def look(names):
        if not is_first_update(names):
            return
        network, obs = names["q_network"], torch.from_numpy(names["obs"])
        with torch.no_grad():
            values = network(obs.flatten(0, 1)).amax(1).view(obs.shape[:2]).numpy()
        columns = [names[name] for name in ("rewards", "terminated", "is_last", "targets")]
        rewards, terminated, is_last, targets = columns
        real = [(t, e) for t, e in np.ndindex(rewards.shape) if not is_last[t, e]]
        for t, e in real:
            rollout = rewards, values, terminated, is_last
            expected = lambda_return(t, e, *rollout, 0.9, q_lambda)
            assert targets[t, e] == pytest.approx(expected, abs=1e-4)
        assert sorted(names["b_targets"].tolist()) == sorted(targets[t, e] for t, e in real)
        truncated = is_last[1:] & ~is_last[:-1] & ~terminated
        seen.append((terminated.sum(), truncated.sum(), len(real)))

    flags = (*SMALL, "--num-steps", 64, "--total-timesteps", 3 * 64 * 2, "--q-lambda", q_lambda)
    train(file, tmp_path, "--env-id", probe(file, "RandomEnds"), *flags, on_update=look)
    assert len(seen) == 2 and np.min(seen) > 5, "the rollouts must hold every case"


def test_pqn_6_every_epoch_shuffles_and_covers_the_rollout(file, tmp_path):
    test_ppo.test_core_6_every_epoch_shuffles_and_covers_the_rollout(file, tmp_path)


def test_pqn_6_the_loss_is_the_mean_squared_error(file, tmp_path):
    """The gradient at the optimizer is that of the textbook loss, row by row, by autograd."""

    def look(names):
        network, errors = copy.deepcopy(names["q_network"]), []
        for row in names["mb"].tolist():
            q_value = values_by_hand(network, names["b_obs"][row, None])[0, names["b_actions"][row]]
            errors.append((q_value - names["b_targets"][row]) ** 2)
        loss = sum(errors) / len(errors)
        expected = torch.autograd.grad(loss, list(network.parameters()))
        expected = torch.cat([g.flatten() for g in expected])
        torch.testing.assert_close(flat_grad(names["q_network"]), expected, atol=1e-4, rtol=1e-3)
        assert names["td_loss"].item() == pytest.approx(loss.item(), rel=1e-4)

    flags = (*SMALL, "--total-timesteps", 96, "--max-grad-norm", 1e9)
    train(file, tmp_path, "--env-id", probe(file, "RandomEnds"), *flags, on_update=look)


def radam(params, grads, learning_rate, beta1=0.9, beta2=0.999):
    """Parameters after each gradient, by the formulas of Liu et al. (2020)."""
    m, v, limit = np.zeros_like(params), np.zeros_like(params), 2 / (1 - beta2) - 1
    for t, grad in enumerate(grads, 1):
        m = beta1 * m + (1 - beta1) * grad
        v = beta2 * v + (1 - beta2) * grad**2
        length = limit - 2 * t * beta2**t / (1 - beta2**t)
        step = m / (1 - beta1**t)
        if length > 5:  # the variance of the adaptive learning rate is tractable
            numerator = (length - 4) * (length - 2) * limit
            rectification = (numerator / ((limit - 4) * (limit - 2) * length)) ** 0.5
            step = rectification * step / ((v / (1 - beta2**t)) ** 0.5 + 1e-8)
        params = params - learning_rate * step
        yield params


def test_pqn_7_rectified_adam(file, tmp_path):
    seen, grads = [], []

    def look(names):
        seen.append(torch.nn.utils.parameters_to_vector(names["q_network"].parameters()))
        grads.append(flat_grad(names["q_network"]).double().numpy())

    flags = (*SMALL, "--no-anneal-lr", "--env-id", probe(file, "RandomEnds"))
    train(file, tmp_path, *flags, on_update=look)
    seen = [params.detach().double().numpy() for params in seen]
    assert len(seen) == 16, "it is plain momentum until the sixth step"
    for params, expected in zip(seen[1:], radam(seen[0], grads, 0.001), strict=False):
        moved = np.abs(grads).max(0) > 1e-5  # PyTorch adds epsilon elsewhere
        np.testing.assert_allclose(params[moved], expected[moved], atol=2e-5)


def test_pqn_8_learning_rate_falls_linearly(file, tmp_path):
    test_ppo.test_core_4_learning_rate_falls_linearly(file, tmp_path)


def test_pqn_9_gradient_norm_is_clipped(file, tmp_path):
    norms = []
    flags = (*SMALL, "--max-grad-norm", 0.05, "--env-id", probe(file, "RandomEnds"))
    look = lambda names: norms.append(float(flat_grad(names["q_network"]).norm()))  # noqa: E731
    train(file, tmp_path, *flags, on_update=look)
    assert max(norms) <= 0.05 * 1.001
    assert np.median(norms) > 0.049, "most gradients must have been larger"


def test_metrics(file, tmp_path):
    seen = {}

    def look(names):
        values = names["q_values"].mean().item(), names["td_loss"].item()
        seen[names["global_step"]] = values, names["optimizer"].param_groups[0]["lr"]

    train(file, tmp_path, "--env-id", probe(file, "RandomEnds"), *SMALL, on_update=look)
    logged = scalars(only_run(tmp_path))
    charts = ("episodic_return", "episodic_length", "SPS", "epsilon", "learning_rate")
    charts = {f"charts/{name}" for name in charts}
    assert logged.keys() == charts | {"losses/td_loss", "losses/q_values"}
    assert [step for step, _ in logged["charts/SPS"]] == list(seen) == [48, 96, 144, 192]
    for step, ((q_value, loss), rate) in seen.items():
        assert dict(logged["losses/q_values"])[step] == pytest.approx(q_value, rel=1e-4)
        assert dict(logged["losses/td_loss"])[step] == pytest.approx(loss, rel=1e-4)
        assert dict(logged["charts/learning_rate"])[step] == pytest.approx(rate)


# known answers


PROBE_FLAGS = (
    "--total-timesteps 1536 --num-envs 8 --num-steps 16 --learning-rate 0.2 --gamma 0.5 --end-e 0.3"
).split()


@pytest.mark.parametrize(
    ("probe", "values"),
    [
        ("ConstantValue", {0: [1, 1]}),
        ("ValueFromObs", {-1: [-1, -1], 1: [1, 1]}),
        ("Discounting", {0: [0.5, 0.5], 1: [1, 1]}),
        ("ActionMatters", {0: [-1, 1]}),
        ("ActionAndObsMatter", {-1: [1, -1], 1: [-1, 1]}),
        ("TruncatedEveryStep", {0: [2, 2]}),
        ("TwoEnds", {-1: [1, 1], 1: [2, 2]}),
        ("MarkedLast", {0: [1.75, 1.75], 1 / 3: [1.5, 1.5], 2 / 3: [1, 1]}),
    ],
)
def test_values_of_probes(file, tmp_path, probe, values):
    names = train(file, tmp_path, "--env-id", f"Probe/{probe}-v0", *PROBE_FLAGS)
    with torch.no_grad():
        learned = names["q_network"](torch.tensor([[float(obs)] for obs in values]))
    expected = torch.tensor(list(values.values())).float()
    torch.testing.assert_close(learned, expected, atol=0.1, rtol=0)


@pytest.mark.parametrize("probe", ["ActionAndObsMatter", "ShiftedActions", "ImageObs", "ScalarObs"])
def test_actions_of_probes(file, tmp_path, probe):
    """Acting through load_policy in fresh environments, as every evaluation does."""
    names = train(file, tmp_path, "--env-id", f"Probe/{probe}-v0", *PROBE_FLAGS)
    assert play(names, only_run(tmp_path)) == [1] * 80


# learning


@pytest.mark.parametrize(
    "seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3))]
)
def test_learns_cartpole(file, tmp_path, seed):
    train(file, tmp_path, *FAST_CARTPOLE, "--seed", seed)
    returns = [value for _, value in scalars(only_run(tmp_path))["charts/episodic_return"]]
    assert np.mean(returns[-20:]) >= 120


FAST_CARTPOLE = (
    "--total-timesteps 40000 --num-envs 16 --num-steps 32 --learning-rate 0.001 --q-lambda 0.9 "
    "--exploration-fraction 0.3 --end-e 0.01 --num-minibatches 8"
).split()


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_learns_cartpole_with_the_defaults(file, tmp_path, seed):
    train(file, tmp_path, "--seed", seed)
    assert test_ppo.last_hundred(only_run(tmp_path)) >= 475
