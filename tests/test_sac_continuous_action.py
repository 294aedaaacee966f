"""cleanrl/sac_continuous_action.py. test_sac_N guards detail N of docs/rl-algorithms/sac.md.

test_td3_N and test_ddpg_N, from the tests of those files, guard detail N of td3.md and ddpg.md.
"""

import copy
import math
import runpy
from itertools import pairwise
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch

from tests.harness import flat_grad, only_run, probe, read_checkpoint, scalars, train
from tests.test_ddpg_continuous_action import (  # noqa: F401  the imported tests run here too
    COUNTS,
    SMALL,
    batch,
    count_updates,
    critic,
    follow_targets,
    learner,
    newest,
    probe_flags,
    q_values,
    rates,
    test_a_buffer_that_does_not_fit_in_memory_is_refused,
    test_acting_in_evaluation_mode_learning_in_training_mode,
    test_actions_of_probes,
    test_ddpg_1_a_loaded_policy_rescales_its_actions,
    test_ddpg_1_bounds_as_large_as_numbers_get,
    test_ddpg_2_only_what_happened_is_learned_from,
    test_ddpg_3_a_resumed_run_acts_at_random_until_it_learns,
    test_ddpg_3_random_actions_come_first,
    test_ddpg_4_a_cut_is_bootstrapped_and_an_end_is_not,
    test_integer_actions_are_refused,
    test_metrics,
    test_same_seed_same_bits,
    test_values_of_probes,
    vector,
)
from tests.test_ddpg_continuous_action import test_learns_pendulum as learn_pendulum
from tests.test_td3_continuous_action import (  # noqa: F401
    test_td3_1_the_lower_value_is_the_target,
    test_td3_1_two_networks_are_computed_as_one,
)

# the policy


def log_density(mean, log_std, actions):
    """By the change of variables, in double precision, summed over the components."""
    mean, log_std, actions = (x.double() for x in (mean, log_std, actions))
    normal = torch.distributions.Normal(mean, log_std.exp())
    return (normal.log_prob(actions.atanh()) - (1 - actions.square()).log()).sum(1)


@pytest.mark.parametrize(
    ("mean", "log_std"), [(0.0, 0.0), (0.5, -1.0), (-1.5, 0.5), (0.3, 1.0), (2.0, -5.0)]
)
def test_sac_1_densities_of_squashed_actions(file, tmp_path, monkeypatch, mean, log_std):
    """They integrate to 1, and up to any place to the share of the draws below it."""
    sample = runpy.run_path(str(file))["sample"]
    noise = torch.linspace(-5, 5, 20_001).double()[:, None]
    with monkeypatch.context() as patch:
        patch.setattr(torch, "randn_like", lambda mean: noise)
        actions, log_probs = sample(torch.full_like(noise, mean), torch.full_like(noise, log_std))
    assert actions.abs().max() < 1
    expected = log_density(torch.tensor(mean), torch.tensor(log_std), actions)
    torch.testing.assert_close(log_probs, expected, atol=1e-4, rtol=1e-4)
    actions, densities = actions[:, 0], log_probs.exp()
    assert torch.trapezoid(densities, actions).item() == pytest.approx(1, abs=1e-3)
    torch.manual_seed(1)
    draws, _ = sample(torch.full((50_000, 1), mean), torch.full((50_000, 1), log_std))
    for place in torch.linspace(-0.9, 0.9, 7):
        below = actions < place
        share = torch.trapezoid(densities[below], actions[below]).item()
        assert (draws < place).float().mean().item() == pytest.approx(share, abs=0.01)


