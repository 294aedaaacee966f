"""cleanrl/ppo_trxl.py. test_trxl_N guards detail N of docs/rl-algorithms/ppo-trxl.md.

The tests of ppo.py's details run here, too: the narrow network and ppo.py's flags do for them.
"""

import copy
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch.nn import functional

from tests import test_ppo
from tests.harness import flat_grad, only_run, read_checkpoint, scalars, train
from tests.test_contract import interrupted

NARROW = "--trxl-dim 16 --trxl-num-heads 2 --trxl-num-layers 2 --trxl-memory-length 3".split()
SMALL = "--num-envs 4 --num-steps 12 --num-minibatches 2 --update-epochs 2".split()
WHOLE = "--num-envs 4 --num-steps 12 --num-minibatches 1 --update-epochs 1".split()  # in one update


def random_ends(file, folder, *flags, **kwargs):
    """Train where episodes end at random moments and in both ways, for three iterations."""
    flags = ["--env-id", "Probe/RandomEnds-v0", "--total-timesteps", 144, *NARROW, *flags]
    return train(file, folder, *flags, **kwargs)


def new_agent(file, folder, *flags):
    return copy.deepcopy(
        random_ends(file, folder, *WHOLE, "--total-timesteps", 48, *flags)["agent"]
    )


def one_by_one(agent, obs, is_last, memory_length):
    """Log-probabilities and values of one environment's steps, from a list of what it remembers."""
    remembered, rows = [], []
    for t in range(len(obs)):
        last = remembered[-memory_length:]
        memory = torch.stack(last, 1) if last else torch.zeros(1, 0, 2, 16)
        age = torch.tensor([len(remembered)])
        log_probs, value, new = agent(torch.as_tensor(obs[t])[None], memory, age)
        rows.append((log_probs[0], value[0]))
        remembered = [] if is_last[t] else [*remembered, new.detach()]
    log_probs, values = zip(*rows, strict=True)
    return torch.stack(log_probs), torch.stack(values)


def last_hundred(run):
    return np.mean([value for _, value in scalars(run)["charts/episodic_return"]][-100:])


# the details of the memory


@pytest.mark.parametrize("memory_length", [1, 3, 20])
def test_trxl_1_the_memory_holds_the_last_steps_of_the_episode(file, tmp_path, memory_length):
    """While acting, over three rollouts of an agent that does not change, and both kinds of end."""
    names, rollouts = ("obs", "is_last", "values", "old_log_probs", "actions", "terminated"), []

    def look(found):
        rollouts.append([found[name][:12].copy() for name in names])

    flags = [*WHOLE, "--init-lr", 1e-12, "--trxl-memory-length", memory_length]
    agent = random_ends(file, tmp_path, *flags, on_update=look)["agent"]
    parts = [np.concatenate(parts) for parts in zip(*rollouts, strict=True)]
    obs, is_last, values, old_log_probs, actions, terminated = parts
    assert terminated.any() and (is_last[1:] & ~terminated[:-1]).any() and len(obs) == 36
    ages = np.diff(np.flatnonzero(is_last.T.flatten()))
    assert ages.max() > 4, "some episodes must be longer than the shorter memories"
    for e in range(4):
        with torch.no_grad():
            log_probs, value = one_by_one(agent, obs[:, e], is_last[:, e], memory_length)
        np.testing.assert_allclose(values[:, e], value, atol=1e-5)
        taken = log_probs[np.arange(36), actions[:, e]]
        np.testing.assert_allclose(old_log_probs[:, e], taken, atol=1e-5)


def test_trxl_1_the_last_value_is_that_of_the_next_step(file, tmp_path):
    """What a rollout is bootstrapped with is the value with which the next rollout begins."""
    values = []

    def look(names):
        values.append(names["values"].copy())

    random_ends(file, tmp_path, *WHOLE, "--init-lr", 1e-12, on_update=look)
    for before, after in pairwise(values):
        np.testing.assert_allclose(before[-1], after[0], atol=1e-5)


def test_trxl_2_other_episodes_are_masked(file, tmp_path):
    """An output depends on so many of the last steps as the episode has, and on no others."""
    agent = new_agent(file, tmp_path)
    obs, age = torch.randn(5, 3), torch.arange(5)
    memory = torch.randn(5, 4, 2, 16, requires_grad=True)
    log_probs, value, _ = agent(obs, memory, age)
    for output in (log_probs[:, 0], value):
        (grad,) = torch.autograd.grad(output.sum(), memory, retain_graph=True)
        found = grad.abs().sum(3).amin(2) > 0
        expected = torch.arange(4, 0, -1) <= age[:, None]
        assert torch.equal(found, expected)


