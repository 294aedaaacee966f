"""cleanrl/ppo_jaxtari_jax.py. test_jaxtari_N guards detail N of ppo-jaxtari-jax.md.

The other numbers are those of docs/rl-algorithms/ppo.md; tests/mutations shows that each test can
fail. Compiling takes longer than everything else here: so tests share a program, which is made
once for each file. JAXtari's own games are played with the sprites of
scripts/draw_jaxtari_sprites.py, which are drawn into a temporary folder.
"""

import atexit
import functools
import itertools
import os
import runpy
import shutil
import sys
import tempfile
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import jaxtari
import numpy as np
import pytest
import torch
from jaxtari.wrappers import AtariWrapper, PixelObsWrapper
from PIL import Image

from cleanrl_utils import enjoy
from tests import jaxtari_probes
from tests.harness import ROOT, about, only_run, read_checkpoint, same, scalars
from tests.test_contract import refuse
from tests.test_dqn_jax import compiled_quickly, leaves, tensors, train, without_speed
from tests.test_ppo_jax import FEW, advantages_of, halfway, orders_of, runs_of, step_of


@functools.cache
def pictures():
    """The data folder with sprites for JAXtari in it; it is removed when this process ends."""
    if not sys.platform.startswith("linux"):
        pytest.skip("XDG_DATA_HOME says where the sprites are on Linux only")
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    with mock.patch.dict(os.environ, XDG_DATA_HOME=folder):
        runpy.run_path(str(ROOT / "scripts" / "draw_jaxtari_sprites.py"), run_name="__main__")
    return folder


def load(file, *flags):
    """The names of a file, the arguments of a run and the functions of its game."""
    names = runpy.run_path(str(file))
    with (
        mock.patch.dict(os.environ, XDG_DATA_HOME=pictures()),
        mock.patch.object(sys, "argv", [str(file), *map(str, flags)]),
    ):
        args = names["tyro"].cli(names["Args"])
        return names, args, names["make_game"](args)


def game_of(file, *flags):
    """The functions of a game, compiled for several at once, and its number of actions."""
    _, _, (*functions, num_actions) = load(file, *flags)

    def quickly(function):
        return lambda *args: compiled_quickly(lambda: function(*args))

    return *(quickly(jax.jit(jax.vmap(function))) for function in functions), num_actions


def begin(file, *flags):
    """The arguments of a run, the run at its start, and a function that trains one iteration."""
    names, args, game = load(file, *flags)
    init, train = names["make_program"](args, game)
    run = compiled_quickly(lambda: jax.device_get(jax.jit(init)(jax.random.PRNGKey(args.seed))))
    program = jax.jit(lambda run: train(run, 1))

    def iterate(run):
        answers = compiled_quickly(lambda: jax.device_get(program(run)))
        run, metrics, checked, episodes = answers
        assert all(map(np.isfinite, checked.values()))
        return run, (metrics, [x[0] for x in episodes])

    return args, run, iterate


def probe(name):
    return ("--env-id", f"tests.jaxtari_probes:{name}")


# games, frame by frame


def seen(frames):
    """What the agent sees of some frames: their brightest pixels, in gray, by Pillow, 84 x 84."""
    gray = np.max(frames, 0) @ np.float64([0.299, 0.587, 0.114])
    return np.asarray(
        Image.fromarray(gray.astype(np.float32)).resize((84, 84), Image.Resampling.BILINEAR)
    )


@pytest.mark.parametrize("name", ["breakout", pytest.param("pong", marks=pytest.mark.slow)])
def test_atari_2_5_and_7_frames_are_those_of_a_plain_loop(file, tmp_path, name):
    """An action lasts four frames, of which the last two are seen; four such are stacked."""
    start, step, _, num_actions = game_of(file, "--env-id", name)
    with mock.patch.dict(os.environ, XDG_DATA_HOME=pictures()):
        env = jaxtari.make(name)
    play, draw, rng = jax.jit(env.step), jax.jit(env.render), np.random.default_rng(1)
    state, obs = start(jax.random.PRNGKey(1)[None])
    mine = jax.tree.map(lambda x: x[0], state.env_state)
    stack = [seen([draw(mine)])] * 4
    for _ in range(40):
        np.testing.assert_allclose(obs[0], stack, atol=0.6)
        action, frames, reward = jnp.int32(rng.integers(num_actions)), [], 0
        for _ in range(4):
            _, mine, gained, _, _ = play(mine, action)
            frames.append(np.asarray(draw(mine)))
            reward += int(gained)
        stack = [*stack[1:], seen(frames[2:])]
        state, obs, got, _, is_over = step(state, obs, action[None])
        assert got[0] == reward and not is_over[0]
    assert obs.dtype == np.uint8 and np.ptp(np.int32(obs[0]), axis=0).max() > 20, "something moves"


