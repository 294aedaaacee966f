"""cleanrl/ppo.py. test_core_N guards detail N of docs/rl-algorithms/ppo.md; tests/mutations shows
that each test bites."""

import copy

import numpy as np
import pytest
import torch

from tests.harness import flat_grad, only_run, same, scalars, train, weights

LOSSES = (
    "value_loss",
    "policy_loss",
    "entropy",
    "old_approx_kl",
    "approx_kl",
    "clipfrac",
    "explained_variance",
)
SMALL = ("--num-envs", 2, "--num-steps", 32, "--num-minibatches", 2, "--update-epochs", 3)


# the 13 core details


def test_core_1_episodes_run_on_across_rollouts(file, tmp_path):
    names = train(file, tmp_path, "--num-envs", 3, "--num-steps", 4, "--total-timesteps", 600)
    lengths = [
        length for _, length in scalars(only_run(tmp_path)).get("charts/episodic_length", [])
    ]
    assert names["obs"].shape[:2] == (5, 3)
    assert len(lengths) > 10 and min(lengths) > 4, "rollouts of 4 steps must not end the episodes"


def test_core_2_orthogonal_weights_and_zero_biases(file, tmp_path):
    agent = first_look(file, tmp_path, *SMALL)["agent"]
    for network, head_std in ((agent.actor, 0.01), (agent.critic, 1.0)):
        layers = [layer for layer in network if isinstance(layer, torch.nn.Linear)]
        for layer, std in zip(layers, (2**0.5, 2**0.5, head_std), strict=True):
            rows, columns = layer.weight.shape
            weight = layer.weight if rows <= columns else layer.weight.T
            torch.testing.assert_close(
                weight @ weight.T, std**2 * torch.eye(min(rows, columns)), atol=1e-5, rtol=0
            )
            assert layer.bias.abs().max() == 0


def test_core_3_adam_epsilon(file, tmp_path):
    """Adam's first step is lr * g / (|g| + eps): how it differs from lr * sign(g) tells the
    epsilon."""
    seen = []

    def look(names):
        seen.append((copy.deepcopy(names["agent"]), flat_grad(names["agent"])))

    train(file, tmp_path, *SMALL, "--total-timesteps", 64, "--no-anneal-lr", on_update=look)
    (before, grad), (after, _) = seen[:2]
    step = torch.cat(
        [(b - a).flatten() for b, a in zip(before.parameters(), after.parameters(), strict=True)]
    )
    torch.testing.assert_close(step, 2.5e-4 * grad / (grad.abs() + 1e-5), atol=2e-7, rtol=0)


def test_core_4_learning_rate_falls_linearly(file, tmp_path):
    used = []
    flags = (*SMALL, "--total-timesteps", 64 * 8, "--learning-rate", 0.008)
    train(
        file,
        tmp_path,
        *flags,
        on_update=lambda names: used.append(names["optimizer"].param_groups[0]["lr"]),
    )
    logged = [lr for _, lr in scalars(only_run(tmp_path))["charts/learning_rate"]]
    expected = [0.008, 0.007, 0.006, 0.005, 0.004, 0.003, 0.002, 0.001]
    np.testing.assert_allclose(used, np.repeat(expected, 6), rtol=1e-6)
    np.testing.assert_allclose(logged, expected, rtol=1e-6)


def test_core_5_advantages(file, tmp_path):
    """Against a slow reference that walks each episode by itself."""
    flags = (
        "--env-id",
        "Probe/RandomEnds-v0",
        "--num-envs",
        3,
        "--num-steps",
        64,
        "--gamma",
        0.9,
        "--gae-lambda",
        0.7,
    )
    names = train(file, tmp_path, *flags, "--total-timesteps", 3 * 64 * 3)
    values, rewards, terminated, is_last = (
        names[name] for name in ("values", "rewards", "terminated", "is_last")
    )
    ends = is_last[1:] & ~is_last[:-1]
    assert terminated.any() and (ends & ~terminated).any() and is_last[:-1].any(), (
        "the rollout must hold every case"
    )
    for e in range(3):
        for t in range(64):
            if is_last[t, e]:
                continue  # a reset row: it is nobody's business what its advantage is
            expected, weight, k = 0.0, 1.0, t
            while True:
                following = 0.0 if terminated[k, e] else float(values[k + 1, e])
                expected += weight * (float(rewards[k, e]) + 0.9 * following - float(values[k, e]))
                if is_last[k + 1, e] or k == 63:
                    break
                weight, k = weight * 0.9 * 0.7, k + 1
            assert names["advantages"][t, e] == pytest.approx(expected, abs=1e-5)
            assert names["returns"][t, e] == pytest.approx(expected + values[t, e], abs=1e-5)