def test_trxl_3_sinusoids_of_the_step(file, tmp_path):
    """What is remembered is the input of each layer and the encoding of its step in the episode."""
    agent, age = new_agent(file, tmp_path), torch.tensor([0, 1, 7, 300])
    obs = torch.randn(1, 3).expand(4, 3)
    _, _, remembered = agent(obs, torch.zeros(4, 0, 2, 16), age)
    expected = torch.zeros(4, 16)
    for row, i in np.ndindex(4, 8):
        angle = int(age[row]) / 10_000 ** (2 * i / 16)
        expected[row, i], expected[row, i + 8] = np.sin(angle), np.cos(angle)
    found = remembered[:, 0] - agent.encode(obs)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    assert torch.equal(
        agent.frequencies, read_checkpoint(only_run(tmp_path))["agent"]["frequencies"]
    )


def test_trxl_3_can_be_turned_off(file, tmp_path):
    agent = new_agent(file, tmp_path, "--trxl-positional-encoding", "none")
    memory = torch.randn(1, 3, 2, 16).expand(2, 3, 2, 16)
    log_probs, _, remembered = agent(torch.ones(2, 3), memory, torch.tensor([3, 300]))
    assert torch.equal(log_probs[0], log_probs[1]) and torch.equal(remembered[0], remembered[1])


def test_trxl_4_attention_is_that_of_pytorch(file, tmp_path):
    """Weighting before projecting is nn.MultiheadAttention, and so are its gradients."""
    attention = new_agent(file, tmp_path).layers[0].attention
    reference = torch.nn.MultiheadAttention(16, 2, batch_first=True)
    weights = [x.weight.detach() for x in (attention.query, attention.key, attention.value)]
    reference.in_proj_weight.data = torch.cat(weights)
    torch.nn.init.zeros_(reference.in_proj_bias)
    reference.out_proj.load_state_dict(attention.output.state_dict())
    query, context = torch.randn(6, 16), torch.randn(6, 5, 16)
    is_visible = torch.rand(6, 5) < 0.6
    is_visible[:, -1] = True
    found = attention(query, context, is_visible)
    options = dict(key_padding_mask=~is_visible, need_weights=False)
    expected, _ = reference(query[:, None], context, context, **options)
    torch.testing.assert_close(found, expected[:, 0], atol=1e-5, rtol=1e-4)
    found.square().sum().backward()
    expected.square().sum().backward()
    grads = [x.weight.grad for x in (attention.query, attention.key, attention.value)]
    torch.testing.assert_close(
        torch.cat(grads), reference.in_proj_weight.grad, atol=1e-4, rtol=1e-3
    )


def test_trxl_5_inputs_of_sublayers_are_normalized(file, tmp_path):
    """A layer by the formula of pre-layer normalization, with scales and shifts of its own."""
    layer = new_agent(file, tmp_path).layers[1]
    norms = layer.norm_query, layer.norm_context, layer.norm_linear
    for norm in norms:
        torch.nn.init.normal_(norm.weight)
        torch.nn.init.normal_(norm.bias)
    x, context, is_visible = torch.randn(6, 16), torch.randn(6, 4, 16), torch.ones(6, 4, dtype=bool)
    query, normal_context = (
        functional.layer_norm(y, (16,), norm.weight, norm.bias)
        for y, norm in ((x, norms[0]), (context, norms[1]))
    )
    hidden = x + layer.attention(query, normal_context, is_visible)
    normal = functional.layer_norm(hidden, (16,), norms[2].weight, norms[2].bias)
    expected = hidden + functional.linear(normal, layer.linear.weight, layer.linear.bias).clamp(
        min=0
    )
    torch.testing.assert_close(layer(x, context, is_visible), expected)


def test_trxl_6_learning_sees_the_memory_that_acted(file, tmp_path):
    """Before an iteration's first update: the policy and the values are those that acted."""
    oldest = []

    def look(names):
        ratio, value, b_values = names["ratio"], names["value"], names["b_values"][names["mb"]]
        torch.testing.assert_close(ratio, torch.ones_like(ratio), atol=1e-5, rtol=0)
        torch.testing.assert_close(value, b_values, atol=1e-5, rtol=1e-4)
        assert not names["window"].requires_grad
        oldest.append(names["age"][0].max())

    random_ends(file, tmp_path, *WHOLE, "--init-lr", 0.01, on_update=look)
    assert max(oldest[1:]) > 1, "some episodes must run on from the rollout before"


