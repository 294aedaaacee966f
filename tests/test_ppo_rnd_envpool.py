"""cleanrl/ppo_rnd_envpool.py. test_rnd_N guards detail N of docs/rl-algorithms/ppo-rnd.md.

tests/mutations shows that each test bites.
"""

import copy
import runpy

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch.nn import functional as F

from tests.harness import only_run, probe, read_checkpoint, same, scalars, train
from tests.probes import PoolOfProbes, RandomEnds
from tests.test_ppo_atari import PROBE_FLAGS, images_of
from tests.test_ppo_atari_envpool import NumberedPool

envpool = pytest.importorskip("envpool")
WARM_UP = ("--num-iterations-obs-norm-init", 1)
SMALL = ("--num-envs", 4, "--num-steps", 8, "--num-minibatches", 2, "--update-epochs", 1, *WARM_UP)
ENVS = type("Envs", (), {"single_observation_space": gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)})
ENVS.single_action_space = gym.spaces.Discrete(6)


def by_hand(layers, x, activations):
    """The layers of a network one by one; convolutions have strides 4, 2 and 1."""
    strides = iter((4, 2, 1))
    for layer, activation in zip(
        [layer for layer in layers if hasattr(layer, "weight")], activations, strict=True
    ):
        if layer.weight.dim() == 4:
            x = F.conv2d(x, layer.weight, layer.bias, next(strides))
        else:
            x = x.flatten(1) @ layer.weight.T + layer.bias
        x = activation(x)
    return x


def agent_by_hand(agent, obs):
    """Log-probabilities and the two values."""
    hidden = by_hand(agent.network, obs.float() / 255, [F.relu] * 5)
    for_policy = hidden + by_hand(agent.actor_layer, hidden, [F.relu])
    logits = for_policy @ agent.actor.weight.T + agent.actor.bias
    for_values = hidden + by_hand(agent.critic_layer, hidden, [F.relu])
    ext, int_ = (
        for_values @ head.weight[0] + head.bias[0] for head in (agent.critic_ext, agent.critic_int)
    )
    return logits - logits.logsumexp(1, keepdim=True), ext, int_


def errors_by_hand(rnd, frames, moments):
    """The squared errors of the predictor on frames that are normalized with these moments."""
    images = (
        ((frames.double() - moments.mean) / moments.var.add(1e-8).sqrt())
        .clip(-5, 5)
        .float()[:, None]
    )
    target = by_hand(rnd.target, images, [F.leaky_relu] * 3 + [lambda x: x])
    return (
        by_hand(rnd.predictor, images, [F.leaky_relu] * 3 + [F.relu] * 2 + [lambda x: x]) - target
    ) ** 2


def train_on_ends(file, tmp_path, *flags, **hooks):
    return train(file, tmp_path, "--env-id", probe(file, "RandomEnds"), *SMALL, *flags, **hooks)


# the details


def test_rnd_1_sticky_actions(file, tmp_path):
    names = runpy.run_path(str(file))
    config = names["make_envs"](names["Args"](), 1).env.config
    play = {
        "noop_max": 30,
        "use_fire_reset": True,
        "repeat_action_probability": 0.25,
        "episodic_life": True,
    }
    look = {
        "frame_skip": 4,
        "gray_scale": True,
        "img_height": 84,
        "img_width": 84,
        "stack_num": 4,
        "reward_clip": False,
    }
    assert config.items() >= (play | look).items()