@pytest.mark.slow
def test_atari_2_5_and_7_frames_are_those_of_jaxtari(file, tmp_path):
    """Of its own wrapper but for rounding; after a game's end, that shows the next game."""
    start, step, _, _ = game_of(file)
    with mock.patch.dict(os.environ, XDG_DATA_HOME=pictures()):
        theirs = AtariWrapper(jaxtari.make("breakout"), sticky_actions=0.0)
    theirs = PixelObsWrapper(theirs, do_pixel_resize=True, grayscale=True, clip_reward=False)
    (state, obs), (their_obs, their_state) = (
        start(jax.random.PRNGKey(5)[None]),
        theirs.reset(jax.random.PRNGKey(5)),
    )
    rng, ends, is_over = np.random.default_rng(2), 0, False
    while not is_over:
        np.testing.assert_allclose(np.int32(obs[0]), np.int32(their_obs)[..., 0], atol=1.5)
        action = jnp.int32(rng.integers(4))
        state, obs, (reward,), (terminated,), (is_over,) = step(state, obs, action[None])
        their_obs, their_state, their_reward, their_end, their_cut, infos = theirs.step(
            their_state, action
        )
        assert (reward, terminated, is_over) == (
            their_reward,
            their_end,
            infos["env_done"] | their_cut,
        )
        ends += terminated
    assert ends == 5, "five lives, one game"


def play_one(file, *flags, turns=1):
    """What the steps of a game return, until it is over."""
    start, step, _, _ = game_of(file, *flags)
    state, obs = start(jax.random.PRNGKey(1)[None])
    answers = []
    while not answers or (len(answers) < turns and not answers[-1][-1]):
        state, obs, *rest = step(state, obs, jnp.zeros(1, jnp.int32))
        answers.append(jax.tree.map(lambda x: np.asarray(x)[0], (state.env_state, obs, *rest)))
    return answers


def test_atari_1_and_4_no_ops_and_fire_before_a_game(file, tmp_path):
    start, _, _, _ = game_of(file, *probe("ConstantValue"))
    states, _ = jax.device_get(start(jax.random.split(jax.random.PRNGKey(1), 400)))
    assert {*states.step.tolist()} == {*range(1, 32)}, "0 to 30 frames, and one of FIRE"
    assert states.env_state.has_begun.all() and (states.env_state.frame == 0).all()


@pytest.mark.parametrize("flags", [(), pytest.param(("--sticky",), marks=pytest.mark.slow)])
def test_atari_3_a_lost_life_ends_the_episode_not_the_game(file, tmp_path, flags):
    states, _, _, terminated, is_over = zip(
        *play_one(file, *probe("RandomEnds"), *flags, turns=100), strict=True
    )
    lives = [3, *(int(state.lives) for state in states)]
    assert lives[-1] == 0 and len(lives) > 4 and sum(is_over) == 1 and is_over[-1]
    assert [*terminated] == ([*is_over] if flags else [b < a for a, b in itertools.pairwise(lives)])


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("--sticky",)])
def test_sticky_actions(file, tmp_path, flags):
    """The frame that counts repeats FIRE, which pays, with a probability of a quarter."""
    start, step, _, _ = game_of(file, *probe("ActionMatters"), *flags)
    rewards = np.asarray(
        step(*start(jax.random.split(jax.random.PRNGKey(1), 400)), jnp.zeros(400, jnp.int32))[2]
    )
    assert {*rewards} <= {-1, 1} and (rewards == 1).mean() == pytest.approx(
        0.25 * len(flags), abs=0.06
    )


@pytest.mark.parametrize(
    ("flags", "frames"), [((), 3), pytest.param(("--max-frames", 1), 1, marks=pytest.mark.slow)]
)
def test_jaxtari_1_nothing_happens_after_the_end(file, tmp_path, flags, frames):
    """Each of three frames pays 1 and is brighter; the fourth would too. So with a truncation."""
    ((state, obs, reward, terminated, is_over),) = play_one(file, *probe("EndsInTheMiddle"), *flags)
    assert (reward, terminated, is_over, state.frame) == (frames, frames == 3, True, frames)
    assert obs[:, 0, 0].tolist() == [127, 127, 127, int(127.5 * (1 + 0.3 * frames))]