def test_trxl_6_the_memory_is_detached(file, tmp_path):
    agent = new_agent(file, tmp_path)
    _, _, remembered = agent(torch.randn(2, 3), torch.zeros(2, 0, 2, 16), torch.zeros(2).long())
    assert not remembered.requires_grad


def test_trxl_7_learning_rate_and_entropy_coefficient_fall_linearly(file, tmp_path):
    """Both to their last value at anneal_steps, where they stay."""
    used = []

    def look(names):
        used.append((names["optimizer"].param_groups[0]["lr"], names["ent_coef"]))

    flags = "--init-lr 0.01 --final-lr 0.002 --init-ent-coef 0.5 --final-ent-coef 0.1".split()
    flags = [*WHOLE, *flags, "--anneal-steps", 192, "--total-timesteps", 288]
    random_ends(file, tmp_path, *flags, on_update=look)
    rates = [0.01, 0.008, 0.006, 0.004, 0.002, 0.002]
    coefficients = [0.5, 0.4, 0.3, 0.2, 0.1, 0.1]
    np.testing.assert_allclose(used, np.transpose([rates, coefficients]), rtol=1e-6)
    logged = scalars(only_run(tmp_path))
    for name, expected in (("learning_rate", rates), ("entropy_coefficient", coefficients)):
        found = [value for _, value in logged[f"charts/{name}"]]
        np.testing.assert_allclose(found, expected, rtol=1e-6)


# the details of ppo.py


def as_ppo(file, folder, *flags, **kwargs):
    """Train as test_ppo.py does, with the network above and the flags whose defaults differ."""
    flags = ["--init-lr" if flag == "--learning-rate" else flag for flag in flags]
    defaults = ["--env-id", "CartPole-v1", "--norm-adv", "--clip-coef", 0.2, *NARROW]
    return train(file, folder, *defaults, *flags, **kwargs)


@pytest.mark.parametrize(
    "name",
    [
        "test_core_5_advantages",
        "test_core_6_every_epoch_shuffles_and_covers_the_rollout",
        "test_core_7_advantages_are_normalized_by_minibatch",
        "test_core_7_can_be_turned_off",
        "test_core_8_clipped_surrogate",
        "test_core_11_gradient_norm_is_clipped",
        "test_core_12_debug_variables",
        "test_reset_rows_are_not_learned_from",
        "test_other_autoreset_modes_are_refused",
        "test_target_kl_stops_the_epochs",
        "test_sampled_actions_follow_the_policy",
        "test_same_seed_same_bits",
    ],
)
def test_as_in_ppo(file, tmp_path, monkeypatch, name):
    monkeypatch.setattr(test_ppo, "train", as_ppo)
    getattr(test_ppo, name)(file, tmp_path)


def test_core_2_orthogonal_weights_and_zero_biases(file, tmp_path):
    agent = new_agent(file, tmp_path, "--init-lr", 1e-12)
    gains = {agent.encoder: 2**0.5, agent.hidden: 2**0.5, agent.actor: 0.1, agent.critic: 1.0}
    for layer, gain in gains.items():
        rows, columns = layer.weight.shape
        weight = layer.weight if rows <= columns else layer.weight.T
        expected = gain**2 * torch.eye(min(rows, columns))
        torch.testing.assert_close(weight @ weight.T, expected, atol=1e-5, rtol=0)
        assert layer.bias.abs().max() < 1e-6


def test_trxl_8_and_core_9_the_value_loss_is_clipped_and_not_halved(file, tmp_path):
    clipped = 0

    def look(names):
        nonlocal clipped
        mb, rows = names["mb"], []
        columns = names["value"], names["b_values"][mb], names["b_returns"][mb]
        for new, old, target in zip(*(column.tolist() for column in columns), strict=True):
            near = old + max(-0.2, min(0.2, new - old))
            rows.append(max((new - target) ** 2, (near - target) ** 2))
            clipped += rows[-1] > (new - target) ** 2 + 1e-6
        assert names["value_loss"].item() == pytest.approx(np.mean(rows), rel=1e-4)

    flags = (*test_ppo.SMALL, "--total-timesteps", 256, "--learning-rate", 0.02)
    as_ppo(file, tmp_path, *flags, on_update=look)
    assert clipped > 20, "the value must have moved far enough for the clip to matter"