def test_sac_1_components_are_independent(file, tmp_path):
    """The log-density is their sum."""
    sample = runpy.run_path(str(file))["sample"]
    mean, log_std = torch.randn(2000, 3), torch.randn(2000, 3) / 2
    actions, log_probs = sample(mean, log_std)
    is_exact = (actions.abs() < 0.999).all(1)
    assert log_probs.shape == (2000,) and is_exact.sum() > 1000
    expected = log_density(mean, log_std, actions)[is_exact].float()
    torch.testing.assert_close(log_probs[is_exact], expected, atol=1e-2, rtol=1e-2)
    noise = (actions.double().atanh() - mean) / log_std.exp()
    assert (noise[is_exact].T.corrcoef() - torch.eye(3)).abs().max() < 0.15


def test_sac_1_far_out_it_is_still_a_number(file, tmp_path):
    """Where tanh is 1 and its slope 0, to all digits: also for what is learned from it."""
    sample = runpy.run_path(str(file))["sample"]
    mean = torch.tensor([[-1e4, -50, -10, 10, 50, 1e4]]).T.repeat(1, 2)
    for log_std in (-5.0, 2.0):
        mean.requires_grad_().grad = None
        actions, log_probs = sample(mean, torch.full_like(mean, log_std))
        log_probs.sum().backward()
        assert actions.abs().max() <= 1
        assert log_probs.isfinite().all() and mean.grad.isfinite().all()
        torch.testing.assert_close(log_probs[[0, 5]], torch.full((2,), 4e4), atol=0, rtol=0.01)


def test_sac_1_acting_draws_from_the_policy(file, tmp_path):
    """The action is as many standard deviations away from the mean as a Gaussian number."""
    seen = {}

    def look(names):
        if names["global_step"] not in seen:
            obs, actions = newest(names)
            with torch.no_grad():
                mean, log_std = names["actor"](obs)
            seen[names["global_step"]] = ((actions.double().atanh() - mean) / log_std.exp())[:, 0]

    flags = "--batch-size 1 --buffer-size 1000 --learning-starts 10 --total-timesteps 360".split()
    flags = ("--env-id", "Pendulum-v1", *SMALL, *rates(file, 1e-6), *flags)
    train(file, tmp_path, *flags, on_update=look)
    noise = torch.stack(list(seen.values())[1:])  # a column for each environment
    torch.testing.assert_close(noise.mean(0), torch.zeros(3).double(), atol=0.3, rtol=0)
    torch.testing.assert_close(noise.std(0), torch.ones(3).double(), atol=0.2, rtol=0)
    assert noise.T.corrcoef().fill_diagonal_(0).abs().max() < 0.3


def test_sac_2_the_standard_deviation_is_bounded(file, tmp_path):
    """Between exp(-5) and exp(2), softly; unlike the mean, which depends on observations too."""
    spaces = [gym.spaces.Box(-1, 1, shape) for shape in ((4,), (2, 1))]
    envs = SimpleNamespace(single_observation_space=spaces[0], single_action_space=spaces[1])
    actor, obs = runpy.run_path(str(file))["Actor"](envs), torch.randn(500, 4)
    mean, log_std = actor(obs)
    assert mean.shape == log_std.shape == (500, 2)
    assert (log_std.std(0) > 0.01).all() and (mean.std(0) > 0.01).all()
    mean, log_std = actor(1e4 * obs)
    assert mean.abs().max() > 10 and log_std.min() == -5 and log_std.max() == 2
    torch.nn.init.zeros_(actor.log_std.weight)
    for bias, expected in {-99: -5, 99: 2, 0: -1.5, 0.5: -1.5 + 3.5 * math.tanh(0.5)}.items():
        torch.nn.init.constant_(actor.log_std.bias, bias)
        torch.testing.assert_close(actor(obs)[1], torch.full((500, 2), float(expected)))


# learning