def test_core_6_every_epoch_shuffles_and_covers_the_rollout(file, tmp_path):
    minibatches = []
    flags = ("--env-id", "Probe/RandomEnds-v0", *SMALL, "--total-timesteps", 64)
    names = train(
        file, tmp_path, *flags, on_update=lambda names: minibatches.append(names["mb"].tolist())
    )
    rows = len(names["b_obs"])
    epochs = [minibatches[i] + minibatches[i + 1] for i in range(0, len(minibatches), 2)]
    assert len(epochs) == 3 and all(sorted(epoch) == list(range(rows)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in [*epochs, range(rows)]}) == 4, "a new order in each epoch"
    assert {abs(len(minibatch) - rows / 2) <= 0.5 for minibatch in minibatches} == {True}


def test_core_7_advantages_are_normalized_by_minibatch(file, tmp_path):
    def look(names):
        raw, used = names["b_advantages"][names["mb"]], names["adv"]
        torch.testing.assert_close(used, (raw - raw.mean()) / (raw.std(correction=0) + 1e-8))
        assert abs(raw.mean()) > 1e-3, "there must be something to normalize"

    train(file, tmp_path, *SMALL, "--total-timesteps", 256, on_update=look)


def test_core_7_can_be_turned_off(file, tmp_path):
    def look(names):
        assert torch.equal(names["adv"], names["b_advantages"][names["mb"]])

    train(file, tmp_path, *SMALL, "--total-timesteps", 256, "--no-norm-adv", on_update=look)


def test_core_8_clipped_surrogate(file, tmp_path):
    clipped = 0

    def look(names):
        nonlocal clipped
        rows = []
        for ratio, advantage in zip(names["ratio"].tolist(), names["adv"].tolist(), strict=True):
            clipped += (ratio > 1.2 and advantage > 0) or (ratio < 0.8 and advantage < 0)
            bound = 1.2 if advantage > 0 else 0.8
            rows.append(advantage * (min(ratio, bound) if advantage > 0 else max(ratio, bound)))
        assert names["policy_loss"].item() == pytest.approx(-sum(rows) / len(rows), abs=1e-5)

    train(file, tmp_path, *SMALL, "--total-timesteps", 256, "--learning-rate", 0.02, on_update=look)
    assert clipped > 20, "the policy must have moved far enough for the clip to matter"


def test_core_9_clipped_value_loss(file, tmp_path):
    clipped = 0

    def look(names):
        nonlocal clipped
        rows = []
        for new, old, target in zip(
            *(names[n].tolist() for n in ("value", "old_value", "target")), strict=True
        ):
            near = old + max(-0.2, min(0.2, new - old))
            rows.append(max((new - target) ** 2, (near - target) ** 2))
            clipped += rows[-1] > (new - target) ** 2 + 1e-6
        assert names["value_loss"].item() == pytest.approx(0.5 * sum(rows) / len(rows), rel=1e-4)

    def look_up(names):
        mb = names["mb"]
        look({**names, "old_value": names["b_values"][mb], "target": names["b_returns"][mb]})

    train(
        file, tmp_path, *SMALL, "--total-timesteps", 256, "--learning-rate", 0.02, on_update=look_up
    )
    assert clipped > 20, "the value must have moved far enough for the clip to matter"


def test_core_10_one_loss_for_policy_value_and_entropy(file, tmp_path):
    """The gradient that reaches the optimizer is that of the textbook loss, written anew here and
    left to autograd."""

    def look(names):
        agent, mb = copy.deepcopy(names["agent"]), names["mb"]
        policy = torch.distributions.Categorical(logits=agent.actor(names["b_obs"][mb]))
        value = agent.critic(names["b_obs"][mb])[:, 0]
        ratio = torch.exp(policy.log_prob(names["b_actions"][mb]) - names["b_log_probs"][mb])
        gain = torch.minimum(ratio * names["adv"], torch.clip(ratio, 0.8, 1.2) * names["adv"])
        error = (value - names["b_returns"][mb]) ** 2
        loss = -gain.mean() + 0.7 * error.mean() / 2 - 0.3 * policy.entropy().mean()
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
    train(file, tmp_path, *SMALL, "--total-timesteps", 256, *flags, on_update=look)


