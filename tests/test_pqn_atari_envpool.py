"""cleanrl/pqn_atari_envpool.py. The pools are those of ppo_atari_envpool.py, where they are tested.

test_pqn_N guards detail N of docs/rl-algorithms/pqn.md; tests/mutations shows that each test can
fail. The LSTM's file imports the tests that hold for it too.
"""

import copy

import numpy as np
import pytest
import torch

from tests.harness import flat_grad, only_run, probe, scalars, train
from tests.test_dqn import play
from tests.test_ppo_atari import images_of
from tests.test_ppo_atari_envpool import (  # noqa: F401  the imported tests run here on this file
    NumberedPool,
    envpool,
    test_episodes_are_logged_where_they_end,
    test_pools_have_the_settings_of_the_details,
    test_videos_of_training_are_refused,
)
from tests.test_ppo_atari_envpool import (
    test_core_4_the_optimizer_sees_the_learning_rate_fall as check_learning_rates,
)
from tests.test_pqn import lambda_return, radam

SMALL = "--num-envs 4 --num-steps 8 --num-minibatches 2 --update-epochs 1 --total-timesteps 32"
SMALL = (*SMALL.split(), "--gamma", 0.9, "--learning-rate", 0.001)


def normalize(x, norm):
    """Over all numbers of a row, then scale and shift of each number."""
    rows = x.flatten(1)
    rows = rows - rows.mean(1, keepdim=True)
    rows = rows / (rows.square().mean(1, keepdim=True) + 1e-5).sqrt()
    return rows.view_as(x) * norm.weight + norm.bias


def features_by_hand(network, obs):
    """What the convolutions and the layer behind them make of images, step by step."""
    layers = [layer for layer in network.network if hasattr(layer, "weight")]
    x = obs.float() / 255
    for layer, norm, stride in zip(layers[:6:2], layers[1:6:2], (4, 2, 1), strict=True):
        x = torch.nn.functional.conv2d(x, layer.weight, layer.bias, stride)
        x = normalize(x, norm).clamp(min=0)
    x = x.flatten(1) @ layers[6].weight.T + layers[6].bias
    return normalize(x, layers[7]).clamp(min=0)


