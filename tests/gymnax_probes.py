"""The probes of tests/probes.py that cleanrl/ppo_jax.py and ppo_rnn_jax.py need, as gymnax
environments, which are compiled with the algorithm.

Each is registered under GymnaxProbe/<class name>-v0; importing this module is enough, and so is the
id tests.gymnax_probes:GymnaxProbe/...-v0."""

import gymnax
import jax
import jax.numpy as jnp
from flax import struct
from gymnax.environments import environment, spaces


@struct.dataclass
class State(environment.EnvState):
    obs: jax.Array
    is_cut: jax.Array


class Probe(environment.Environment):
    """One observation, no choice, episodes of `length` steps; the subclasses change one thing
    each."""

    length = 1
    num_actions = 2

    def observe(self, key, time):
        return jnp.zeros(1)

    def reward(self, obs, action, time):
        return 1.0

    def ends(self, key, obs, time):
        """Whether the episode is terminated, and whether it is truncated."""
        return time == self.length, False

    def reset_env(self, key, params):
        obs = self.observe(key, jnp.int32(0))
        return obs, State(time=jnp.int32(0), obs=obs, is_cut=jnp.array(False))

    def step_env(self, key, state, action, params):
        time = state.time + 1
        is_end, is_cut = self.ends(key, state.obs, time)
        obs, reward = (
            self.observe(jax.random.fold_in(key, 1), time),
            self.reward(state.obs, action, time),
        )
        state = State(time=time, obs=obs, is_cut=jnp.asarray(is_cut))
        return obs, state, jnp.float32(reward), jnp.asarray(is_end), {}

    def is_truncated(self, state, params):
        return state.is_cut

    def action_space(self, params=None):
        return spaces.Discrete(2)

    def observation_space(self, params):
        return spaces.Box(-1, 1, (1,), jnp.float32)


class ConstantValue(Probe):
    """Reward 1, then the end: the value is 1."""


class Discounting(Probe):
    """Reward 1 at the second step: the value is gamma, then 1."""

    length = 2

    def observe(self, key, time):
        return jnp.float32(time)[None]

    def reward(self, obs, action, time):
        return time == 2


class TruncatedEveryStep(Probe):
    """Reward 1 and a cut, again and again: the value is 1 / (1 - gamma), as if there were no
    cuts."""

    def ends(self, key, obs, time):
        return False, True


class TwoEnds(Probe):
    """Which kind of end comes can be seen: after -1 the episode is terminated, after 1 truncated
    where 1 is seen again."""

    def observe(self, key, time):
        return jnp.where(time == 0, jax.random.rademacher(key, (1,)), 1).astype(jnp.float32)

    def ends(self, key, obs, time):
        return obs[0] < 0, obs[0] > 0


class ActionMatters(Probe):
    """Action 1 pays 1, action 0 costs 1."""

    def reward(self, obs, action, time):
        return 2 * action - 1


class ActionAndObsMatter(Probe):
    """Right is action 1 where 1 is seen, and action 0 where -1 is."""

    def observe(self, key, time):
        return jax.random.rademacher(key, (1,)).astype(jnp.float32)

    def reward(self, obs, action, time):
        return obs[0] * (2 * action - 1)


class MarkedLast(Probe):
    """Three steps, which can be seen, and a reward of 1 for each."""

    length = 3

    def observe(self, key, time):
        return jnp.float32(time)[None] / 3


class RandomEnds(Probe):
    """Random observations and rewards, and ends of both kinds at random moments; rarely both at
    once."""

    def observe(self, key, time):
        return jax.random.uniform(key, (1,), minval=-1)

    def reward(self, obs, action, time):
        return obs[0] + action - 0.3

    def ends(self, key, obs, time):
        is_end, is_cut = jax.random.bernoulli(key, 0.15, (2,))
        return is_end, is_cut


@struct.dataclass
class StateWithHint(State):
    hint: jax.Array


class Recall(Probe):
    """The first observation tells which action pays at the last step; what lies between tells
    nothing."""

    length = 5

    def observe(self, hint, time):  # the hint, and whether it is time to answer
        return jnp.float32([hint * (time == 0), time == self.length - 1])

    def reset_env(self, key, params):
        hint = jax.random.rademacher(key).astype(jnp.float32)
        obs = self.observe(hint, jnp.int32(0))
        return obs, StateWithHint(time=jnp.int32(0), obs=obs, is_cut=jnp.array(False), hint=hint)

    def step_env(self, key, state, action, params):
        time = state.time + 1
        reward = state.hint * self.pay(action) * (time == self.length)
        is_end, is_cut = self.ends(key, state.obs, time)
        obs = self.observe(state.hint, time)
        state = StateWithHint(time=time, obs=obs, is_cut=jnp.asarray(is_cut), hint=state.hint)
        return obs, state, jnp.float32(reward), jnp.asarray(is_end), {}

    def pay(self, action):
        return 2 * action - 1

    def observation_space(self, params):
        return spaces.Box(-1, 1, (2,), jnp.float32)


class RecallAcrossACut(Recall):
    """The hint is the reward of the second step, before which half of the episodes are cut: they
    end with an observation whose value, hint or -hint, only one who remembers knows. The value is
    gamma times the hint at the first step, then the hint."""

    length = 2

    def pay(self, action):
        return 1

    def ends(self, key, obs, time):
        return time == self.length, (time == 1) & jax.random.bernoulli(key)


for name, probe in list(globals().items()):
    if isinstance(probe, type) and issubclass(probe, Probe) and probe is not Probe:
        gymnax.register(f"GymnaxProbe/{name}-v0", probe)