def test_core_11_gradient_norm_is_clipped(file, tmp_path):
    norms = []
    flags = (*SMALL, "--total-timesteps", 256, "--max-grad-norm", 0.05)
    train(
        file,
        tmp_path,
        *flags,
        on_update=lambda names: norms.append(float(flat_grad(names["agent"]).norm())),
    )
    assert max(norms) <= 0.05 * 1.001
    assert np.median(norms) > 0.049, "most gradients must have been larger"


def test_core_12_debug_variables(file, tmp_path):
    seen = []

    def look(names):
        ratio = names["ratio"].detach().double()
        entropy = (
            torch.distributions.Categorical(logits=names["log_probs"].detach()).entropy().mean()
        )
        moved = float(((ratio - 1).abs() > 0.2).double().mean())
        seen.append(
            (
                float(-ratio.log().mean()),
                float((ratio - 1 - ratio.log()).mean()),
                moved,
                float(entropy),
            )
        )

    names = train(
        file, tmp_path, *SMALL, "--total-timesteps", 64, "--learning-rate", 0.02, on_update=look
    )
    logged = {name: values[-1][1] for name, values in scalars(only_run(tmp_path)).items()}
    assert {f"losses/{name}" for name in LOSSES} | {
        "charts/learning_rate",
        "charts/SPS",
    } <= logged.keys()
    old_approx_kl, approx_kl, _, entropy = seen[-1]
    assert logged["losses/old_approx_kl"] == pytest.approx(old_approx_kl, abs=1e-5) != 0
    assert logged["losses/approx_kl"] == pytest.approx(approx_kl, abs=1e-5) != 0
    assert (
        logged["losses/clipfrac"]
        == pytest.approx(np.mean([moved for _, _, moved, _ in seen]), abs=1e-5)
        != 0
    )
    assert logged["losses/entropy"] == pytest.approx(entropy, abs=1e-5)
    unexplained = (names["b_returns"] - names["b_values"]).var() / names["b_returns"].var()
    assert logged["losses/explained_variance"] == pytest.approx(float(1 - unexplained), abs=1e-4)
    assert logged["losses/policy_loss"] == pytest.approx(names["policy_loss"].item(), abs=1e-6)
    assert logged["losses/value_loss"] == pytest.approx(names["value_loss"].item(), rel=1e-5)
    assert logged["charts/SPS"] > 0


def test_core_13_nothing_is_shared(file, tmp_path):
    agent, obs = first_look(file, tmp_path, *SMALL)["agent"], torch.randn(5, 4)
    value, policy = agent.value(obs), agent.policy(obs)
    with torch.no_grad():
        for parameter in agent.actor.parameters():
            parameter.add_(1.0)
    assert torch.equal(agent.value(obs), value) and not torch.equal(agent.policy(obs), policy)


def first_look(file, folder, *flags):
    """The global names before the first update, with an agent as it was built."""
    seen = []

    def look(names):
        if not seen:
            seen.append(names | {"agent": copy.deepcopy(names["agent"])})

    train(file, folder, *flags, "--total-timesteps", 64, on_update=look)
    return seen[0]


# known answers


@pytest.mark.parametrize(
    ("probe", "values"),
    [
        ("ConstantValue", {0: 1}),
        ("ValueFromObs", {-1: -1, 1: 1}),
        ("Discounting", {0: 0.5, 1: 1}),
        ("TruncatedEveryStep", {0: 2}),
        ("TwoEnds", {-1: 1, 1: 2}),
        ("MarkedLast", {0: 1.75, 1 / 3: 1.5, 2 / 3: 1}),
    ],
)
def test_values_of_probes(file, tmp_path, probe, values):
    names = train(file, tmp_path, "--env-id", f"Probe/{probe}-v0", *PROBE_FLAGS)
    with torch.no_grad():
        learned = names["agent"].value(torch.tensor([[float(obs)] for obs in values])).tolist()
    assert learned == pytest.approx(list(values.values()), abs=0.1)


@pytest.mark.parametrize(
    "probe", ["ActionMatters", "ActionAndObsMatter", "ShiftedActions", "ImageObs", "ScalarObs"]
)
def test_actions_of_probes(file, tmp_path, probe):
    """Acting through load_policy in fresh environments, as every evaluation does."""
    names = train(file, tmp_path, "--env-id", f"Probe/{probe}-v0", *PROBE_FLAGS)
    envs = names["make_envs"](names["args"], 8)
    policy = names["load_policy"](
        torch.load(only_run(tmp_path) / "checkpoint.pt", weights_only=True), envs
    )
    returns, (obs, _), is_last = [], envs.reset(seed=5), np.zeros(8, bool)
    while len(returns) < 80:
        obs, _, terminated, truncated, infos = envs.step(policy(obs, is_last))
        is_last = terminated | truncated
        returns += list(infos["episode"]["r"][infos["_episode"]]) if "episode" in infos else []
    assert np.mean(returns) > 0.9