def test_rnd_2_two_values(file, tmp_path):
    agent = runpy.run_path(str(file))["Agent"](ENVS)
    layers = {name: layer for name, layer in agent.named_modules() if hasattr(layer, "weight")}
    gains = dict(actor=0.01, critic_ext=0.01, critic_int=0.01)
    gains |= {"actor_layer.0": 0.1, "critic_layer.0": 0.1}
    assert len(layers) == 10 and gains.keys() <= layers.keys()
    widths = [len(layer.weight) for layer in layers.values()]
    assert widths == [32, 64, 64, 256, 448, 448, 448, 6, 1, 1]
    for name, layer in layers.items():
        weight, gain = layer.weight.flatten(1), gains.get(name, 2**0.5)
        weight = weight if len(weight) <= weight.shape[1] else weight.T
        torch.testing.assert_close(
            weight @ weight.T, gain**2 * torch.eye(len(weight)), atol=1e-4, rtol=0
        )
        assert layer.bias.abs().max() == 0
    obs = torch.randint(256, (3, 4, 84, 84), dtype=torch.uint8)
    heads = (agent.actor, agent.critic_ext, agent.critic_int)
    for head in (*heads, agent.actor_layer[0], agent.critic_layer[0]):  # large enough to see
        torch.nn.init.normal_(head.weight)
    expected, outputs = agent_by_hand(agent, obs), agent(obs)
    torch.testing.assert_close(outputs, expected, atol=1e-3, rtol=1e-4)
    assert (outputs[1] - outputs[2]).abs().min() > 0.01, "two values, not one twice"


def test_rnd_3_the_bonus_is_the_error_of_the_prediction(file, tmp_path):
    """Half its square, on the next frame, before predictor and moments have learned of it."""
    before, looks = None, 0

    def look(names):
        nonlocal before, looks
        rnd, looks = names["rnd"], looks + 1
        if looks == 1:
            before = copy.deepcopy(rnd)
        if looks == 2:
            frames = names["obs"][1:, :, -1].flatten(0, 1)
            with torch.no_grad():
                expected = errors_by_hand(rnd, frames, before.obs_moments).sum(1) / 2
                late = errors_by_hand(rnd, frames, rnd.obs_moments).sum(1) / 2
            expected = expected.view(8, 4) * ~torch.from_numpy(names["is_last"][:-1])
            torch.testing.assert_close(names["bonuses"], expected, atol=1e-3, rtol=1e-3)
            assert (
                names["is_last"][:-1].any()
                and expected.max() > 1
                and (late.view(8, 4) - expected).abs().median() > 0.01
            )
            assert same(before.target.state_dict(), rnd.target.state_dict()), (
                "the target stays as it is"
            )
            assert not same(before.predictor.state_dict(), rnd.predictor.state_dict())
            assert not any(p.requires_grad for p in rnd.target.parameters())

    flags = "--num-minibatches 1 --total-timesteps 64 --learning-rate 0.001".split()
    train_on_ends(file, tmp_path, *flags, on_update=look)
    assert looks == 2


def test_rnd_4_frames_are_normalized_and_clipped(file, tmp_path):
    rnd = runpy.run_path(str(file))["Distillation"]((4, 84, 84))
    rnd.obs_moments.mean.copy_(100 + torch.arange(84.0))
    rnd.obs_moments.var.copy_(
        torch.arange(84.0)[:, None] ** 2
    )  # 0 in the first row: what never changed is never divided by 0
    frames = torch.randint(256, (5, 84, 84), dtype=torch.uint8)
    errors = rnd(frames)
    torch.testing.assert_close(
        errors, errors_by_hand(rnd, frames, rnd.obs_moments), atol=1e-3, rtol=1e-3
    )
    assert errors.shape == (5, 512) and errors.min() >= 0 and errors.mean() > 0.01
    black, dark = torch.zeros((2, 1, 84, 84), dtype=torch.uint8)
    dark[:, :15] = (
        20  # at least 80 from the mean, and 5 times the spread of these rows is no more than 70
    )
    torch.testing.assert_close(rnd(black), rnd(dark), atol=0, rtol=0)


class SeenPool(PoolOfProbes):
    """RandomEnds in EnvPool; remembers its frames, except those of steps that only reset."""

    made = None

    def __init__(self, num_envs, **settings):
        super().__init__(RandomEnds, num_envs, settings["seed"])
        self.made.append(self)
        self.seen, self.sent_actions = [], []

    def recv(self):
        was_over = self.is_over
        answer = super().recv()
        self.sent_actions += self.sent.tolist()
        self.seen += [
            frames[-1].copy() for frames, over in zip(answer[0], was_over, strict=True) if not over
        ]
        return answer


