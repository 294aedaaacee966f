"""The probes of tests/probes.py that cleanrl/ppo_continuous_action_jax.py needs, for Brax.

They are compiled with the algorithm; --episode-length says where their episodes are truncated.
Importing this module registers each under its name; so does the id tests.brax_probes:brax/<name>.
"""

import brax.envs
import jax
import jax.numpy as jnp


class Probe(brax.envs.Env):
    """One observation, no choice, episodes of `length` steps; subclasses change one thing."""

    length = 1
    observation_size = 1
    action_size = 1
    backend = "none"

    def __init__(self, backend):
        pass

    def observe(self, key, time):
        return jnp.zeros(1)

    def reward(self, key, obs, action, time):
        return 1.0

    def ends(self, key, obs, time):
        return time == self.length

    def reset(self, rng):
        info = {"key": jax.random.fold_in(rng, 1), "time": jnp.int32(0)}
        return brax.envs.State(
            None, self.observe(rng, jnp.int32(0)), jnp.float32(0), jnp.float32(0), {}, info
        )

    def step(self, state, action):
        key, obs_key, reward_key, end_key = jax.random.split(state.info["key"], 4)
        time = state.info["time"] + 1
        reward = jnp.float32(self.reward(reward_key, state.obs, action[0], time))
        done = jnp.float32(self.ends(end_key, state.obs, time))
        info = {"key": key, "time": time}
        return state.replace(obs=self.observe(obs_key, time), reward=reward, done=done, info=info)


class ConstantValue(Probe):
    """Reward 1, then the end: the value is 1."""


class Discounting(Probe):
    """Reward 1 at the second step: the value is gamma, then 1."""

    length = 2

    def observe(self, key, time):
        return jnp.float32(time)[None]

    def reward(self, key, obs, action, time):
        return time == 2


class Endless(Probe):
    """Reward 1 for ever: the value is 1 / (1 - gamma), also where episodes are cut."""

    length = None

    def ends(self, key, obs, time):
        return False


class TwoEnds(Probe):
    """After -1 the episode terminates; after 1 it goes on, and 1 is seen again."""

    def observe(self, key, time):
        return jnp.where(time == 0, jax.random.rademacher(key, (1,)), 1).astype(jnp.float32)

    def ends(self, key, obs, time):
        return obs[0] < 0


class ActionMatters(Probe):
    """Actions above 0 pay 1, those below cost 1."""

    def reward(self, key, obs, action, time):
        return jnp.sign(action)


class ActionAndObsMatter(Probe):
    """Right is an action above 0 where 1 is seen, and one below 0 where -1 is."""

    def observe(self, key, time):
        return jax.random.rademacher(key, (1,)).astype(jnp.float32)

    def reward(self, key, obs, action, time):
        return obs[0] * jnp.sign(action)


class FarOff(ActionAndObsMatter):
    """The same, with observations so near each other and far from 0 that they need normalizing."""

    def observe(self, key, time):
        return 1000 + super().observe(key, time)

    def reward(self, key, obs, action, time):
        return super().reward(key, obs - 1000, action, time)


class MarkedLast(Probe):
    """Three steps, which can be seen, and a reward of 1 for each."""

    length = 3

    def observe(self, key, time):
        return jnp.float32(time)[None] / 3


class Breaks(Endless):
    """Reward 1, until at the third step an observation or a reward blows up, each in its way."""

    observations = (jnp.inf, 1e20, -1e8, 0, 0, 0)
    rewards = (1, 1, 1, jnp.nan, -1e20, 1e8)

    def step(self, state, action):
        case = jax.random.randint(state.info["key"], (), 0, len(self.rewards))
        state = super().step(state, action)
        breaks = state.info["time"] == 3
        obs = jnp.where(breaks, jnp.float32(self.observations)[case], 0)[None]
        reward = jnp.where(breaks, jnp.float32(self.rewards)[case], 1)
        return state.replace(obs=obs, reward=reward)


class RandomEnds(Probe):
    """Observations and rewards of several scales, with ends and explosions at random moments.

    A critic may see more than the agent does."""

    action_size = 2

    def observe(self, key, time):
        normal, wild, broken = jax.random.split(key, 3)
        seen = jnp.array([3.0, 0.1]) * jax.random.normal(normal, (2,)) + jnp.array([2.0, -1.0])
        seen += jax.random.bernoulli(wild, 0.02) * 100
        return {
            "state": jnp.where((time > 0) & jax.random.bernoulli(broken, 0.02), jnp.nan, seen),
            "privileged_state": seen,
        }

    def reward(self, key, obs, action, time):
        return obs["state"][0].clip(-3, 3) + action - 0.3 + 900 * jax.random.bernoulli(key, 0.003)

    def ends(self, key, obs, time):
        return jax.random.bernoulli(key, 0.1)


for name, probe in list(globals().items()):
    if isinstance(probe, type) and issubclass(probe, Probe) and probe is not Probe:
        brax.envs.register_environment(name, probe)