def test_sac_3_entropy_is_part_of_the_target(file, tmp_path):
    """That of the newest actor, weighted with the temperature, and not after an end."""
    seen = []

    def look(names):
        if learner(names) != "q":
            return
        _, _, rewards, next_obs, terminated = batch(names)
        next_actions = names["next_actions"]
        with torch.no_grad():
            log_probs = log_density(*names["actor"](next_obs), next_actions).float()
            values = q_values(critic(names, "target_"), next_obs, next_actions).amin(0)
        expected = rewards + 0.9 * ~terminated * (values - 0.7 * log_probs)
        got, is_exact = names["targets"], next_actions[:, 0].abs() < 0.999
        torch.testing.assert_close(got[is_exact], expected[is_exact], atol=1e-2, rtol=1e-2)
        seen.extend(next_actions.flatten().tolist())

    flags = ("--no-autotune", "--alpha", 0.7, "--tau", 0.3, "--total-timesteps", 72)
    flags = (*SMALL, *rates(file, 0.01), *flags)
    train(file, tmp_path, "--env-id", probe(file, "RandomEnds"), *flags, on_update=look)
    assert len(set(seen)) > 0.9 * len(seen) == 0.9 * 15 * 16, "new ones for each row"


def entropy(names, obs):
    """Of the policy, as a mean over many draws."""
    with torch.no_grad():
        mean, log_std = (x.expand(20_000, -1) for x in names["actor"](obs))
        return -names["sample"](mean, log_std)[1].mean().item()


def test_sac_3_a_free_choice_is_worth_its_entropy(file, tmp_path):
    """Reward 1 for ever, whatever is done: with a discount and a temperature of 0.5 each, the value
    is 2 and half the entropy, which comes near that of uniform draws, log(2)."""
    flags = (*probe_flags(file), "--alpha", 0.5, "--num-envs", 3, "--total-timesteps", 450)
    names = train(file, tmp_path, "--env-id", probe(file, "TruncatedEveryStep"), *flags)
    with torch.no_grad():
        values = q_values(names["q_networks"], torch.zeros(2, 1), torch.tensor([[-0.5], [0.5]]))
    expected = torch.full((2, 2), 2 + 0.5 * entropy(names, torch.zeros(1, 1)))
    torch.testing.assert_close(values, expected, atol=0.05, rtol=0)
    assert entropy(names, torch.zeros(1, 1)) == pytest.approx(math.log(2), abs=0.1)


@pytest.mark.parametrize(("num_envs", "utd", "policy_frequency", "learning_starts"), COUNTS)
def test_sac_4_the_actor_catches_up(
    file, tmp_path, num_envs, utd, policy_frequency, learning_starts
):
    """Once in policy_frequency updates it makes as many, and so does the temperature."""
    turn = ["actor", "alpha"] * policy_frequency
    counts = num_envs, utd, policy_frequency, learning_starts
    made, asked = count_updates(file, tmp_path, *counts, turn)
    assert made == asked and len(made) > 20


def test_sac_4_the_actor_climbs_value_and_entropy(file, tmp_path, monkeypatch):
    """The lower of the two values, through the actions, with new noise each time."""
    seen, noises, randn_like = [], [], torch.randn_like

    def record(mean):
        noises.append(randn_like(mean))
        return noises[-1]

    def look(names):
        seen.append((learner(names), vector(names["q_networks"])))
        if seen[-1][0] != "actor":
            return
        actor, networks = (copy.deepcopy(names[name]).double() for name in ("actor", "q_networks"))
        obs = batch(names)[0].double()
        mean, log_std = actor(obs)
        unsquashed = mean + log_std.exp() * noises[-1]
        actions = unsquashed.tanh()
        log_probs = torch.distributions.Normal(mean, log_std.exp()).log_prob(unsquashed)
        log_probs = (log_probs - (1 - actions.square()).log()).sum(1)
        alpha = names["temperature"]["log_alpha"].exp().item()
        loss = (alpha * log_probs - q_values(networks, obs, actions).min(0).values).mean()
        grads = torch.autograd.grad(loss, list(actor.parameters()))
        expected = torch.cat([g.flatten() for g in grads]).float()
        torch.testing.assert_close(flat_grad(names["actor"]), expected, atol=1e-5, rtol=1e-3)
        assert names["actor_loss"].item() == pytest.approx(loss.item(), rel=1e-3)

    monkeypatch.setattr(torch, "randn_like", record)
    flags = (*SMALL, *rates(file, 0.01), "--total-timesteps", 72)
    train(file, tmp_path, "--env-id", "Probe/ContinuousTarget-v0", *flags, on_update=look)
    changes = {(a, torch.equal(before, after)) for (a, before), (_, after) in pairwise(seen)}
    assert changes == {("q", False), ("actor", True), ("alpha", True)}
    assert len({noise.flatten()[0].item() for noise in noises}) == len(noises)