def test_rnd_5_random_play_gives_the_first_moments(file, tmp_path, monkeypatch):
    """Of all frames that steps led to; training adds its own. None of these steps is counted."""
    monkeypatch.setattr(SeenPool, "made", [])
    monkeypatch.setattr(envpool, "make_gymnasium", lambda **settings: SeenPool(**settings))
    moments = []
    names = train(
        file, tmp_path, *SMALL, "--num-iterations-obs-norm-init", 3, "--total-timesteps", 32,
        on_update=lambda names: moments.append(copy.deepcopy(names["rnd"].obs_moments)),
    )  # fmt: skip
    made = SeenPool.made  # two to look at the spaces, two to play at random, two to train with
    assert [len(pool.sent_actions) for pool in made] == [0, 0, 48, 48, 16, 16] and names[
        "global_step"
    ] == 32
    assert all(0.25 < np.mean(pool.sent_actions) < 0.75 for pool in made[2:4])
    assert same(moments[0].state_dict(), moments[-1].state_dict()), (
        "they wait while the predictor learns"
    )
    frames = np.stack([frame for pool in made[2:] for frame in pool.seen]).astype(float)
    assert 80 < len(frames) == moments[0].count < 128
    np.testing.assert_allclose(moments[0].mean, frames.mean(0), rtol=1e-9)
    np.testing.assert_allclose(moments[0].var, frames.var(0), rtol=1e-9)


def test_rnd_6_bonuses_are_scaled_by_the_spread_of_their_sums(file, tmp_path):
    """Sums along time, by environment, across episodes and rollouts, without reset steps."""
    sums, history, resets = [0.0] * 4, [], 0

    def look(names):
        nonlocal resets
        for t in range(8):
            for i in range(4):
                if not names["is_last"][t, i]:
                    sums[i] = 0.9 * sums[i] + float(names["bonuses"][t, i])
                    history.append(sums[i])
        resets += names["is_last"][:-1].sum()
        np.testing.assert_allclose(
            names["int_rewards"], names["bonuses"] / np.std(history), rtol=1e-5
        )
        np.testing.assert_allclose(names["bonus_filter"].sums, sums, rtol=1e-5)

    flags = ("--num-minibatches", 1, "--int-gamma", 0.9, "--total-timesteps", 96)
    train_on_ends(file, tmp_path, *flags, on_update=look)
    assert resets > 10 and len(history) + resets == 96


def test_rnd_7_intrinsic_advantages_cross_the_ends_of_episodes(file, tmp_path):
    """Against a slow reference without reset rows, which knows of no episodes in the rest."""
    ends = set()

    def look(names):
        values, is_last = names["int_values"], names["is_last"]
        for e in range(4):
            rows = [t for t in range(8) if not is_last[t, e]]
            following = [float(values[t, e]) for t in rows[1:]] + [float(values[8, e])]
            deltas = [
                float(names["int_rewards"][t, e]) + 0.9 * after - float(values[t, e])
                for t, after in zip(rows, following, strict=True)
            ]
            for k, t in enumerate(rows):
                expected = sum((0.9 * 0.7) ** j * delta for j, delta in enumerate(deltas[k:]))
                assert names["int_advantages"][t, e] == pytest.approx(expected, abs=1e-4)
                assert names["b_int_returns"].view(8, 4)[t, e].item() == pytest.approx(
                    expected + values[t, e], abs=1e-4
                )
            ends.add("reset" if is_last[7, e] else "last" if is_last[8, e] else "middle")

    flags = ("--num-minibatches", 1, "--int-gamma", 0.9, "--gae-lambda", 0.7, "--gamma", 0.5)
    train_on_ends(file, tmp_path, *flags, "--total-timesteps", 128, on_update=look)
    assert ends == {"reset", "last", "middle"}, (
        "a rollout ends with a step that resets, before one, or in an episode"
    )


