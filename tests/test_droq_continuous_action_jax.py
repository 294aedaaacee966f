"""cleanrl/droq_continuous_action_jax.py. test_droq_N guards detail N of docs/rl-algorithms/droq.md,
test_sac_N and test_ddpg_N those of sac.md and ddpg.md."""

from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from tests.harness import same
from tests.test_ddpg_continuous_action_jax import (  # noqa: F401  the imported tests run here too
    COUNTS,
    always,
    begin,
    check_actions,
    check_losses,
    check_schedule,
    check_targets,
    follow,
    learn_pendulum,
    learn_probe,
    made_up,
    rates,
    shaken,
    test_a_buffer_that_does_not_fit_in_memory_is_refused,
    test_ddpg_1_a_loaded_policy_rescales_its_actions,
    test_ddpg_1_bounds_as_large_as_numbers_get_and_actions_without_a_shape,
    test_ddpg_1_every_action_has_its_own_bounds,
    test_ddpg_2_every_transition_is_as_likely,
    test_ddpg_2_the_ring_holds_what_happened_and_every_episode_is_logged,
    test_ddpg_3_a_resumed_run_acts_at_random_until_it_learns,
    test_integer_actions_are_refused,
    test_matrix_products_are_those_of_the_twin,
    test_resume_restores_everything,
    test_same_seed_same_bits,
    update_actor,
    update_critic,
    updates_of,
)
from tests.test_sac_continuous_action_jax import (
    batch_of,
    check_changes,
    check_step,
    dense,
    doubles,
    entropy_losses,
    policy,
    squash,
)


def test_droq_1_a_number_is_left_out_with_the_given_chance(file, tmp_path):
    """In either layer, and in each network and row for itself.

    Where all numbers before it are alike, and the last layer picks one of them, the value is 0 just
    where that number is left out, as layer normalization makes it negative.
    """
    names = begin(file, "--dropout", 0.2)
    b = made_up(names)
    params = jax.tree.map(np.zeros_like, names["agent"]["q_networks"])["params"]
    for i in range(2):
        params[f"LayerNorm_{i}"]["scale"][:] = params[f"Dense_{i}"]["bias"][:] = 1
    picks = np.broadcast_to(np.eye(256, dtype=np.float32)[:, None, :, None], (256, 2, 256, 1))

    def is_kept(params):
        def value(pick):
            picked = params | {"Dense_2": params["Dense_2"] | {"kernel": pick}}
            rngs = {"dropout": jax.random.key(3)}
            return names["q_networks"].apply({"params": picked}, b["obs"], b["actions"], rngs=rngs)

        return np.asarray(jax.vmap(value)(picks) > 0)

    second = is_kept(params)
    one = np.stack([np.eye(256, dtype=np.float32)] * 2)
    params["Dense_1"] = {"kernel": one, "bias": params["Dense_0"]["bias"] * 0}
    both = is_kept(params)
    assert second.shape == (256, 2, 8) and second.mean() == pytest.approx(0.8, abs=0.03)
    assert both.mean() == pytest.approx(0.8 * 0.8, abs=0.03) and not (both & ~second).any()
    assert np.abs(np.corrcoef(second.reshape(256, 16).T) - np.eye(16)).max() < 0.3


@pytest.mark.slow
def test_droq_1_targets_and_values_have_numbers_left_out(file, tmp_path):
    """Each with a key of its own; the actor sees such values too."""
    names, (key, next_key) = begin(file, "--dropout", 0.2), jax.random.split(jax.random.key(1))
    agent, b = shaken(names), made_up(names)

    def q_values(params, key, obs, actions):
        return names["q_networks"].apply(params, obs, actions, rngs={"dropout": key})

    def draw(obs, key):
        return names["sample"](*names["actor"].apply(agent["actor"], obs), key)

    alpha = jnp.exp(agent["log_alpha"])
    next_actions, next_log_probs = draw(b["next_obs"], next_key)
    next_values = q_values(agent["target_q_networks"], next_key, b["next_obs"], next_actions).min(0)
    next_values -= alpha * next_log_probs
    values = q_values(agent["q_networks"], key, b["obs"], b["actions"])
    loss = np.square(values - (b["rewards"] + 0.9 * next_values * ~b["terminated"])).mean()
    _, losses = update_critic(names, agent, b, key, next_key)
    assert losses["qf_loss"] == pytest.approx(float(loss), rel=1e-4)
    drawn, log_probs = draw(b["obs"], key)
    loss = (alpha * log_probs - q_values(agent["q_networks"], key, b["obs"], drawn).mean(0)).mean()
    _, losses = update_actor(names, agent, b["obs"], key)
    assert losses["actor_loss"] == pytest.approx(float(loss), rel=1e-4)
    others = q_values(agent["q_networks"], next_key, b["obs"], b["actions"])
    assert np.abs(values - others).max() > 0.01, "keys make a difference"