def disturb(network):
    """Shift all parameters: scales and shifts of normalized layers are not what they were."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))


def values_by_hand(network, obs):
    hidden = features_by_hand(network, obs)
    return hidden @ network.q_values.weight.T + network.q_values.bias


def random_ends(file, folder, *flags, **kwargs):
    return train(file, folder, "--env-id", probe(file, "RandomEnds"), *SMALL, *flags, **kwargs)


# the details


def test_pqn_2_layers_are_normalized(file, tmp_path):
    """Against the formula, after some updates, with pixels between 0 and 1."""
    network = random_ends(file, tmp_path)["q_network"]
    norms = [layer for layer in network.network if isinstance(layer, torch.nn.LayerNorm)]
    assert len(norms) == 4 and all(norm.weight.std() > 0 for norm in norms), "scale is learned"
    disturb(network)
    obs = torch.randint(256, (3, 4, 84, 84), dtype=torch.uint8)
    with torch.no_grad():
        torch.testing.assert_close(network(obs), values_by_hand(network, obs), atol=1e-4, rtol=1e-3)


def test_pqn_3_orthogonal_weights_and_zero_biases(file, tmp_path):
    seen = []

    def look(names):
        seen.append(copy.deepcopy(names["q_network"]))

    random_ends(file, tmp_path, on_update=look)
    layers = [layer for layer in seen[0].network if isinstance(layer, torch.nn.Conv2d)]
    shapes = [(32, layers[0].in_channels, 8, 8), (64, 32, 4, 4), (64, 64, 3, 3)]
    assert [tuple(layer.weight.shape) for layer in layers] == shapes
    linear = [layer for layer in seen[0].network if isinstance(layer, torch.nn.Linear)]
    for layer in (*layers, *linear, seen[0].q_values):
        weight = layer.weight.flatten(1)
        expected = 2 * torch.eye(len(weight))
        torch.testing.assert_close(weight @ weight.T, expected, atol=1e-4, rtol=0)
        assert layer.bias.abs().max() == 0


def test_pqn_4_epsilon_falls_linearly(file, tmp_path, monkeypatch):
    """At a chance of 0.5, actions are not the best while epsilon is more, and then they are."""
    seen = []

    def look(names):
        if names["global_step"] == 32 * len(seen):  # only the first update knows who acted
            return
        obs = names["obs"][:-1].flatten(0, 1)
        with torch.no_grad():
            best = names["q_network"](obs).argmax(1).view(8, 4)
        steps = 32 * len(seen) + 4 * np.arange(8)
        epsilons = np.maximum(0.2, 0.9 - 0.7 * steps / 48)
        is_random = torch.from_numpy(epsilons > 0.5)[:, None]
        assert torch.equal(names["actions"], torch.where(is_random, 1 - best, best))
        seen.append((32 * len(seen) + 32, epsilons[-1]))

    monkeypatch.setattr(torch, "rand_like", lambda x: torch.full_like(x, 0.5))
    monkeypatch.setattr(torch, "randint_like", lambda x, high: high - 1 - x)
    flags = "--total-timesteps 64 --exploration-fraction 0.75 --start-e 0.9 --end-e 0.2".split()
    random_ends(file, tmp_path, *flags, on_update=look)
    logged = scalars(only_run(tmp_path))["charts/epsilon"]
    np.testing.assert_allclose(logged, seen, rtol=1e-6)


def test_pqn_4_so_many_actions_are_random(file, tmp_path):
    """Half of the random actions are not the best one of two."""
    names = random_ends(file, tmp_path)
    obs = torch.randint(256, (4, 4, 84, 84), dtype=torch.uint8)
    with torch.no_grad():
        best_values, best = names["q_network"](obs).max(1)
    for epsilon, others in ((0, 0), (0.5, 0.25), (1, 0.5)):
        names["epsilon"].fill_(epsilon)
        actions, values = zip(*(names["act"](obs) for _ in range(75)), strict=True)
        torch.testing.assert_close(values[0], best_values)
        differ = (torch.stack(actions) != best).double()
        assert differ.mean() == pytest.approx(others, abs=0.1 * (epsilon > 0))
        if epsilon == 0.5:
            together = torch.corrcoef(differ.T).triu(1).sum() / 6  # of each pair
            assert together.abs() < 0.17, "each environment draws by itself"


def test_pqn_5_targets(file, tmp_path):
    """Against n-step returns, episode by episode; the values are those of the network that acted.

    Truncated episodes are bootstrapped from their own last observation, terminated ones are not.
    """
    seen = []

    def look(names):
        seen.append(names["values"].clone())
        if len(seen) > 1:
            return
        with torch.no_grad():
            values = names["q_network"](names["obs"].flatten(0, 1)).amax(1).view(33, 4)
        torch.testing.assert_close(names["values"], values, atol=1e-5, rtol=1e-4)

    names = random_ends(file, tmp_path, *LONG_ROLLOUT, "--q-lambda", 0.7, on_update=look)
    rewards, terminated, is_last = (names[name] for name in ("rewards", "terminated", "is_last"))
    check_targets(rewards, seen[-1].numpy(), terminated, is_last, names["targets"])
    torch.testing.assert_close(names["b_targets"].view(32, 4).numpy(), names["targets"])


LONG_ROLLOUT = ("--num-steps", 32, "--num-minibatches", 1, "--total-timesteps", 128)


def check_targets(rewards, values, terminated, is_last, targets):
    for t, e in zip(*np.nonzero(~is_last[:-1]), strict=True):
        expected = lambda_return(t, e, rewards, values, terminated, is_last, 0.9, 0.7)
        assert targets[t, e] == pytest.approx(expected, abs=1e-4)
    ends = is_last[1:] & ~is_last[:-1]
    assert (terminated & ends).sum() > 5 and (ends & ~terminated).sum() > 5, "both kinds of end"
    assert {-1, 1} <= set(rewards.flatten().tolist()) <= {-1, 0, 1}, "clipped for learning"


def test_pqn_6_reset_rows_weigh_nothing(file, tmp_path):
    """The gradient is that of the textbook loss over the other rows; so are the metrics."""
    left_out, seen = [], []

    def look(names):
        np.testing.assert_array_equal(names["b_is_real"], ~names["is_last"][:-1].flatten())
        network = copy.deepcopy(names["q_network"])
        mb = names["mb"][names["b_is_real"][names["mb"]] > 0]
        left_out.append(len(names["mb"]) - len(mb))
        q_values = values_by_hand(network, names["b_obs"][mb])
        q_values = q_values[range(len(mb)), names["b_actions"][mb]]
        loss = (q_values - names["b_targets"][mb]).square().mean()
        expected = torch.autograd.grad(loss, list(network.parameters()))
        expected = torch.cat([g.flatten() for g in expected])
        torch.testing.assert_close(flat_grad(names["q_network"]), expected, atol=1e-4, rtol=1e-3)
        seen.append((loss.item(), q_values.mean().item()))

    random_ends(file, tmp_path, "--max-grad-norm", 1e9, on_update=look)
    assert len(left_out) == 2 and sum(left_out) > 2
    logged = scalars(only_run(tmp_path))
    charts = ("episodic_return", "episodic_length", "avg_episodic_return")
    charts = {f"charts/{name}" for name in (*charts, "SPS", "epsilon", "learning_rate")}
    assert logged.keys() == charts | {"losses/td_loss", "losses/q_values"}
    for name, value in zip(("td_loss", "q_values"), seen[-1], strict=True):
        assert logged[f"losses/{name}"] == [(32, pytest.approx(value, rel=1e-3))]


def test_pqn_6_every_epoch_shuffles_and_covers_the_rollout(file, tmp_path):
    minibatches = []

    def look(names):
        minibatches.append(names["mb"].tolist())

    random_ends(file, tmp_path, "--update-epochs", 2, on_update=look)
    epochs = [minibatches[0] + minibatches[1], minibatches[2] + minibatches[3]]
    assert all(sorted(epoch) == list(range(32)) for epoch in epochs)
    assert epochs[0] != epochs[1] and list(range(32)) not in epochs


def test_pqn_7_pqn_9_rectified_adam_of_clipped_gradients(file, tmp_path):
    """Of the last layer, which has the largest gradients."""
    weights, grads, norms = [], [], []

    def look(names):
        layer = names["q_network"].q_values
        weights.append(torch.nn.utils.parameters_to_vector(layer.parameters()).double().detach())
        grads.append(flat_grad(layer).double().numpy())
        norms.append(flat_grad(names["q_network"]).norm().item())

    flags = ("--no-anneal-lr", "--update-epochs", 4, "--max-grad-norm", 0.1)
    random_ends(file, tmp_path, *flags, on_update=look)
    assert len(weights) == 8 and norms == pytest.approx([0.1] * 8, rel=1e-3)
    moments = radam(weights[0].numpy(), grads, 0.001)
    for found, expected in zip(weights[1:], moments, strict=False):
        moved = np.abs(grads).max(0) > 1e-5  # PyTorch adds epsilon elsewhere
        np.testing.assert_allclose(found.numpy()[moved], expected[moved], atol=2e-5)


def test_pqn_8_the_optimizer_sees_the_learning_rate_fall(file, tmp_path):
    check_learning_rates(file, tmp_path)


# pools that take turns


class StripedPool(NumberedPool):
    """The first row of an image is its number, as many rows below are white."""

    def observe(self):
        images = super().observe()
        is_white = np.arange(1, 84) <= images[:, 0, :1, 0]
        images[:, :, 1:] = 255 * is_white[:, None, :, None]
        return images


def test_pools_are_not_mixed_up(file, tmp_path, monkeypatch):
    """Every row holds its own environment's observation, action, reward and value."""
    made, looked = [], []

    def make_numbered(num_envs, **settings):
        made.append(StripedPool(num_envs, len(made) % 2))  # two to look at, two to train with
        return made[-1]

    def look(names):
        if looked:
            return
        looked.append(True)
        first = torch.tensor([0, 20, 50, 70])
        assert torch.equal(names["obs"][:, :, 0, 0, 0], first + torch.arange(9)[:, None])
        actions = np.concatenate([np.stack(pool.sent) for pool in made[2:]], axis=1)
        np.testing.assert_array_equal(names["actions"], actions)
        np.testing.assert_array_equal(names["rewards"], 2 * actions - 1)
        assert all(len({*row.tolist()}) == 2 for row in actions.T), "both actions in each"
        with torch.no_grad():
            values = names["q_network"](names["obs"].flatten(0, 1)).amax(1).view(9, 4)
        torch.testing.assert_close(names["values"], values, atol=1e-5, rtol=0)
        assert values.std(1).min() > 1e-3, "the values must differ"

    monkeypatch.setattr(envpool, "make_gymnasium", make_numbered)
    train(file, tmp_path, *SMALL, "--num-pools", 2, "--end-e", 1, on_update=look)
    assert looked and len(made) == 4


# known answers

PROBE_FLAGS = (
    *"--num-envs 8 --num-steps 4 --num-minibatches 2 --learning-rate 0.01 --gamma 0.5".split(),
    *"--total-timesteps 256 --end-e 0.3".split(),
)


def test_values_of_probes(file, tmp_path):
    """Episodes that terminate are worth their reward, those that are cut short go on."""
    names = train(file, tmp_path, "--env-id", probe(file, "TwoEnds"), *PROBE_FLAGS)
    with torch.no_grad():
        learned = names["q_network"](images_of([[-1] * 4, [1] * 4]))
    expected = torch.tensor([[1.0, 1.0], [2.0, 2.0]])
    torch.testing.assert_close(learned, expected, atol=0.25, rtol=0)


def test_actions_of_probes(file, tmp_path):
    """Acting through load_policy in fresh environments, as every evaluation does."""
    names = train(file, tmp_path, "--env-id", probe(file, "ActionAndObsMatter"), *PROBE_FLAGS)
    assert play(names, only_run(tmp_path)) == [1] * 80