PROBE_FLAGS = (
    "--total-timesteps",
    5120,
    "--num-envs",
    8,
    "--num-steps",
    16,
    "--learning-rate",
    0.01,
    "--gamma",
    0.5,
)
PROBE_FLAGS = (
    *PROBE_FLAGS,
    "--ent-coef",
    0,
    "--no-clip-vloss",
)  # clipped, the value moves too slowly for a short test


def test_reset_rows_are_not_learned_from(file, tmp_path):
    seen = set()
    flags = ("--env-id", "Probe/MarkedLast-v0", *SMALL, "--total-timesteps", 256)
    train(
        file,
        tmp_path,
        *flags,
        on_update=lambda names: seen.update(names["b_obs"][names["mb"]].flatten().tolist()),
    )
    assert seen == {float(np.float32(t / 3)) for t in range(3)}


def test_other_autoreset_modes_are_refused(file, tmp_path):
    """An environment that resets on the same step has no reset rows, and hides its last
    observations."""
    with pytest.raises(
        SystemExit,
        match="autoreset mode is not NEXT_STEP",
    ):
        train(file, tmp_path, "--env-id", "Probe/SameStep-v0", *SMALL, "--total-timesteps", 64)


def test_target_kl_stops_the_epochs(file, tmp_path):
    updates = []
    flags = (*SMALL, "--total-timesteps", 64, "--learning-rate", 0.02, "--target-kl", 1e-6)
    train(file, tmp_path, *flags, on_update=lambda names: updates.append(names["mb"]))
    assert len(updates) == 2, "one epoch of two minibatches, not three"


def test_sampled_actions_follow_the_policy(file, tmp_path):
    sample = train(file, tmp_path, *SMALL, "--total-timesteps", 64)["sample"]
    probs = torch.tensor([0.5, 0.3, 0.15, 0.05, 0.0])
    counts = torch.bincount(sample(probs.log().expand(100_000, 5)), minlength=5)
    torch.testing.assert_close(counts / 100_000, probs, atol=0.006, rtol=0)


# learning


def last_hundred(run):
    return np.mean([value for _, value in scalars(run)["charts/episodic_return"]][-100:])


@pytest.mark.parametrize(
    "seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3))]
)
def test_learns_cartpole(file, tmp_path, seed):
    train(file, tmp_path, *FAST_CARTPOLE, "--seed", seed)
    assert last_hundred(only_run(tmp_path)) >= 475


FAST_CARTPOLE = (
    "--total-timesteps",
    150_000,
    "--num-envs",
    8,
    "--num-steps",
    64,
    "--learning-rate",
    0.001,
    "--gamma",
    0.98,
)
FAST_CARTPOLE = (
    *FAST_CARTPOLE,
    "--gae-lambda",
    0.8,
    "--update-epochs",
    8,
    "--num-minibatches",
    2,
    "--ent-coef",
    0,
)
FAST_CARTPOLE = (*FAST_CARTPOLE, "--no-clip-vloss")


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_learns_cartpole_with_the_defaults(file, tmp_path, seed):
    train(file, tmp_path, "--seed", seed)
    assert last_hundred(only_run(tmp_path)) >= 495


# the same seed, the same run


def test_same_seed_same_bits(file, tmp_path):
    flags = (*SMALL, "--total-timesteps", 640)
    for name, seed in {"a": 1, "b": 1, "c": 2}.items():
        train(file, tmp_path / name, *flags, "--seed", seed)
    a, b, c = (only_run(tmp_path / name) for name in "abc")
    assert same(weights(a), weights(b)) and not same(weights(a), weights(c))
    assert {k: v for k, v in scalars(a).items() if k != "charts/SPS"} == {
        k: v for k, v in scalars(b).items() if k != "charts/SPS"
    }


def test_recording_a_video_changes_nothing(file, tmp_path):
    flags = (*SMALL, "--total-timesteps", 320)
    train(file, tmp_path / "without", *flags)
    train(file, tmp_path / "with", *flags, "--capture-video")
    assert same(weights(only_run(tmp_path / "with")), weights(only_run(tmp_path / "without")))
    videos = sorted(video.name for video in (only_run(tmp_path / "with") / "videos").iterdir())
    assert videos[:2] == ["step-0-episode-0.mp4", "step-0-episode-1.mp4"]
