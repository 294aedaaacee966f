"""cleanrl/rpo_continuous_action.py: ppo_continuous_action.py with one detail more, test_rpo_1."""

import numpy as np
import pytest
import torch

from tests.harness import FILES, only_run, train
from tests.test_ppo_continuous_action import (  # noqa: F401  the imported tests run here on this file
    PROBE_FLAGS,
    SMALL,
    play,
    test_advantages_are_of_the_scaled_rewards,
    test_checkpoints_hold_both_normalizers,
    test_continuous_3_components_are_independent,
    test_continuous_5_the_environment_gets_clipped_actions,
    test_other_actions_are_refused,
)


@pytest.fixture
def file():
    return FILES["rpo_continuous_action"]


def test_rpo_1_the_mean_is_shaken_in_learning_only(file, tmp_path):
    """By uniform noise, a new number for each row, component and minibatch; acting and evaluation know nothing of it."""
    shakes, first_ratios = [], []

    def look(names):
        shakes.append((names["shaken_mean"] - names["mean"]).detach())
        expected = names["log_prob"](
            names["shaken_mean"], names["agent"].logstd, names["b_actions"][names["mb"]]
        )
        torch.testing.assert_close(names["logratio"], expected - names["b_logprobs"][names["mb"]])
        mean = names["agent"].policy(names["b_obs"][names["mb"]])
        torch.testing.assert_close(mean, names["mean"], msg="the policy itself is not shaken")
        if not first_ratios:
            acted = names["log_prob"](mean, names["agent"].logstd, names["b_actions"][names["mb"]])
            torch.testing.assert_close(acted, names["b_logprobs"][names["mb"]], atol=1e-5, rtol=0)
        first_ratios.append(names["ratio"].detach())

    flags = (
        "--env-id",
        "Probe/ContinuousTarget-v0",
        *SMALL,
        "--total-timesteps",
        960,
        "--rpo-alpha",
        0.3,
    )
    names = train(file, tmp_path, *flags, on_update=look)
    noise = torch.cat(shakes)
    assert len(noise.unique()) > 0.9 * noise.numel() and noise.abs().max() <= 0.3
    torch.testing.assert_close(noise.mean(0), torch.zeros(2), atol=0.02, rtol=0)
    torch.testing.assert_close(noise.std(0), torch.full((2,), 0.3 / 3**0.5), atol=0.01, rtol=0)
    assert (first_ratios[0] - 1).abs().max() > 0.01, "before the first update, too"
    policy = names["load_policy"](
        torch.load(only_run(tmp_path) / "checkpoint.pt", weights_only=True), names["envs"]
    )
    torch.manual_seed(0)
    one = policy(np.zeros((3, 1)), np.zeros(3, bool))
    torch.manual_seed(0)
    mean = names["agent"].policy(names["agent"].normalize(np.zeros((3, 1))))
    np.testing.assert_allclose(
        one, names["sample"](mean, names["agent"].logstd).detach(), rtol=1e-6
    )


def test_without_noise_it_is_ppo(file, tmp_path):
    """The noise is drawn all the same, so that the random numbers after it differ: the first minibatch is the same."""
    losses = {}
    for path, flags in {file: ("--rpo-alpha", 0), FILES["ppo_continuous_action"]: ()}.items():
        seen = losses.setdefault(path.stem, [])
        folder = tmp_path / path.stem
        names = (
            "--env-id",
            "Pendulum-v1",
            *SMALL,
            "--num-minibatches",
            1,
            "--update-epochs",
            1,
            "--total-timesteps",
            96,
        )
        train(
            path,
            folder,
            *names,
            *flags,
            on_update=lambda names, seen=seen: seen.append(names["loss"].item()),
        )
    assert losses["rpo_continuous_action"] == losses["ppo_continuous_action"]


@pytest.mark.slow
def test_the_policy_stays_wide(file, tmp_path):
    """What RPO is for: a mean that is shaken by 0.5 cannot do with a narrow Gaussian, so that exploration goes on."""
    stds = {}
    for path in (file, FILES["ppo_continuous_action"]):
        names = train(
            path, tmp_path / path.stem, "--env-id", "Probe/ContinuousTarget-v0", *PROBE_FLAGS
        )
        stds[path.stem] = names["agent"].logstd.exp().mean().item()
    assert stds["rpo_continuous_action"] > 0.2 > 2 * stds["ppo_continuous_action"]


def test_bad_alpha_is_refused(file, tmp_path):
    for alpha in ("-0.1", "nan"):
        with pytest.raises(SystemExit, match="0 <= rpo_alpha < 1e9 must hold"):
            train(file, tmp_path, "--rpo-alpha", alpha)


def test_actions_of_a_probe(file, tmp_path):
    names = train(
        file, tmp_path, "--env-id", "Probe/FarAndWide-v0", *PROBE_FLAGS, "--rpo-alpha", 0.05
    )
    assert np.mean(play(names, only_run(tmp_path))) > -0.1
