"""cleanrl/tqc_continuous_action_jax.py. test_tqc_N guards detail N of docs/rl-algorithms/tqc.md,
test_sac_N and test_ddpg_N those of sac.md and ddpg.md."""

import runpy

import jax
import numpy as np
import pytest
import torch

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

FEW = "--num-critics 3 --num-quantiles 5 --drop-quantiles 2".split()


def quantiles(params, obs, actions):
    x = torch.cat([obs, actions], 1)
    for i in range(3):
        x = dense(params["params"][f"Dense_{i}"], x).relu()
    return dense(params["params"]["Dense_3"], x)


def test_tqc_1_networks_of_quantiles(file, tmp_path):
    """As many as asked for, with three hidden layers, and each with weights of its own."""
    names = begin(file, *FEW)
    b, params = made_up(names), names["agent"]["q_networks"]
    got = names["q_networks"].apply(params, b["obs"], b["actions"])
    shapes = [params["params"][f"Dense_{i}"]["kernel"].shape for i in range(4)]
    assert shapes == [(3, 5, 512), (3, 512, 512), (3, 512, 512), (3, 512, 5)]
    assert got.shape == (3, 8, 5)
    obs, actions, *_ = batch_of(b)
    expected = quantiles(doubles(params), obs, actions)
    np.testing.assert_allclose(got, expected.detach(), atol=1e-5)
    assert all(len(np.unique(got[:, row, 0])) == 3 for row in range(8))


def test_tqc_2_the_default_is_the_papers_for_the_default_environment(file, tmp_path):
    args = runpy.run_path(str(file))["Args"]()
    assert (args.env_id, args.drop_quantiles) == ("Hopper-v4", 5)


def test_tqc_2_tqc_3_the_highest_are_dropped_and_the_loss_is_that_of_quantiles(file, tmp_path):
    """Of the quantiles of all networks together, two for each of the three; the loss in loops.

    The targets hold an entropy, and nothing after a termination. The gradient is checked, too.
    """
    names, key = begin(file, *FEW), jax.random.key(1)
    agent, b = shaken(names), made_up(names)
    after, losses = update_critic(names, agent, b, key)
    obs, actions, rewards, next_obs, terminated = batch_of(b)
    params, alpha = doubles(agent["q_networks"]), np.exp(float(agent["log_alpha"]))
    next_actions, next_log_probs = squash(*policy(doubles(agent["actor"])["params"], next_obs), key)
    targets = quantiles(doubles(agent["target_q_networks"]), next_obs, next_actions)
    targets = targets.detach().numpy()
    values, loss, dropped = quantiles(params, obs, actions), 0, set()
    for row in range(8):
        kept = np.sort(targets[:, row].ravel())[: 3 * (5 - 2)]
        dropped |= {(targets[i, row] > kept[-1]).sum().item() for i in range(3)}
        for network in range(3):
            for i in range(5):
                for value in kept:
                    target = value - alpha * next_log_probs[row].item()
                    target = rewards[row].item() + (0 if terminated[row] else 0.9 * target)
                    error = target - values[network, row, i]
                    huber = error**2 / 2 if abs(error) <= 1 else abs(error) - 0.5
                    share = (i + 0.5) / 5
                    loss = loss + (share if error > 0 else 1 - share) * huber / (8 * 5 * len(kept))
    assert len(dropped) > 1, "some networks lose more than others"
    assert losses["qf_loss"] == pytest.approx(loss.item() / 3, rel=1e-4)
    assert losses["qf_values"] == pytest.approx(values.mean().item(), abs=1e-5)
    check_step(agent, after, "q_networks", params, loss, 3e-4)
    check_changes(agent, after, "q_networks")


def test_tqc_3_each_quantile_is_pulled_by_its_share(file, tmp_path):
    """Where all episodes end, targets are rewards: quantile i weighs higher ones by (i + 0.5)/5."""
    names = begin(file, *FEW)
    agent, b = shaken(names), made_up(names) | {"terminated": np.ones(8, bool)}
    _, losses = update_critic(names, agent, b, jax.random.key(1))
    obs, actions, rewards, *_ = batch_of(b)
    values = quantiles(doubles(agent["q_networks"]), obs, actions).detach().numpy()
    errors, taus = rewards.numpy()[:, None] - values, (np.arange(5) + 0.5) / 5
    hubers = np.where(np.abs(errors) <= 1, errors**2 / 2, np.abs(errors) - 0.5)
    assert (errors > 0).any() and (errors < 0).any()
    expected = (np.where(errors > 0, taus, 1 - taus) * hubers).mean()
    assert losses["qf_loss"] == pytest.approx(expected, rel=1e-4)


def test_sac_5_the_actor_climbs_the_mean_of_all_quantiles(file, tmp_path):
    """And entropy; the temperature goes down its own loss."""
    names, key = begin(file, *FEW), jax.random.key(2)
    agent, obs = shaken(names), made_up(names)["obs"]
    after, losses = update_actor(names, agent, obs, key)
    params, obs = doubles(agent["actor"]), torch.tensor(np.asarray(obs, float))
    actions, log_probs = squash(*policy(params["params"], obs), key)
    values = quantiles(doubles(agent["q_networks"]), obs, actions).mean((0, 2))
    log_alpha = doubles(agent["log_alpha"])
    actor_loss, alpha_loss = entropy_losses(log_alpha, log_probs, values)
    assert losses["actor_loss"] == pytest.approx(actor_loss.item(), rel=1e-4)
    assert losses["alpha_loss"] == pytest.approx(alpha_loss.item(), rel=1e-4)
    assert losses["alpha"] == pytest.approx(np.exp(float(agent["log_alpha"])))
    check_step(agent, after, "actor", params, actor_loss, 3e-4)
    check_step(agent, after, "log_alpha", log_alpha, alpha_loss, 3e-4)
    check_changes(agent, after, "actor", "log_alpha")


@pytest.mark.slow
def test_ddpg_6_updates_are_counted_in_environment_steps(file, tmp_path):
    """After each of which the actor learns and the targets move by tau."""
    names, updates = follow(file, tmp_path, *COUNTS)
    check_schedule(updates, 2, 99, 102, lambda step: ["q", "actor"] * 3)
    assert check_targets(names, updates, always, "q_networks") == [0, 12]
    assert check_actions(names, updates) == (100, 1)
    assert [
        updates_of(names["run"]["agent"], name) for name in ("q_networks", "actor", "log_alpha")
    ] == [12] * 3
    check_losses(file, tmp_path, updates, 100)


@pytest.mark.slow
def test_values_of_probes(file, tmp_path):
    """Of the actions -0.5 and 0.5; load_policy takes the right ones in fresh environments."""
    env_id = "Probe/ContinuousTargetFromObs-v0"
    flags = ("--total-timesteps", 240)
    learned, returns = learn_probe(file, tmp_path, env_id, 3, [-1, 1], *flags)
    np.testing.assert_allclose(learned, [[0, -1, -1, 0]] * 2, atol=0.15)
    assert np.mean(returns) > -0.1


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_learns_pendulum(file, tmp_path, seed):
    """-224 with seed 1."""
    flags = "--num-critics 2 --drop-quantiles 2 --total-timesteps 5000 --seed".split()
    flags = (*rates(file, 0.001), *flags, seed)
    assert learn_pendulum(file, tmp_path, *flags) >= -250