def test_rnd_8_advantages_of_both_kinds_are_added(file, tmp_path):
    """The extrinsic ones against a slow reference that walks each episode by itself."""
    flags = "--num-steps 16 --int-coef 0.5 --ext-coef 3 --gamma 0.9 --gae-lambda 0.7".split()
    names = train_on_ends(file, tmp_path, *flags, "--total-timesteps", 64)
    values, rewards, terminated, is_last = (
        names[name] for name in ("values", "rewards", "terminated", "is_last")
    )
    assert (
        terminated.any()
        and (is_last[1:] & ~is_last[:-1] & ~terminated).any()
        and names["int_advantages"].std() > 0.1
    )
    for e in range(4):
        for t in np.flatnonzero(~is_last[:-1, e]):
            expected, weight, k = 0.0, 1.0, t
            while True:
                following = 0.0 if terminated[k, e] else float(values[k + 1, e])
                expected += weight * (float(rewards[k, e]) + 0.9 * following - float(values[k, e]))
                if is_last[k + 1, e] or k == 15:
                    break
                weight, k = weight * 0.9 * 0.7, k + 1
            assert names["b_returns"].view(16, 4)[t, e].item() == pytest.approx(
                expected + values[t, e], abs=1e-5
            )
            both = 3 * expected + 0.5 * names["int_advantages"][t, e]
            assert names["b_advantages"].view(16, 4)[t, e].item() == pytest.approx(both, abs=1e-4)


def gradient(loss, module):
    grads = torch.autograd.grad(loss, list(module.parameters()))
    return torch.cat([grad.flatten() for grad in grads])


def flat_grad(module):
    return torch.cat([p.grad.flatten() for p in module.parameters()])


def test_rnd_9_only_the_extrinsic_value_is_clipped(file, tmp_path):
    """The gradient is that of the textbook loss over the real rows, by autograd."""
    left_out, clipped = 0, 0

    def look(names):
        nonlocal left_out, clipped
        agent, mb = copy.deepcopy(names["agent"]), names["mb"][names["b_is_real"][names["mb"]] > 0]
        left_out += len(names["mb"]) - len(mb)
        log_probs, value, int_value = agent_by_hand(agent, names["b_obs"][mb])
        policy = torch.distributions.Categorical(logits=log_probs)
        ratio = torch.exp(policy.log_prob(names["b_actions"][mb]) - names["b_log_probs"][mb])
        advantages = names["b_advantages"][mb]
        advantages = (advantages - advantages.mean()) / advantages.std(correction=0)
        gain = torch.minimum(ratio * advantages, torch.clip(ratio, 0.99, 1.01) * advantages)
        near = names["b_values"][mb] + torch.clip(value - names["b_values"][mb], -0.01, 0.01)
        error = torch.maximum(
            (value - names["b_returns"][mb]) ** 2, (near - names["b_returns"][mb]) ** 2
        )
        int_error = (int_value - names["b_int_returns"][mb]) ** 2
        old_int_values = names["old_int_values"][:-1].flatten()[mb]
        clipped += ((int_value - old_int_values).abs() > 0.01).sum().item()
        loss = (
            -gain.mean()
            + 0.7 * (error.mean() + int_error.mean()) / 2
            - 0.3 * policy.entropy().mean()
        )
        torch.testing.assert_close(
            flat_grad(names["agent"]), gradient(loss, agent), atol=1e-4, rtol=1e-3
        )

    flags = (
        *"--vf-coef 0.7 --ent-coef 0.3 --max-grad-norm 1e9".split(),
        *"--clip-coef 0.01 --learning-rate 0.002".split(),
    )
    train_on_ends(file, tmp_path, *flags, "--total-timesteps", 64, on_update=look)
    assert left_out > 5 and clipped > 5, (
        "there must be rows that are left out, and values that moved"
    )