def plain_values(params, obs, actions):
    """What the networks return that leave nothing out, layer by layer."""
    x, params = torch.cat([obs, actions], 1), params["params"]
    for i in range(2):
        x, norm = dense(params[f"Dense_{i}"], x), params[f"LayerNorm_{i}"]
        x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + 1e-6).sqrt()
        x = (x * norm["scale"].unsqueeze(1) + norm["bias"].unsqueeze(1)).relu()
    return dense(params["Dense_2"], x).squeeze(-1)


def test_droq_2_layers_are_normalized(file, tmp_path):
    """Loss and gradient without dropout: lower values as targets, entropy, no bootstrap at ends."""
    names, (key, next_key) = begin(file, "--dropout", 0), jax.random.split(jax.random.key(1))
    agent, b = shaken(names), made_up(names)
    after, losses = update_critic(names, agent, b, key, next_key)
    obs, actions, rewards, next_obs, terminated = batch_of(b)
    params = doubles(agent["q_networks"])
    alpha = np.exp(float(agent["log_alpha"]))
    outputs = policy(doubles(agent["actor"])["params"], next_obs)
    next_actions, next_log_probs = squash(*outputs, next_key)
    target_params = doubles(agent["target_q_networks"])
    next_values = plain_values(target_params, next_obs, next_actions).min(0).values
    targets = (rewards + 0.9 * (next_values - alpha * next_log_probs) * (1 - terminated)).detach()
    values = plain_values(params, obs, actions)
    loss = sum((values[i] - targets).square().mean() for i in range(2))
    assert losses["qf_loss"] == pytest.approx(loss.item() / 2, rel=1e-4)
    assert losses["qf_values"] == pytest.approx(values.mean().item(), abs=1e-5)
    check_step(agent, after, "q_networks", params, loss, 3e-4)
    check_changes(agent, after, "q_networks")


def test_droq_3_the_actor_climbs_the_mean(file, tmp_path):
    """And entropy; the temperature goes down its own loss, which is linear in its logarithm."""
    names, key = begin(file, "--dropout", 0), jax.random.key(2)
    agent, obs = shaken(names), made_up(names)["obs"]
    after, losses = update_actor(names, agent, obs, key)
    params, obs = doubles(agent["actor"]), torch.tensor(np.asarray(obs, float))
    actions, log_probs = squash(*policy(params["params"], obs), key)
    values = plain_values(doubles(agent["q_networks"]), obs, actions)
    log_alpha = doubles(agent["log_alpha"])
    actor_loss, _ = entropy_losses(log_alpha, log_probs, values.mean(0))
    alpha_loss = -(log_alpha * (log_probs.detach() - 4)).mean()
    assert losses["actor_loss"] == pytest.approx(actor_loss.item(), rel=1e-4)
    assert losses["alpha_loss"] == pytest.approx(alpha_loss.item(), rel=1e-4)
    check_step(agent, after, "actor", params, actor_loss, 3e-4)
    check_step(agent, after, "log_alpha", log_alpha, alpha_loss, 3e-4)
    check_changes(agent, after, "actor", "log_alpha")


@pytest.mark.slow
@pytest.mark.parametrize("num_envs", [1, 2])
def test_droq_4_many_updates_and_one_of_the_actor(file, tmp_path, num_envs):
    """For each environment step; the targets move by tau after each of the Q-networks'."""
    names, updates = follow(file, tmp_path, *COUNTS, "--num-envs", num_envs)
    check_schedule(updates, num_envs, 99, 102, lambda step: ["q", "q", "q", "actor"])
    for last, update in pairwise(updates):
        if update.part == "actor":  # from a batch of its own
            assert not same(last.batch["obs"], update.batch["obs"])
    assert check_targets(names, updates, always, "q_networks") == [0, 12]
    assert check_actions(names, updates) == ((100, 1) if num_envs == 2 else (99, 3))
    assert [
        updates_of(names["run"]["agent"], name) for name in ("q_networks", "actor", "log_alpha")
    ] == [12, 4, 4]
    check_losses(file, tmp_path, updates, 100)


@pytest.mark.slow
def test_values_of_probes(file, tmp_path):
    """Of the actions -0.5 and 0.5; load_policy takes the right ones in fresh environments."""
    env_id, flags = "Probe/ContinuousTargetFromObs-v0", ("--utd", 1, *rates(file, 0.003))
    learned, returns = learn_probe(file, tmp_path, env_id, 3, [-1, 1], *flags)
    np.testing.assert_allclose(learned, [[0, -1, -1, 0]] * 2, atol=0.25)
    assert np.mean(returns) > -0.1


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_learns_pendulum(file, tmp_path, seed):
    """-170 with seed 1."""
    flags = "--utd 5 --learning-starts 300 --total-timesteps 4000 --seed".split()
    flags = (*rates(file, 0.001), *flags, seed)
    assert learn_pendulum(file, tmp_path, *flags) >= -250