def test_sac_5_the_temperature_follows_the_entropy(file, tmp_path):
    """It falls while the entropy is above minus the number of components, here -2, rises below."""
    seen = []

    def look(names):
        if learner(names) == "alpha":
            log_alpha = names["temperature"]["log_alpha"]
            entropy = -names["log_probs"].mean().item()
            expected = log_alpha.exp().item() * (entropy + 2)
            assert log_alpha.grad.item() == pytest.approx(expected, rel=1e-4)
            seen.append((log_alpha.item(), entropy))
        if len(seen) == 40:  # from now on a policy with as little entropy as can be
            torch.nn.init.constant_(names["actor"].log_std.bias, -1e4)

    flags = (*SMALL, *rates(file, 0.01), "--policy-lr", 1e-5)
    train(file, tmp_path, "--env-id", "Probe/ContinuousTarget-v0", *flags, on_update=look)
    log_alphas, entropies = np.array(seen).T
    assert log_alphas[0] == 0 and (np.diff(log_alphas[:41]) < 0).all() and entropies[:40].min() > -2
    assert log_alphas[-1] > log_alphas.min() + 0.05 and entropies[42:].max() < -2


def test_sac_5_the_policy_gets_the_target_entropy(file, tmp_path):
    """With the temperature that is right for it: rewards of -(x - 0.5)^2 - 4 (y + 0.5)^2 and a
    temperature of t make the best policy a Gaussian with variances t / 2 and t / 8, whose entropy,
    log(2 pi e t / 4), is -2 where t is 0.032."""
    flags = "--autotune --policy-lr 0.003 --q-lr 0.03 --num-envs 3 --total-timesteps 900".split()
    flags = (*probe_flags(file), *flags)
    names = train(file, tmp_path, "--env-id", "Probe/ContinuousTarget-v0", *flags)
    assert entropy(names, torch.zeros(1, 1)) == pytest.approx(-2, abs=0.4)
    assert names["temperature"]["log_alpha"].exp().item() == pytest.approx(0.032, rel=0.4)


def test_sac_5_without_tuning_the_temperature_stays(file, tmp_path):
    flags = "--no-autotune --alpha 0.3 --num-envs 1 --total-timesteps 100".split()
    names = train(file, tmp_path, "--env-id", probe(file, "RandomEnds"), *SMALL, *flags)
    logged = scalars(only_run(tmp_path))
    assert logged["losses/alpha"] == [(100, pytest.approx(0.3))]
    assert "losses/alpha_loss" not in logged
    saved = read_checkpoint(only_run(tmp_path))["temperature"]["log_alpha"]
    for log_alpha in (saved, names["temperature"]["log_alpha"]):
        assert log_alpha.item() == pytest.approx(math.log(0.3))


@pytest.mark.parametrize("every", [1, 4])
def test_ddpg_6_the_targets_move_part_of_the_way(file, tmp_path, every):
    """Every so many updates; there is no target of the actor."""
    moves, targets = follow_targets(file, tmp_path, every, "--target-network-frequency", every)
    assert moves == (23 if every == 1 else 5)
    assert targets == {"target_q_networks"}


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_learns_pendulum(file, tmp_path, seed):
    """In the default suite DDPG does it, whose test tells the returns."""
    learn_pendulum(file, tmp_path, seed)
