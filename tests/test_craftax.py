"""Craftax in ppo_jax.py, ppo_rnn_jax.py and pqn_jax.py, which have the same lines for it.

XLA needs minutes for these environments on a CPU: almost all of it is marked slow.
"""

import runpy

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tests.gymnax_probes  # noqa: F401  registers them
from cleanrl_utils import enjoy
from tests.harness import FILES, compiled_quickly, only_run, scalars, train

CRAFTAX = ("ppo_jax", "ppo_rnn_jax", "pqn_jax")
files = pytest.mark.parametrize("file", [FILES[stem] for stem in CRAFTAX], ids=CRAFTAX)
CLASSIC = "--env-id Craftax-Classic-Symbolic-v1 --num-envs 4 --reset-ratio 2 --num-steps 64"
CLASSIC = (*CLASSIC.split(), "--num-minibatches", 1, "--update-epochs", 1, "--log-interval", 1)


@files
def test_the_nth_to_end_starts_in_the_nth_new_world(file, tmp_path):
    """Two worlds for eight environments: a third one to end in the same step shares the first."""
    names = runpy.run_path(str(file))
    args = names["Args"](env_id="GymnaxProbe/RandomEnds-v0", reset_ratio=4)
    reset, draw, step = names["make_gymnax_steps"](args)
    key = jax.random.key(1)
    drawn = draw(key, (30, 8))
    worlds = np.asarray(drawn[1][0])
    assert worlds.shape == (30, 2, 1) and drawn[0].shape == (30, 8)
    _, env_state = reset(jax.random.split(key, 8))
    stepped, ended = jax.jit(step), []
    for t in range(30):
        now = jax.tree.map(lambda x, t=t: x[t], drawn)
        obs, env_state, _, terminated, truncated, next_obs, achieved = stepped(
            now, env_state, jnp.zeros(8, dtype=jnp.int32)
        )
        ends = np.flatnonzero(terminated | truncated)
        expected = np.asarray(next_obs).copy()
        expected[ends] = worlds[t][np.arange(len(ends)) % 2]
        np.testing.assert_array_equal(obs, expected)
        ended.append(len(ends))
    assert {0, 1, 2, 3} <= set(ended) and achieved == {}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@files
def test_a_time_limit_truncates_and_death_terminates(file, tmp_path):
    pytest.importorskip("craftax")
    names = runpy.run_path(str(file))
    env = names["Craftax"]("Craftax-Classic-Symbolic-v1")
    params, key = env.default_params.replace(max_timesteps=2), jax.random.key(1)
    obs, state = env.reset_env(key, params)
    assert obs.shape == env.observation_space(params).shape == (1345,)
    assert env.action_space(params).n == 17
    step, ends = jax.jit(env.step_env), []
    for health in (9, 9, 0):
        state = state.replace(player_health=health)
        _, state, _, terminated, info = step(key, state, 0, params)
        ends.append((bool(terminated), bool(env.is_truncated(state, params))))
    assert ends == [(False, False), (False, True), (True, True)]
    assert sum(name.startswith("Achievements/") for name in info) == 22


@pytest.mark.slow
@pytest.mark.timeout(3600)
@files
def test_craftax_classic_logs_achievements(file, tmp_path):
    """A run, which is resumed with more steps; the policy plays on in a new world."""
    pytest.importorskip("craftax")
    flags = (*CLASSIC, "--total-timesteps", 4 * 64 * 6)
    compiled_quickly(lambda: train(file, tmp_path, *flags))
    run = only_run(tmp_path)
    more = ("--resume", run, "--total-timesteps", 4 * 64 * 8)
    compiled_quickly(lambda: train(file, tmp_path, *more))
    logged = scalars(run)
    achieved = {name: values for name, values in logged.items() if "Achievements/" in name}
    assert len(achieved) == 22 and len(logged["charts/episodic_return"]) >= 4
    steps = {step for values in achieved.values() for step, _ in values}
    ended = {-(-int(step) // 256) * 256 for step, _ in logged["charts/episodic_return"]}
    assert steps == ended and max(steps) > 256 * 6, "where no episode ended, nothing is said"
    shares = [share for values in achieved.values() for _, share in values]
    assert min(shares) == 0 and 0 < max(shares) <= 100
    returns = [value for _, value in logged["charts/episodic_return"]]
    assert max(returns) > 0.5, "each achievement pays 1"
    checkpoint = enjoy.load_checkpoint(run)
    evaluation = enjoy.evaluate(run, checkpoint, episodes=1)
    assert len(evaluation["returns"]) == 1 and -1 <= evaluation["returns"][0] <= 22