def test_rnd_10_the_predictor_learns_from_a_quarter_of_the_rows(file, tmp_path):
    """Of the next frames, and other ones in each epoch; its loss is not weighted otherwise."""
    learned, left_out = [], 0

    def look(names):
        nonlocal left_out
        some, rnd = names["mb"][:4].tolist(), copy.deepcopy(names["rnd"])
        real = [row for row in some if names["b_is_real"][row]]
        left_out += len(some) - len(real)
        learned.append(tuple(some))
        frames = names["obs"][1:, :, -1].flatten(0, 1)[real]
        loss = errors_by_hand(rnd, frames, rnd.obs_moments).mean(1).mean()
        assert names["fwd_loss"].item() == pytest.approx(loss.item(), rel=1e-4)
        expected = gradient(loss, rnd.predictor)
        torch.testing.assert_close(
            flat_grad(names["rnd"].predictor), expected, atol=1e-4, rtol=1e-3
        )

    flags = ("--update-epochs", 2, "--max-grad-norm", 1e9, "--total-timesteps", 64)
    names = train_on_ends(file, tmp_path, *flags, on_update=look)
    assert len(names["mb"]) == 16 and len(set(learned)) == 8 and left_out > 2
    logged = scalars(only_run(tmp_path))["losses/fwd_loss"]
    assert [step for step, _ in logged] == [32, 64] and logged[-1][1] == pytest.approx(
        names["losses"]["fwd_loss"].item()
    )


# novelty


class Gallery(gym.vector.VectorEnv):
    """Shows one of four pictures after the other, for ever."""

    single_observation_space = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)
    single_action_space = gym.spaces.Discrete(2)
    pictures = (
        np.random.default_rng(0).integers(0, 256, (8, 6, 6), np.uint8).repeat(14, 1).repeat(14, 2)
    )  # four are never shown

    def __init__(self, num_envs):
        self.num_envs, self.t = num_envs, 0

    def observe(self):
        return np.stack(
            [self.pictures[[(self.t + i + k) % 4 for k in range(4)]] for i in range(self.num_envs)]
        )

    def reset(self, *, seed=None, options=None):
        return self.observe(), {}

    def send(self, actions):
        self.t += 1

    def recv(self):
        no = np.zeros(self.num_envs, dtype=bool)
        return (
            self.observe(),
            np.zeros(self.num_envs),
            no,
            no,
            {"terminated": no, "elapsed_step": self.t},
        )


def test_the_bonus_falls_for_what_was_seen_often_and_stays_for_what_is_new(
    file, tmp_path, monkeypatch
):
    monkeypatch.setattr(envpool, "make_gymnasium", lambda num_envs, **settings: Gallery(num_envs))
    bonuses = []

    def look(names):
        if names["iteration"] in (0, 39):
            bonuses.append(
                torch.no_grad()(names["rnd"])(torch.from_numpy(Gallery.pictures)).sum(1) / 2
            )

    flags = (
        *"--num-envs 2 --num-steps 4 --num-minibatches 1".split(),
        *"--learning-rate 0.001 --update-proportion 0.5".split(),
    )
    train(file, tmp_path, *SMALL, *flags, "--total-timesteps", 320, on_update=look)
    (seen, new), (seen_at_last, new_at_last) = (x.view(2, 4).mean(1) for x in bonuses)
    assert seen > new / 4, "at first, both are new"
    assert seen_at_last < seen / 20 and new_at_last > new / 5


def test_the_curiosity_of_games_is_logged_where_they_end(file, tmp_path):
    """The sum of a game's bonuses, also of one that began in an earlier rollout."""
    expected, sums = [], np.zeros(4)

    def look(names):
        for t in range(8):
            for i in range(4):
                sums[i] += float(names["bonuses"][t, i])
                if names["is_last"][t + 1, i]:
                    expected.append((names["global_step"] - 32 + 4 * t + i + 1, sums[i]))
                    sums[i] = 0

    train_on_ends(file, tmp_path, "--num-minibatches", 1, "--total-timesteps", 96, on_update=look)
    logged = scalars(only_run(tmp_path))
    assert [step for step, _ in logged["charts/episode_curiosity_reward"]] == [
        step for step, _ in expected
    ]
    assert [step for step, _ in logged["charts/episodic_return"]] == [
        step for step, _ in expected
    ] and len(expected) > 10
    assert [x for _, x in logged["charts/episode_curiosity_reward"]] == pytest.approx(
        [x for _, x in expected], rel=1e-4
    )


