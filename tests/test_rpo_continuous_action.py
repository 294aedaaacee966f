"""cleanrl/rpo_continuous_action.py: ppo_continuous_action.py with one detail more, test_rpo_1."""

import numpy as np
import pytest
import torch

from tests.harness import FILES, only_run, same, train, weights
from tests.test_ppo_continuous_action import (  # noqa: F401  the imported tests run on this file
    PENDULUM,
    PROBE_FLAGS,
    TARGET,
    play,
    test_advantages_are_of_the_scaled_rewards,
    test_checkpoints_hold_both_normalizers,
    test_continuous_3_components_are_independent,
    test_continuous_5_the_environment_gets_clipped_actions,
    test_other_actions_are_refused,
    test_scalar_actions_have_a_log_density,
)


def test_rpo_1_the_mean_is_noisy_in_learning_only(file, tmp_path):
    """Uniform noise, new for each row, component and minibatch; acting and evaluation have none."""
    noises, first_ratios = [], []

    def look(names):
        agent, mb = names["agent"], names["mb"]
        actions, old_log_probs = names["b_actions"][mb], names["b_log_probs"][mb]
        noises.append((names["noisy_mean"] - names["mean"]).detach())
        log_probs = names["log_prob"](names["noisy_mean"], agent.log_std, actions)
        torch.testing.assert_close(names["log_ratio"], log_probs - old_log_probs)
        mean = agent.policy(names["b_obs"][mb])
        torch.testing.assert_close(mean, names["mean"], msg="the policy itself has no noise")
        if not first_ratios:
            log_probs = names["log_prob"](mean, agent.log_std, actions)
            torch.testing.assert_close(log_probs, old_log_probs, atol=1e-5, rtol=0)
        first_ratios.append(names["ratio"].detach())

    flags = [*TARGET, "--total-timesteps", 960, "--rpo-alpha", 0.3]
    names = train(file, tmp_path, *flags, on_update=look)
    noise = torch.cat(noises)
    assert len(noise.unique()) > 0.9 * noise.numel() and noise.abs().max() <= 0.3
    torch.testing.assert_close(noise.mean(0), torch.zeros(2), atol=0.02, rtol=0)
    torch.testing.assert_close(noise.std(0), torch.full((2,), 0.3 / 3**0.5), atol=0.01, rtol=0)
    assert (first_ratios[0] - 1).abs().max() > 0.01, "before the first update, too"

    checkpoint = torch.load(only_run(tmp_path) / "checkpoint.pt", weights_only=True)
    policy, agent = names["load_policy"](checkpoint, names["envs"]), names["agent"]
    torch.manual_seed(0)
    found = policy(np.zeros((3, 1)), np.zeros(3, bool))
    torch.manual_seed(0)
    mean = agent.policy(torch.from_numpy(agent.normalize(np.zeros((3, 1)))))
    expected = names["sample"](mean, agent.log_std).detach().numpy()
    space = names["action_space"]
    np.testing.assert_allclose(found, expected.clip(space.low, space.high), rtol=1e-6)


def test_without_noise_it_is_ppo(file, tmp_path):
    """The noise is drawn all the same, which moves later random numbers: one update is the same."""
    one_update = [*PENDULUM, "--num-minibatches", 1, "--update-epochs", 1]
    rpo = train(file, tmp_path / "rpo", *one_update, "--rpo-alpha", 0)
    ppo = train(FILES["ppo_continuous_action"], tmp_path / "ppo", *one_update)
    assert rpo["loss"].item() == ppo["loss"].item()
    assert same(weights(only_run(tmp_path / "rpo")), weights(only_run(tmp_path / "ppo")))


@pytest.mark.slow
def test_the_policy_stays_wide(file, tmp_path):
    """A mean with noise of 0.5 rules out a narrow Gaussian, so that exploration goes on."""
    stds = {}
    for path in (file, FILES["ppo_continuous_action"]):
        flags = ["--env-id", "Probe/ContinuousTarget-v0", *PROBE_FLAGS]
        names = train(path, tmp_path / path.stem, *flags)
        stds[path.stem] = names["agent"].log_std.exp().mean().item()
    assert stds["rpo_continuous_action"] > 0.2 > 2 * stds["ppo_continuous_action"]


@pytest.mark.parametrize("alpha", ["-0.1", "nan", "1e300"])
def test_bad_alpha_is_refused(file, tmp_path, alpha):
    with pytest.raises(SystemExit, match=r"^cannot run with these flags: rpo_alpha "):
        train(file, tmp_path, f"--rpo-alpha={alpha}")


def test_actions_of_a_probe(file, tmp_path):
    flags = ["--env-id", "Probe/FarAndWide-v0", *PROBE_FLAGS, "--rpo-alpha", 0.05]
    names = train(file, tmp_path, *flags)
    assert np.mean(play(names, only_run(tmp_path))) > -0.1
