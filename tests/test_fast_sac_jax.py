"""cleanrl/fast_sac_jax.py. test_fastsac_N guards detail N of docs/rl-algorithms/fast-sac.md, the
others those of fast-td3.md, sac.md, td3.md, ddpg.md, c51.md and ppo-continuous-action-jax.md.

What the file has in common with fast_td3_jax.py and sac_continuous_action_jax.py is tested by their
tests, which run here, too. Networks and updates are compared with equations in double precision.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from tests.harness import compiled_quickly
from tests.test_c51 import projected
from tests.test_dqn_jax import leaves
from tests.test_fast_td3_jax import (  # noqa: F401  the imported tests run here too
    begin,
    changed,
    follow_brax,
    made_up,
    shaken,
    test_a_buffer_that_does_not_fit_in_memory_is_refused,
    test_actions_of_probes,
    test_compiled_and_plain_compute_the_same,
    test_every_episode_is_logged_at_its_step,
    test_fasttd3_1_td3_2_updates_after_each_step,
    test_fasttd3_2_ddpg_2_transitions_of_n_steps,
    test_fasttd3_5_c51_2_projection_matches_a_loop_over_the_atoms,
    test_fasttd3_6_batches_are_normalized_when_they_are_sampled,
    test_fasttd3_6_moments_of_all_that_was_seen,
    test_fasttd3_9_the_critics_see_more,
    test_fasttd3_10_physics_3_a_simulation_that_blows_up,
    test_learns_cartpole_balance,
    test_pushes_can_be_switched_off,
    test_resume_is_the_uninterrupted_run,
    test_same_seed_same_bits,
    test_td3_1_two_networks_are_computed_as_one,
    test_values_of_probes,
    test_videos,
)
from tests.test_sac_continuous_action_jax import (  # noqa: F401
    dense,
    doubles,
    squash,
    test_sac_1_densities_of_squashed_actions,
    test_sac_1_draws_are_gaussian,
)

# the networks, in double precision


def narrowed(params, x):
    """The hidden layers: dense, normalized, SiLU."""
    for i in range(3):
        x = dense(params[f"Dense_{i}"], x)
        x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, correction=0) + 1e-6).sqrt()
        norm = params[f"LayerNorm_{i}"]
        x = torch.nn.functional.silu(x * norm["scale"].unsqueeze(-2) + norm["bias"].unsqueeze(-2))
    return x


def policy(params, obs):
    """Mean and logarithm of the deviation of the actor, who sees the first two columns."""
    params = params["params"]
    hidden = narrowed(params, torch.as_tensor(np.asarray(obs, float))[:, :2])
    log_std = -5 + 2.5 * (1 + dense(params["Dense_4"], hidden).tanh())
    return dense(params["Dense_3"], hidden), log_std


def log_pmfs(params, obs, actions):
    """Of both Q-networks, which see the last two columns."""
    obs, params = torch.as_tensor(np.asarray(obs, float))[:, 2:], params["params"]
    hidden = narrowed(params, torch.cat([obs, actions], 1))
    return dense(params["Dense_3"], hidden).log_softmax(-1)


def check_step(before, after, name, params, loss, decay=0.1):
    """Whether an agent made the first step of AdamW, with these decays of its moments."""
    grads = [x.numpy() for x in torch.autograd.grad(loss, jax.tree.leaves(params))]
    moments = after[f"{name}_optimizer"][0]
    rows = leaves(before[name]), leaves(after[name]), leaves(moments.mu), leaves(moments.nu)
    for grad, old, new, mean, square in zip(grads, *rows, strict=True):
        atol = 1e-5 * max(1, np.abs(grad).max())
        np.testing.assert_allclose(mean, 0.1 * grad, rtol=1e-3, atol=atol)
        np.testing.assert_allclose(square, 0.05 * grad**2, rtol=2e-3, atol=atol)
        expected = old - 0.003 * (grad / (np.abs(grad) + 1e-8) + decay * old)
        is_clear = np.abs(grad) > 1e-4 * np.abs(grad).max()  # else its sign is that of a rounding
        assert is_clear.any()
        np.testing.assert_allclose(new[is_clear], expected[is_clear], rtol=1e-4, atol=3e-6)


def spread(agent):
    """The agent with policies and distributions that differ between observations."""
    for name, layers, scale in (
        ("actor", ("Dense_3", "Dense_4"), 2),
        ("q_networks", ("Dense_3",), 8),
        ("target_q_networks", ("Dense_3",), 8),
    ):
        for layer in layers:
            last = agent[name]["params"][layer]
            last |= {"kernel": scale * last["kernel"], "bias": 0 * last["bias"]}
    return agent | {"log_alpha": jnp.log(jnp.float32(0.3))}


def test_fastsac_1_networks_that_normalize_their_layers(file, tmp_path):
    """Outputs for random weights, of layers that are half as wide each."""
    names, run, _ = begin(file)
    agent, b = shaken(run["agent"]), made_up()
    got = names["actor"].apply(agent["actor"], b["obs"][:, :2])
    for one, other in zip(got, policy(doubles(agent["actor"]), b["obs"]), strict=True):
        np.testing.assert_allclose(one, other.detach(), atol=1e-4)
    got = names["q_networks"].apply(agent["q_networks"], b["obs"][:, 2:], b["actions"])
    actions = torch.as_tensor(np.asarray(b["actions"], float))
    expected = log_pmfs(doubles(agent["q_networks"]), b["obs"], actions).detach()
    assert got.shape == (2, 8, 11)
    np.testing.assert_allclose(got, expected, atol=1e-4)
    for name, first, width, out in (("actor", 2, 12, 2), ("q_networks", 4, 16, 11)):
        layers = run["agent"][name]["params"]
        shapes = [layers[f"Dense_{i}"]["kernel"].shape[-2:] for i in range(4)]
        widths = [first, width, width // 2, width // 4, out]
        assert shapes == list(itertools.pairwise(widths))
        assert layers["LayerNorm_2"]["scale"].shape[-1] == width // 4


def test_fastsac_2_the_first_policy_and_the_bounds_of_its_deviation(file, tmp_path):
    """It has a mean of 0 and a deviation of exp(-2.5) everywhere; later, from exp(-5) to 1."""
    names, run, _ = begin(file)
    obs = np.random.default_rng(1).standard_normal((50, 2)).astype(np.float32)
    mean, log_std = names["actor"].apply(run["agent"]["actor"], obs)
    np.testing.assert_array_equal(mean, np.zeros((50, 2)))
    np.testing.assert_array_equal(log_std, np.full((50, 2), -2.5))
    actor = jax.tree.map(np.array, run["agent"]["actor"])
    for bias, expected in {-99: -5, 99: 0, 0.5: -2.5 + 2.5 * np.tanh(0.5)}.items():
        actor["params"]["Dense_4"]["bias"][:] = bias
        _, log_std = names["actor"].apply(actor, obs)
        np.testing.assert_allclose(log_std, np.full((50, 2), expected), atol=1e-5)


def test_fasttd3_6_normalization(file, tmp_path):
    """With 0.01 added to the deviation; of the first columns alone, too; and in load_policy."""
    names, run, _ = begin(file)
    agent, obs = shaken(run["agent"]), np.float32(np.random.default_rng(2).normal(size=(3, 4)))
    moments = agent["obs_moments"] | {"var": jnp.float32([1e-12, 4, 1, 2])}
    expected = (obs - moments["mean"]) / (np.sqrt(moments["var"]) + 0.01)
    for columns in (4, 2):
        got = names["normalize"](moments, obs[:, :columns])
        np.testing.assert_allclose(got, expected[:, :columns], rtol=1e-5)
    envs = names["make_envs"](names["args"], 1)
    checkpoint = {"agent": jax.tree.map(np.array, agent | {"obs_moments": moments})}
    got = names["load_policy"](checkpoint, envs)(obs[:, :2], None)
    mean, _ = policy(doubles(agent["actor"]), expected)
    np.testing.assert_allclose(got, mean.tanh().detach(), atol=1e-5)


def test_sac_1_physics_1_physics_2_what_happens_is_what_is_stored(file, tmp_path):
    """Random actions first, then samples of the policy of normalized observations, as they are."""

    def choose(params, world, seen, act_key):
        policy_key, random_key, place_key = jax.random.split(act_key, 3)
        actions, _ = squash(*policy(params, seen), policy_key)
        return actions.detach().numpy(), random_key, place_key

    ends, worlds = follow_brax(file, choose)
    assert len(ends) == 40 and all("std" not in world for pair in worlds for world in pair)


# learning


@functools.cache
def updated(file):
    """An agent before and after an update of the Q-networks, its batch and the losses."""
    names, run, _ = begin(file, "--target-entropy", -0.5)
    agent, b, key = spread(shaken(run["agent"])), made_up(), jax.random.key(1)
    after, losses = compiled_quickly(lambda: names["update_q_networks"](agent, b, key))
    with torch.no_grad():
        next_policy = policy(doubles(agent["actor"]), b["next_obs"])
        next_actions, next_log_probs = squash(*next_policy, key)
    return agent, after, b, losses, next_actions, next_log_probs.numpy()


def test_fastsac_3_sac_3_the_update_of_the_q_networks(file, tmp_path):
    """Cross-entropy of each network with the distribution of its own target, moved atom by atom.

    The entropy of the next action, in units of reward, moves all atoms; neither it nor a value
    follows a termination. AdamW shrinks all weights."""
    agent, after, b, losses, next_actions, next_log_probs = updated(file)
    atoms, params = np.linspace(-5, 5, 11), doubles(agent["q_networks"])
    next_pmfs = log_pmfs(doubles(agent["target_q_networks"]), b["next_obs"], next_actions)
    next_pmfs = next_pmfs.exp().detach().numpy()
    assert np.abs(next_pmfs[0] - next_pmfs[1]).max() > 0.2 and np.abs(next_log_probs).max() > 1
    targets = np.zeros((2, 8, 11))
    for network in range(2):
        for row in range(8):
            discount = 0 if b["terminated"][row] else float(b["discounts"][row])
            returns = float(b["rewards"][row]) + discount * (atoms - 0.3 * next_log_probs[row])
            pmf = next_pmfs[network, row].tolist()
            targets[network, row] = projected(pmf, returns.tolist(), atoms.tolist())
    got = log_pmfs(params, b["obs"], torch.as_tensor(np.asarray(b["actions"], float)))
    loss = -(torch.tensor(targets) * got).sum(-1).mean(1).sum()
    assert losses["qf_loss"] == pytest.approx(loss.item() / 2, rel=1e-4)
    mean = (got.exp() * torch.tensor(atoms)).sum(-1).mean().item()
    assert losses["qf_values"] == pytest.approx(mean, abs=1e-4)
    check_step(agent, after, "q_networks", params, loss)
    parts = ("q_networks", "log_alpha")
    assert changed(agent, after) == {*parts, *(f"{name}_optimizer" for name in parts)}


def test_fastsac_4_the_temperature_learns_at_each_update(file, tmp_path):
    """From the entropy of the next actions, towards -0.5 for each of both dimensions; no decay."""
    agent, after, _, losses, _, next_log_probs = updated(file)
    log_alpha = torch.tensor(float(agent["log_alpha"]), dtype=float, requires_grad=True)
    loss = -(log_alpha.exp() * (torch.tensor(next_log_probs) - 1)).mean()
    assert losses["alpha"] == pytest.approx(0.3, rel=1e-5)
    assert losses["alpha_loss"] == pytest.approx(loss.item(), rel=1e-3)
    check_step(agent, after, "log_alpha", log_alpha, loss, decay=0)


def test_fastsac_4_the_temperature_and_the_entropy_at_first(file, tmp_path):
    names, run, _ = begin(file)
    assert np.exp(run["agent"]["log_alpha"]) == pytest.approx(0.001, rel=1e-5)
    assert names["target_entropy"] == 0
    names, run, _ = begin(file, "--initial-alpha", 0.5, "--target-entropy", -1.5)
    assert np.exp(run["agent"]["log_alpha"]) == pytest.approx(0.5, rel=1e-5)
    assert names["target_entropy"] == -3


def test_fastsac_3_the_actor_climbs_entropy_and_the_mean_of_both_values(file, tmp_path):
    names, run, _ = begin(file)
    agent, b, key = spread(shaken(run["agent"])), made_up(), jax.random.key(1)
    after, losses = compiled_quickly(lambda: names["update_actor"](agent, {"x": 1}, b["obs"], key))
    params = doubles(agent["actor"])
    actions, log_probs = squash(*policy(params, b["obs"]), key)
    values = log_pmfs(doubles(agent["q_networks"]), b["obs"], actions).exp()
    values = (values * torch.linspace(-5, 5, 11, dtype=float)).sum(-1)
    assert (values[0] - values[1]).abs().min() > 1e-3, "the mean is not the minimum"
    loss = (0.3 * log_probs - values.mean(0)).mean()
    assert losses == {"x": 1, "actor_loss": pytest.approx(loss.item(), rel=1e-4, abs=1e-5)}
    check_step(agent, after, "actor", params, loss)
    assert changed(agent, after) == {"actor", "actor_optimizer"}


def test_fastsac_5_weights_decay(file, tmp_path):
    """By the learning rate times the decay, where there is no gradient; not the temperature."""
    names, run, _ = begin(file)
    agent = shaken(run["agent"])
    for name, decay in {"actor": 0.1, "q_networks": 0.1, "log_alpha": 0}.items():
        zeros = jax.tree.map(jnp.zeros_like, agent[name])
        optimizer = names["optimizers"][name]
        updates, _ = optimizer.update(zeros, agent[f"{name}_optimizer"], agent[name])
        for update, x in zip(leaves(updates), leaves(agent[name]), strict=True):
            np.testing.assert_allclose(update, -0.003 * decay * x, rtol=1e-5)


def test_fastsac_4_each_step_trains_the_temperature(file, tmp_path):
    """As often as the Q-networks; what is logged is that of the last update."""
    _, run, further = begin(file, "--num-updates", 3, "--policy-frequency", 2)
    for now in range(1, 14):
        before, (run, losses, _) = run, further(run)
        updates = 3 * max(0, now - 9)
        assert int(run["agent"]["log_alpha_optimizer"][0].count) == updates
        moved = abs(float(run["agent"]["log_alpha"] - before["agent"]["log_alpha"]))
        assert (moved > 0) == (now > 9) and moved < 3.1 * 0.003
        if now > 9:
            nearby = sorted(float(np.exp(x["agent"]["log_alpha"])) for x in (before, run))
            assert nearby[0] - 1e-6 <= losses["alpha"] <= nearby[1] + 1e-6