def test_everything_that_has_a_past_is_in_the_checkpoint(file, tmp_path):
    """And a resumed run starts from it, without playing at random again."""
    flags = ("--num-minibatches", 1, "--checkpoint-interval", 1, "--total-timesteps", 64)
    stopped, resumed = [], []

    def stop(names):
        stopped.append(
            copy.deepcopy((names["rnd"].state_dict(), names["bonus_filter"].state_dict()))
        )
        if len(stopped) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_on_ends(file, tmp_path, *flags, on_update=stop)
    checkpoint = read_checkpoint(only_run(tmp_path))
    assert (
        checkpoint["global_step"] == 32
        and {"agent", "rnd", "bonus_filter", "optimizer"} <= checkpoint.keys()
    )
    assert checkpoint["bonus_filter"].keys() == stopped[0][1].keys()
    assert same(checkpoint["bonus_filter"], stopped[0][1]) and checkpoint["bonus_filter"][
        "sums"
    ].shape == (4,)
    shared = [name for name in stopped[0][0] if "predictor" not in name]  # which has learned since
    assert any("target" in name for name in shared) and {
        "obs_moments.count",
        "obs_moments.mean",
    } <= set(shared)
    assert all(same(checkpoint["rnd"][name], stopped[0][0][name]) for name in shared)

    def look(names):
        resumed.append(
            copy.deepcopy(
                (names["rnd"].obs_moments.count.item(), names["bonus_filter"], names["bonuses"])
            )
        )
        real = torch.from_numpy(~names["is_last"][:-1])
        assert names["rnd"].obs_moments.count == checkpoint["rnd"]["obs_moments.count"] + real.sum()
        assert same(
            names["rnd"].target.state_dict(),
            {k[7:]: v for k, v in checkpoint["rnd"].items() if k[:7] == "target."},
        )
        sums = checkpoint["bonus_filter"]["sums"]
        for bonus, is_real in zip(names["bonuses"], real, strict=True):
            sums = torch.where(is_real, 0.99 * sums + bonus, sums)
        assert same(names["bonus_filter"].sums, sums)
        assert (
            names["bonus_filter"].moments.count
            == checkpoint["bonus_filter"]["moments.count"] + real.sum()
        )

    train(file, tmp_path, "--resume", only_run(tmp_path), on_update=look)
    assert len(resumed) == 1


# pools that take turns


def test_pools_are_not_mixed_up(file, tmp_path, monkeypatch):
    """Every row holds its own environment's observation, action and reward."""
    made, looked = [], []

    def make_numbered(num_envs, **settings):
        made.append(
            NumberedPool(num_envs, len(made) % 2)
        )  # two to look at, two to play at random, two to train with
        return made[-1]

    def look(names):
        if looked:
            return
        looked.append(True)
        first = torch.tensor([0, 20, 50, 70])
        assert torch.equal(names["obs"][:, :, 0, 0, 0], first + torch.arange(9)[:, None])
        actions = np.concatenate([np.stack(pool.sent) for pool in made[4:]], axis=1)
        np.testing.assert_array_equal(names["actions"], actions)
        np.testing.assert_array_equal(names["rewards"], 2 * actions - 1)
        with torch.no_grad():
            log_probs, values, int_values = names["agent"](names["obs"].flatten(0, 1))
        taken = log_probs.view(9, 4, 2)[:-1].gather(2, names["actions"][..., None]).squeeze(2)
        torch.testing.assert_close(names["old_values"], values.view(9, 4), atol=1e-5, rtol=0)
        torch.testing.assert_close(
            names["old_int_values"], int_values.view(9, 4), atol=1e-5, rtol=0
        )
        torch.testing.assert_close(names["old_log_probs"], taken, atol=1e-5, rtol=0)
        assert min(x.view(9, 4).std(1).min() for x in (values, int_values)) > 1e-4, (
            "the values must differ"
        )

    monkeypatch.setattr(envpool, "make_gymnasium", make_numbered)
    train(file, tmp_path, *SMALL, "--num-pools", 2, "--total-timesteps", 32, on_update=look)
    assert looked and len(made) == 6