# an iteration once more: games frame by frame, PyTorch's network, autograd and Adam


def network(params, obs):
    """Log-probabilities and values, as ppo_atari.py computes them."""
    params, x = params["params"], torch.tensor(np.asarray(obs)).float() / 255
    for i, stride in enumerate((4, 2, 1)):
        layer = params[f"Conv_{i}"]
        x = torch.nn.functional.conv2d(
            x, layer["kernel"].permute(3, 2, 0, 1), layer["bias"], stride
        ).relu()
    x = (
        x.permute(0, 2, 3, 1).flatten(1) @ params["Dense_0"]["kernel"] + params["Dense_0"]["bias"]
    ).relu()
    logits, value = (
        x @ params[name]["kernel"] + params[name]["bias"] for name in ("Dense_1", "Dense_2")
    )
    return logits.log_softmax(-1), value.squeeze(-1)


@torch.no_grad()
def follow(args, run):
    """The rollout of a run's next iteration, the world after it, and the orders of the epochs.

    By JAXtari's own frames, with the random numbers that the program draws."""
    env = getattr(jaxtari_probes, args.env_id.split(":")[1])()
    game = AtariWrapper(env, sticky_actions=0.0, max_frames_per_episode=args.max_frames)

    def picture(state):
        return np.full((84, 84), np.asarray(env.render(state))[0, 0, 0])

    _, noise_key, reset_key, order_key = jax.random.split(run["key"], 4)
    rows, size = (args.num_steps, args.num_envs), args.num_steps * args.num_envs
    noise = np.asarray(jax.random.gumbel(noise_key, (*rows, 2)))
    fresh = [
        jax.device_get(game.reset(key)[1]) for key in jax.random.split(reset_key, args.num_envs)
    ]
    params, world, rollout = tensors(run["agent"]["params"]), run["world"], []
    for t in range(args.num_steps):
        log_probs, values = (x.numpy() for x in network(params, world["obs"]))
        row, new = [], []
        for e in range(args.num_envs):
            action, state = (
                int((log_probs[e] + noise[t, e]).argmax()),
                jax.tree.map(lambda x, e=e: x[e], world["env_state"]),
            )
            reward, terminated, is_over = np.float32(0), False, False
            for _ in range(4):  # all that happens does so in the first
                if not is_over:
                    _, state, gained, is_end, is_cut, infos = jax.device_get(
                        game.step(state, jnp.int32(action))
                    )
                    reward, terminated, is_over = (
                        reward + gained,
                        terminated or bool(is_end),
                        bool(infos["env_done"] | is_cut),
                    )
            last = np.append(world["obs"][e][1:], picture(state.env_state)[None], 0)
            total, length = world["episode_return"][e] + reward, world["episode_length"][e] + 1
            row.append(
                (
                    world["obs"][e],
                    action,
                    log_probs[e, action],
                    values[e],
                    reward,
                    terminated,
                    is_over,
                    last,
                    total,
                    length,
                )
            )
            begins = fresh[(e - t) % args.num_envs]
            state, obs = (
                (begins, np.stack([picture(begins.env_state)] * 4)) if is_over else (state, last)
            )
            kept = np.float32([total, length]) * (not is_over)
            new.append(
                dict(env_state=state, obs=obs, episode_return=kept[0], episode_length=kept[1])
            )
        world = jax.tree.map(lambda *x: np.stack(x), *new)
        rollout.append([np.stack(column) for column in zip(*row, strict=True)])
    rollout = [np.stack(column) for column in zip(*rollout, strict=True)]
    return rollout, world, orders_of(args, order_key, size)


