"""The probes of tests/probes.py that cleanrl/ppo_jaxtari_jax.py needs, as games with JAXtari's
interface, which are compiled with the algorithm: --env-id tests.jaxtari_probes:ConstantValue.

A game begins when FIRE, action 1, is pressed, as Breakout does; then each turn takes four frames,
and all that happens does so in the first of them. What is seen is how bright the screen is: -1 is
black, from which nothing is learned but biases, 1 white."""

import jax
import jax.numpy as jnp
from flax import struct
from jaxtari import spaces
from jaxtari.environment import JaxEnvironment, JaxtariAction


@struct.dataclass
class State:
    frame: jax.Array  # since the game began
    has_begun: jax.Array
    obs: jax.Array
    lives: jax.Array
    key: jax.Array


class Probe(JaxEnvironment):
    """One observation, no choice, one life, which ends after `length` turns; the subclasses change
    one thing each."""

    ACTION_SET = jnp.array([JaxtariAction.NOOP, JaxtariAction.FIRE])
    length = 1
    lives = 1

    def observe(self, key, turn):
        return 0.0

    def reward(self, obs, action, turn):
        return 1.0

    def is_lost(self, key, obs, turn):
        """Whether the turn costs a life."""
        return turn % self.length == 0

    def happens(self, frame):
        return frame % 4 == 0

    def reset(self, key=None):
        key, obs_key = jax.random.split(key)
        obs = jnp.float32(self.observe(obs_key, jnp.int32(0)))
        state = State(
            frame=jnp.int32(0),
            has_begun=jnp.array(False),
            obs=obs,
            lives=jnp.int32(self.lives),
            key=key,
        )
        return obs, state

    def step(self, state, action):
        key, obs_key, end_key = jax.random.split(state.key, 3)
        happens, turn = state.has_begun & self.happens(state.frame), state.frame // 4 + 1
        lives = state.lives - (happens & self.is_lost(end_key, state.obs, turn))
        reward = jnp.where(happens, self.reward(state.obs, action, turn), 0.0)
        obs = jnp.where(happens, jnp.float32(self.observe(obs_key, turn)), state.obs)
        frame, has_begun = state.frame + state.has_begun, state.has_begun | (action == 1)
        return obs, State(frame, has_begun, obs, lives, key), reward, lives <= 0, {}

    def render(self, state):
        return jnp.full((6, 5, 3), 127.5 * (state.obs + 1)).astype(jnp.uint8)

    def action_space(self):
        return spaces.Discrete(2)

    def observation_space(self):
        return spaces.Box(-1, 1, (), jnp.float32)

    def image_space(self):
        return spaces.Box(0, 255, (6, 5, 3), jnp.uint8)


class ConstantValue(Probe):
    """Reward 1, then the end: the value is 1; if it is cut before that, 1 / (1 - gamma)."""


class Discounting(Probe):
    """Reward 1 at the second turn: the value is gamma, then 1."""

    length = 2

    def observe(self, key, turn):
        return turn / 1.0

    def reward(self, obs, action, turn):
        return turn == 2


class ActionMatters(Probe):
    """Action 1 pays 1, action 0 costs 1."""

    def reward(self, obs, action, turn):
        return 2 * action - 1


class ActionAndObsMatter(Probe):
    """Right is action 1 where it is bright, and action 0 where it is dark."""

    def observe(self, key, turn):
        return 0.5 * jax.random.rademacher(key)

    def reward(self, obs, action, turn):
        return 2 * obs * (2 * action - 1)


class MarkedLast(Probe):
    """Three turns, which can be seen, and a reward of 1 for each."""

    length = 3

    def observe(self, key, turn):
        return turn / 3


class EndsInTheMiddle(Probe):
    """Each frame pays 1 and is brighter than the one before; the third is the last, but frames
    would go on."""

    def happens(self, frame):
        return True

    def is_lost(self, key, obs, turn):
        return obs > 0.5

    def step(self, state, action):
        _, new, reward, is_end, infos = super().step(state, action)
        new = new.replace(obs=state.obs + 0.3 * state.has_begun)
        return new.obs, new, reward, is_end, infos


class RandomEnds(Probe):
    """Random observations and rewards, and three lives that are lost at random moments."""

    lives = 3

    def observe(self, key, turn):
        return jax.random.uniform(key, minval=-1)

    def reward(self, obs, action, turn):
        return 2 * obs + action - 0.3

    def is_lost(self, key, obs, turn):
        return jax.random.bernoulli(key, 0.3)