# known answers


@pytest.mark.parametrize("seed", [1, 2])
def test_the_policy_learns_from_the_start(file, tmp_path, seed):
    """Four images with one right action each, the exact policy gradient, default learning rate.

    Three seeds: with two small layers in a row the gradient norm is 1e-4, and after 30 updates the
    probability still 0.24 to 0.25; with the residual layer they are 1e-2 and 0.53 to 0.74.
    """
    torch.manual_seed(seed)
    agent = runpy.run_path(str(file))["Agent"](ENVS)
    obs = torch.from_numpy(Gallery.pictures)[torch.arange(4)[:, None] + torch.arange(4)]
    optimizer = torch.optim.Adam(agent.parameters(), lr=1e-4, eps=1e-5)
    right = torch.arange(4)[:, None]
    norms = []
    for _ in range(30):
        log_probs, _, _ = agent(obs)
        optimizer.zero_grad()
        (-log_probs.exp().gather(1, right).mean()).backward()
        norms.append(flat_grad(agent.network).norm().item())
        optimizer.step()
    assert norms[0] > 1e-3
    assert agent(obs)[0].exp().gather(1, right).mean() > 0.4


def test_values_of_a_probe(file, tmp_path):
    """Of the rewards, whatever the bonus: 1 before a termination, 2 before a truncation."""
    flags = (*PROBE_FLAGS, *WARM_UP, "--total-timesteps", 320)
    names = train(file, tmp_path, "--env-id", probe(file, "TwoEnds"), *flags)
    with torch.no_grad():
        learned = names["agent"](images_of([[-1] * 4, [1] * 4]))[1].tolist()
    assert learned == pytest.approx([1, 2], abs=0.25)


@pytest.mark.slow
def test_actions_of_a_probe(file, tmp_path):
    """Acting through load_policy in fresh environments, as every evaluation does."""
    flags = (
        *(*PROBE_FLAGS, *WARM_UP),
        *"--learning-rate 0.002 --int-coef 0 --ent-coef 0.01 --total-timesteps 384".split(),
    )
    names = train(file, tmp_path, "--env-id", probe(file, "ActionAndObsMatter"), *flags)
    envs = names["make_envs"](names["args"], 8)
    policy = names["load_policy"](
        torch.load(only_run(tmp_path) / "checkpoint.pt", weights_only=True), envs
    )
    returns, is_last, (obs, _) = [], np.zeros(8, dtype=bool), envs.reset(seed=5)
    while len(returns) < 80:
        obs, _, terminated, truncated, infos = envs.step(policy(obs, is_last))
        is_last = terminated | truncated
        returns += list(infos["episode"]["r"][infos["_episode"]]) if "episode" in infos else []
    assert np.mean(returns) > 0.5


# learning


def returns_in_the_corridor(file, folder, *flags):
    batch = (
        *"--num-envs 8 --num-steps 32 --num-minibatches 4 --update-epochs 2 --num-pools 1".split(),
        *"--learning-rate 0.0005 --no-anneal-lr --num-iterations-obs-norm-init 4".split(),
        *"--total-timesteps 10240".split(),
    )
    train(file, folder, "--env-id", probe(file, "Corridor"), *batch, *flags)
    return [value for _, value in scalars(only_run(folder))["charts/episodic_return"]]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_who_is_curious_comes_to_the_end_of_the_corridor(file, tmp_path):
    """Without the bonus nothing on the way tells where to go, and the end is never reached."""
    curious = returns_in_the_corridor(file, tmp_path / "curious")
    plain = returns_in_the_corridor(file, tmp_path / "plain", "--int-coef", 0)
    assert np.mean(curious[-40:]) > 0.5 and len(plain) > 100 and max(plain) == 0