def test_core_10_one_loss_for_policy_value_and_entropy(file, tmp_path):
    """The gradient is that of the textbook loss, of real steps only, by the slow reference."""

    def look(names):
        if names["iteration"] > 0:  # the reference knows this rollout only
            return
        agent, args, mb = copy.deepcopy(names["agent"]), names["args"], names["mb"]
        is_last = names["is_last"][:-1]
        rows = [one_by_one(agent, names["obs"][:-1, e], is_last[:, e], 3) for e in range(4)]
        log_probs, values = (torch.stack(x, 1)[~is_last][mb] for x in zip(*rows, strict=True))
        policy = torch.distributions.Categorical(logits=log_probs)
        ratio = torch.exp(policy.log_prob(names["b_actions"][mb]) - names["b_log_probs"][mb])
        adv, clip = names["adv"], args.clip_coef
        gain = torch.minimum(ratio * adv, torch.clip(ratio, 1 - clip, 1 + clip) * adv)
        error = (values - names["b_returns"][mb]) ** 2
        loss = -gain.mean() + 0.7 * error.mean() - 0.3 * policy.entropy().mean()
        expected = torch.autograd.grad(loss, list(agent.parameters()))
        expected = torch.cat([gradient.flatten() for gradient in expected])
        torch.testing.assert_close(flat_grad(names["agent"]), expected, atol=1e-5, rtol=1e-3)

    flags = "--vf-coef 0.7 --init-ent-coef 0.3 --no-clip-vloss --max-grad-norm 1e9".split()
    random_ends(file, tmp_path, *WHOLE, "--total-timesteps", 48, *flags, on_update=look)


# memory


def test_loaded_policy_remembers_until_the_end(file, tmp_path):
    names = random_ends(file, tmp_path, *WHOLE)
    envs, is_last = names["make_envs"](names["args"], 4), names["is_last"]
    seen = np.random.default_rng(1).normal(size=(13, 4, 3)).astype(np.float32)
    expected = [one_by_one(names["agent"], seen[:, e], is_last[:, e], 3)[0] for e in range(4)]

    def no_sample(log_probs):
        return log_probs  # look at the distributions, not at samples

    names["load_policy"].__globals__["sample"] = no_sample
    checkpoint = read_checkpoint(only_run(tmp_path))
    for _ in range(2):  # a policy loaded later knows nothing of what an earlier one saw
        policy = names["load_policy"](checkpoint, envs)
        found = [policy(x, ends) for x, ends in zip(seen, is_last, strict=True)]
        found = torch.from_numpy(np.stack(found, 1)).float()
        torch.testing.assert_close(found, torch.stack(expected).detach(), atol=1e-5, rtol=1e-4)


def test_resume_starts_new_episodes_without_memory(file, tmp_path):
    """Interrupted in the middle of episodes, which do not go on; what was seen in them is gone."""
    flags = ["--env-id", "Probe/Recall-v0", "--num-envs", 4, "--num-steps", 8, *NARROW]
    flags = [*flags, "--num-minibatches", 1, "--update-epochs", 1, "--checkpoint-interval", 1]
    seen = []

    def look(names):
        seen.append([names[name].copy() for name in ("age", "obs", "is_last", "values")])
        seen[-1].append(copy.deepcopy(names["agent"]))

    run = interrupted(file, tmp_path, [*flags, "--total-timesteps", 96], 2, 32, on_update=look)
    assert seen[-1][0][-1].min() > 0, "the interruption must be in the middle of episodes"
    seen.clear()
    train(file, tmp_path, "--resume", run, on_update=look)
    age, obs, is_last, values, agent = seen[0]
    assert age[0].max() == 0 and len(seen) == 1
    for e in range(4):
        with torch.no_grad():
            _, value = one_by_one(agent, obs[:-1, e], is_last[:-1, e], 3)
        np.testing.assert_allclose(values[:-1, e], value, atol=1e-5)


RECALL = "--num-envs 16 --num-steps 36 --init-lr 0.003 --gamma 0.9 --num-minibatches 2".split()
RECALL = [*RECALL, *"--update-epochs 4 --no-clip-vloss --max-grad-norm 1 --norm-adv".split()]
RECALL = [*RECALL, *"--trxl-dim 16 --trxl-num-layers 1 --clip-coef 0.2".split()]


def test_remembers_what_others_forget(file, tmp_path):
    """With a memory of one step there is no other way to know but to have guessed the hint."""
    flags = ["--env-id", "Probe/Recall-v0", "--total-timesteps", 10_000, *RECALL]
    train(file, tmp_path / "with", *flags, "--trxl-memory-length", 5)
    train(file, tmp_path / "without", *flags, "--trxl-memory-length", 1)
    assert last_hundred(only_run(tmp_path / "with")) > 0.8
    assert last_hundred(only_run(tmp_path / "without")) < 0.3