def learn(args, run, adam, params, rollout, orders):
    """The metrics of an iteration in which Adam changes params as in ppo_atari.py.

    Also how often each clip mattered."""
    obs, actions, logprobs, values, rewards, terminated, is_over, last, _, _ = rollout
    next_values = (
        network(params, last.reshape(-1, 4, 84, 84))[1].detach().numpy().reshape(values.shape)
    )
    advantages = advantages_of(
        args, values, next_values, np.sign(rewards), terminated, terminated | is_over
    )
    returns, total = advantages + values, args.total_timesteps // advantages.size
    rate = args.learning_rate * (
        1 - args.anneal_lr * (int(run["global_step"]) // advantages.size) / total
    )
    adam.param_groups[0]["lr"] = rate
    columns = [
        x.reshape(advantages.size, *x.shape[2:])
        for x in (obs, actions, logprobs, values, advantages, returns)
    ]
    clipfracs, did = [], dict(ratio=0, value=0, norm=0)
    for order in orders:
        for mb in order.reshape(args.num_minibatches, -1):
            b_obs, b_actions, b_logprobs, b_values, b_advantages, b_returns = (
                torch.tensor(x[mb]) for x in columns
            )
            log_probs, value = network(params, b_obs)
            ratio = (log_probs[range(len(mb)), b_actions] - b_logprobs).exp()
            if args.norm_adv:
                b_advantages = (b_advantages - b_advantages.mean()) / (
                    b_advantages.std(correction=0) + 1e-8
                )
            near = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
            gain = torch.minimum(ratio * b_advantages, near * b_advantages)
            error, near_value = (
                (value - b_returns) ** 2,
                b_values + (value - b_values).clamp(-args.clip_coef, args.clip_coef),
            )
            worse = (
                torch.maximum(error, (near_value - b_returns) ** 2) if args.clip_vloss else error
            )
            entropy = torch.distributions.Categorical(logits=log_probs).entropy().mean()
            policy_loss, value_loss = -gain.mean(), worse.mean() / 2
            adam.zero_grad()
            (policy_loss + args.vf_coef * value_loss - args.ent_coef * entropy).backward()
            norm = torch.nn.utils.clip_grad_norm_(jax.tree.leaves(params), args.max_grad_norm)
            adam.step()
            clipfracs.append(float(((ratio - 1).abs() > args.clip_coef).float().mean()))
            did["ratio"] += int((gain < ratio * b_advantages).sum())
            did["value"] += int((worse > error).sum())
            did["norm"] += int(norm > args.max_grad_norm)
    metrics = {
        "value_loss": value_loss,
        "policy_loss": policy_loss,
        "entropy": entropy,
        "clipfrac": np.mean(clipfracs),
    }
    metrics |= {"old_approx_kl": -ratio.log().mean(), "approx_kl": (ratio - 1 - ratio.log()).mean()}
    metrics |= {"explained_variance": 1 - advantages.var() / returns.var()}
    metrics = {f"losses/{name}": float(torch.as_tensor(x).detach()) for name, x in metrics.items()}
    return metrics | {"charts/learning_rate": rate}, did


WATCHED = "--max-frames 45 --num-envs 4 --num-steps 16 --num-minibatches 2 --update-epochs 2"
WATCHED += " --total-timesteps 256 --learning-rate 0.001 --gamma 0.9 --gae-lambda 0.7"
WATCHED += " --clip-coef 0.01 --vf-coef 0.7 --ent-coef 0.3 --max-grad-norm 0.4"
WATCHED = (*probe("RandomEnds"), *WATCHED.split())


@functools.cache
def watch(file, *flags):
    """The states of a run around two iterations, what each logged, and what follow expects."""
    args, run, program = begin(file, *WATCHED, *flags)
    states, logs = [run], []
    for _ in range(2):
        run, log = program(run)
        states.append(run)
        logs.append(log)
    return args, states, logs, [follow(args, state) for state in states[:-1]]


def test_jaxtari_2_and_core_1_games_run_on_and_begin_from_those_of_the_iteration(file, tmp_path):
    """The world after an iteration, and every end in it, are those of games played one by one."""
    _, states, logs, expected = watch(file)
    lost, over, cut = 0, 0, 0
    for after, (_, (is_over, returns, lengths)), (rollout, world, _) in zip(
        states[1:], logs, expected, strict=True
    ):
        terminated, ends, total, length = (rollout[i] for i in (5, 6, 8, 9))
        lost, over, cut = (
            lost + (terminated & ~ends).sum(),
            over + (terminated & ends).sum(),
            cut + (ends & ~terminated).sum(),
        )
        np.testing.assert_array_equal(is_over, ends)
        np.testing.assert_allclose(returns[is_over], total[is_over], atol=1e-5)
        np.testing.assert_array_equal(lengths[is_over], length[is_over])
        for got, wanted in zip(leaves(after["world"]), leaves(world), strict=True):
            np.testing.assert_allclose(np.float64(got), np.float64(wanted), atol=1e-5)
    assert lost > 5 and over > 2 and cut > 2, "ends of all kinds"
    assert after["world"]["episode_length"].max() > 0, "some are under way"


def test_core_2_and_atari_8_orthogonal_weights_and_zero_biases(file, tmp_path):
    _, (run, *_), _, _ = watch(file)
    layers = run["agent"]["params"]["params"]
    assert {*layers} == {"Conv_0", "Conv_1", "Conv_2", "Dense_0", "Dense_1", "Dense_2"}, (
        "all shared but the heads"
    )
    shapes = [layers[f"Conv_{i}"]["kernel"].shape for i in range(3)]
    assert shapes == [(8, 8, 4, 32), (4, 4, 32, 64), (3, 3, 64, 64)] and layers["Dense_0"][
        "kernel"
    ].shape == (3136, 512)
    for name, std in {"Dense_1": 0.01, "Dense_2": 1.0}.items() | {
        (name, 2**0.5) for name in layers if name < "Dense_1"
    }:
        weight = layers[name]["kernel"].reshape(-1, layers[name]["kernel"].shape[-1])
        np.testing.assert_allclose(weight.T @ weight, std**2 * np.eye(weight.shape[1]), atol=1e-4)
        assert np.abs(layers[name]["bias"]).max() == 0


@pytest.mark.parametrize(
    "flags",
    [
        (),
        pytest.param(
            ("--no-norm-adv", "--no-clip-vloss", "--no-anneal-lr"), marks=pytest.mark.slow
        ),
    ],
)
def test_core_3_to_12_and_atari_6_to_9_an_iteration_is_that_of_ppo_atari(file, tmp_path, flags):
    """Orders, advantages of clipped rewards, losses, gradients and Adam's steps, twice."""
    args, states, logs, rollouts = watch(file, *flags)
    params = tensors(states[0]["agent"]["params"])
    adam = torch.optim.Adam(jax.tree.leaves(params), eps=1e-5)
    for before, after, (metrics, _), (rollout, _, orders) in zip(
        states[:-1], states[1:], logs, rollouts, strict=True
    ):
        with (
            torch.no_grad()
        ):  # each iteration from where the program was, so that rounding does not add up
            for mine, its in zip(
                jax.tree.leaves(params), leaves(before["agent"]["params"]), strict=True
            ):
                mine.copy_(torch.tensor(its))
        assert (
            np.abs(rollout[4]).max() > 1.5
            and len({tuple(order) for order in [*orders, range(64)]}) == 3
        )
        expected, did = learn(args, before, adam, params, rollout, orders)
        assert did["ratio"] > 5 and did["norm"] > 1 and (did["value"] > 5) == args.clip_vloss, did
        assert metrics.keys() == expected.keys()
        for name, value in expected.items():
            assert metrics[name] == pytest.approx(value, rel=1e-3, abs=2e-5), name
        for got, wanted in zip(
            leaves(after["agent"]["params"]), jax.tree.leaves(params), strict=True
        ):
            np.testing.assert_allclose(got, wanted.detach().numpy(), atol=2e-5)
    assert expected["charts/learning_rate"] == pytest.approx(0.001 if flags else 0.00075)


def arrays_in(jaxpr):
    """All that a program computes, in loops and functions too."""
    for equation in jaxpr.eqns:
        yield from (variable.aval for variable in equation.outvars)
        for inner in jax.tree.leaves(
            equation.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
        ):
            if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                yield from arrays_in(getattr(inner, "jaxpr", inner))


def test_jaxtari_3_images_are_kept_once(file, tmp_path):
    """A rollout's images exist once, as bytes; only those of a minibatch become floats."""
    _, (run, *_), _, _ = watch(file)
    names, args, game = load(file, *WATCHED)
    _, train = names["make_program"](args, game)
    found = list(arrays_in(jax.make_jaxpr(lambda run: train(run, 1))(run).jaxpr))
    image, rollout = 4 * 84 * 84, args.num_envs * args.num_steps
    minibatch = rollout // args.num_minibatches
    assert max(x.size for x in found if x.dtype == jnp.uint8) == rollout * image
    assert max(x.size for x in found if x.dtype == jnp.float32) < minibatch * 20 * 20 * 256 + 1, (
        "the first layer's patches"
    )


def test_jaxtari_4_products_are_convolutions(file, tmp_path):
    """The outputs and both gradients of a convolution."""
    convolve = functools.partial(runpy.run_path(str(file))["convolve"], strides=(2, 2))
    plain = functools.partial(jax.lax.conv_general_dilated, window_strides=(2, 2), padding="VALID")
    plain = functools.partial(plain, dimension_numbers=("NHWC", "HWIO", "NHWC"))
    images, kernel, grads = (
        jax.random.normal(jax.random.key(x), y)
        for x, y in enumerate([(2, 10, 10, 3), (4, 4, 3, 5), (2, 4, 4, 5)])
    )

    @functools.partial(jax.jit, static_argnums=0)
    def both(function, x, k):
        output, pull = jax.vjp(function, x, k)
        return output, *pull(grads)

    answers = [compiled_quickly(lambda f=f: both(f, images, kernel)) for f in (convolve, plain)]
    for got, wanted in zip(*answers, strict=True):
        np.testing.assert_allclose(got, wanted, atol=1e-4)
    assert "conv" not in str(jax.make_jaxpr(convolve)(images, kernel))


# known answers

PROBE_FLAGS = "--total-timesteps 1280 --num-envs 8 --num-steps 4 --num-minibatches 1"
PROBE_FLAGS += " --update-epochs 2 --learning-rate 0.001 --gamma 0.5 --ent-coef 0 --no-clip-vloss"
PROBE_FLAGS = PROBE_FLAGS.split()


def values_of(names, *stacks):
    params = jax.tree.map(lambda x: x[0], names["runs"]["agent"]["params"])
    stacks = np.stack(
        [np.broadcast_to(np.uint8(stack)[:, None, None], (4, 84, 84)) for stack in stacks]
    )
    return np.asarray(names["Agent"](2).apply(params, stacks)[1]).tolist()


@pytest.mark.parametrize(
    ("name", "flags", "values"),
    [
        pytest.param("ConstantValue", (), {(127,) * 4: 1}, marks=pytest.mark.slow),
        pytest.param("ConstantValue", ("--max-frames", 1), {(127,) * 4: 2}, marks=pytest.mark.slow),
        pytest.param(
            "Discounting", (), {(127,) * 4: 0.5, (127, 127, 127, 255): 1}, marks=pytest.mark.slow
        ),
    ],
    ids=["ConstantValue", "CutEveryStep", "Discounting"],
)
def test_values_of_probes(file, tmp_path, name, flags, values):
    """A terminated game is worth nothing; a truncated one as much as if it were not."""
    if flags:  # reward and truncation come in the first frame, and no life may be lost in it
        with mock.patch.object(jaxtari_probes.ConstantValue, "is_lost", lambda *_: False):
            names = train(file, tmp_path, *probe(name), *PROBE_FLAGS, *flags)
    else:
        names = train(file, tmp_path, *probe(name), *PROBE_FLAGS)
    assert values_of(names, *values) == pytest.approx(list(values.values()), abs=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ActionMatters", "ActionAndObsMatter"])
def test_actions_of_probes(file, tmp_path, name):
    """Acting through load_policy in fresh environments, as every evaluation does."""
    train(file, tmp_path, *probe(name), *PROBE_FLAGS, "--total-timesteps", 5120)
    run = only_run(tmp_path)
    assert enjoy.evaluate(run, enjoy.load_checkpoint(run), 40, env_id=probe(name)[1])["mean"] > 0.9


# what is written


@pytest.mark.slow
def test_no_game_is_lost(file, tmp_path):
    """All games of MarkedLast end together, each at its own step; evaluation plays whole games."""
    small = "--num-envs 5 --num-steps 10 --num-minibatches 1 --update-epochs 1"
    flags = (*probe("MarkedLast"), *small.split())
    train(file, tmp_path, *flags, "--total-timesteps", 100, "--seed", 7)
    run = only_run(tmp_path)
    logged, told = scalars(run), about(run)
    assert (
        told["file"] == file.name
        and told["args"]["max_frames"] == 108_000
        and told["packages"]["JAXtari"]
    )
    for metric in ("charts/episodic_return", "charts/episodic_length"):
        assert logged[metric] == [
            ((t - 1) * 5 + env + 1, 3.0) for t in range(3, 20, 3) for env in range(5)
        ]
    assert [step for step, _ in logged["losses/value_loss"]] == [50, 100] and logged["charts/SPS"]
    assert enjoy.evaluate(run, enjoy.load_checkpoint(run), 3, env_id=flags[1])["returns"] == [
        3.0,
        3.0,
        3.0,
    ]


@pytest.mark.slow
def test_runs_side_by_side_and_after_an_interruption(file, tmp_path):
    """Each is the run that it would be alone; --resume of one continues all, bit for bit."""
    flags = (*FEW, *probe("RandomEnds"), "--max-frames", 60)
    whole, part = halfway(file, tmp_path / "many", *flags, "--seed", 4, "--num-seeds", 2)
    alone, alone_part = halfway(file, tmp_path / "alone", *flags, "--seed", 5)
    first, twin = runs_of(whole)
    mine, its = read_checkpoint(only_run(alone)), read_checkpoint(twin)
    assert same(mine["key"], its["key"])
    assert step_of(only_run(alone)) == step_of(twin) == 8 * 64
    params = leaves(mine["agent"]["params"]), leaves(its["agent"]["params"])
    for got, wanted in zip(*params, strict=True):
        np.testing.assert_allclose(got, wanted, atol=1e-4)  # XLA adds up many in another order
    assert not same(read_checkpoint(first)["agent"], its["agent"])
    assert about(first)["batch"] == about(twin)["batch"]
    games = scalars(only_run(alone))["charts/episodic_return"]
    calls = [[x for step, x in games if last - 128 < step <= last] for last in LAST_STEPS]
    means = [(last, np.mean(x)) for last, x in zip(LAST_STEPS, calls, strict=True) if x]
    logged = scalars(twin)["charts/episodic_return"]
    assert len(games) > 10 and [step for step, _ in logged] == [step for step, _ in means]
    for (_, got), (_, wanted) in zip(logged, means, strict=True):
        assert got == pytest.approx(wanted, abs=1e-4)
    for done, cut in ((whole, part), (alone, alone_part)):
        assert {step_of(run) for run in runs_of(cut)} == {4 * 64}
        for a, b in zip(runs_of(done), runs_of(cut), strict=True):
            shutil.copy(next(a.glob("events*")), b)  # curves beyond the checkpoint are hidden
        train(file, tmp_path, "--resume", runs_of(cut)[-1])
        for a, b in zip(runs_of(done), runs_of(cut), strict=True):
            assert a.name == b.name and same(read_checkpoint(a), read_checkpoint(b))
            assert without_speed(a) == without_speed(b) and without_speed(b)


LAST_STEPS = (128, 256, 384, 512)


@pytest.mark.slow
def test_breakout_with_a_video(file, tmp_path):
    flags = "--num-envs 2 --num-steps 8 --num-minibatches 2 --update-epochs 1".split()
    flags = (*flags, "--total-timesteps", 32)
    with mock.patch.dict(os.environ, XDG_DATA_HOME=pictures()):
        train(file, tmp_path, *flags, "--capture-video", "--max-frames", 200)
    run = only_run(tmp_path)
    assert run.name.startswith("breakout__ppo_jaxtari_jax__1__")
    (video,) = (run / "videos").glob("step-32-*.mp4")
    assert video.stat().st_size > 1000


def test_without_sprites_there_is_one_line(file, tmp_path):
    with mock.patch.dict(os.environ, XDG_DATA_HOME=str(tmp_path / "none")):
        line = refuse(file, tmp_path / "run")
    assert line == (
        "cannot train on breakout: the sprites are missing: run python -m jaxtari.install_sprites"
    )


def test_pictures_are_never_drawn_over_others(tmp_path):
    """They are those of the games' own sizes and colors, marked as other than the original ones."""
    folder = Path(pictures()) / "jaxtari"
    assert [path.name for path in folder.iterdir() if path.is_file()] == [
        ".alternative_sprites_installed"
    ]
    names = {
        game: len([*(folder / "sprites" / game).glob("*.npy")]) for game in ("pong", "breakout")
    }
    assert names == {"pong": 24, "breakout": 13} and np.load(
        folder / "sprites" / "pong" / "ball.npy"
    ).shape == (4, 2, 4)
    with (
        mock.patch.dict(os.environ, XDG_DATA_HOME=pictures()),
        pytest.raises(SystemExit, match="there are pictures already"),
    ):
        runpy.run_path(str(ROOT / "scripts" / "draw_jaxtari_sprites.py"), run_name="__main__")