@pytest.mark.parametrize(
    ("probe", "values"),
    [("TruncatedEveryStep", {0: 2}), ("TwoEnds", {-1: 1, 1: 2})],
)
def test_values_of_probes(file, tmp_path, probe, values):
    flags = ["--env-id", f"Probe/{probe}-v0", *RECALL, "--gamma", 0.5, "--num-steps", 16]
    agent = train(file, tmp_path, *flags, "--total-timesteps", 4096)["agent"]
    obs, count = torch.tensor([[float(obs)] for obs in values]), len(values)
    with torch.no_grad():
        _, learned, _ = agent(obs, torch.zeros(count, 0, 1, 16), torch.zeros(count).long())
    assert learned.tolist() == pytest.approx(list(values.values()), abs=0.1)


@pytest.mark.parametrize("probe", ["ShiftedActions", "ImageObs", "ScalarObs"])
def test_actions_of_probes(file, tmp_path, monkeypatch, probe):
    def quickly(file, folder, *flags):
        flags = [*RECALL, "--env-id", f"Probe/{probe}-v0", "--num-steps", 16]
        return train(file, folder, *flags, "--total-timesteps", 4096)

    monkeypatch.setattr(test_ppo, "train", quickly)
    test_ppo.test_actions_of_probes(file, tmp_path, probe)


def test_large_images_are_convolved(file, tmp_path):
    """Of 84 x 84 pixels and three colors, as memory-gym has them; brightness is a share of 255."""
    flags = ["--env-id", "Probe/ColorPicture-v0", *WHOLE, *NARROW, "--total-timesteps", 48]
    agent = train(file, tmp_path, *flags)["agent"]
    obs = torch.randint(256, (2, 84, 84, 3), dtype=torch.uint8)
    convolutions = [layer for layer in agent.encoder if isinstance(layer, torch.nn.Conv2d)]
    assert [tuple(layer.weight.shape) for layer in convolutions] == [
        (32, 3, 8, 8),
        (64, 32, 4, 4),
        (64, 64, 3, 3),
    ]
    expected = agent.encoder(obs.movedim(3, 1) / 255)
    assert torch.equal(agent.encode(obs), expected)


# minigrid


def test_minigrids_tiles_are_one_hot(file, tmp_path):
    pytest.importorskip("minigrid")
    flags = ["--env-id", "MiniGrid-MemoryS7-v0", *WHOLE, *NARROW, "--total-timesteps", 48]
    names = train(file, tmp_path, *flags)
    assert names["obs"].shape == (13, 4, 3, 3, 20)
    parts = np.split(names["obs"], [11, 17], -1)
    assert all((part.sum(-1) == 1).all() and set(np.unique(part)) == {0, 1} for part in parts)
    env = names["envs"].unwrapped.envs[0].unwrapped
    image = env.gen_obs()["image"]
    for number, part in enumerate(parts):
        assert np.array_equal(part[-1, 0].argmax(-1), image[..., number])


def test_mortar_mayhem(file, tmp_path):
    """The default environment: images of 84 x 84 pixels, in which episodes last up to 119 steps."""
    pytest.importorskip("memory_gym", reason="needs requirements/memory_gym.in")
    flags = [*WHOLE, "--num-steps", 60, *NARROW, "--trxl-memory-length", 119]
    names = train(file, tmp_path, *flags, "--total-timesteps", 480, "--capture-video")
    run = only_run(tmp_path)
    assert run.name.startswith("MortarMayhem-Grid-v0__ppo_trxl__1__")
    assert names["obs"].shape[2:] == (84, 84, 3) and names["obs"].max() > 200
    lengths = [length for _, length in scalars(run)["charts/episodic_length"]]
    assert min(lengths) > 40 and list(run.glob("videos/*.mp4"))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_recalls_after_forty_steps(file, tmp_path, seed):
    flags = ["--env-id", "Probe/LongRecall-v0", "--total-timesteps", 120_000, *RECALL]
    flags = [*flags, "--num-steps", 128, "--gamma", 0.99, "--seed", seed]
    train(file, tmp_path / "with", *flags, "--trxl-memory-length", 40)
    train(file, tmp_path / "without", *flags, "--trxl-memory-length", 1)
    assert last_hundred(only_run(tmp_path / "with")) > 0.9
    assert last_hundred(only_run(tmp_path / "without")) < 0.3
