"""The probes of tests/probes.py that cleanrl/ippo_jax.py and mappo_rnn_jax.py need, as games of two
agents with JaxMARL's interface, which are compiled with the algorithm.

Their ids are tests.jaxmarl_probes:ConstantValue and so on."""

import jax
import jax.numpy as jnp
from flax import struct
from jaxmarl.environments.multi_agent_env import MultiAgentEnv, State
from jaxmarl.environments.spaces import Box, Discrete


@struct.dataclass
class ProbeState(State):
    obs: jax.Array
    is_end: jax.Array
    is_dead: jax.Array


@struct.dataclass
class StateWithHint(ProbeState):
    hint: jax.Array


class Probe(MultiAgentEnv):
    """One observation for both, no choice, episodes of `length` steps that terminate, a reward of 1
    for each. The subclasses change one thing each."""

    length = 1

    def __init__(self):
        super().__init__(num_agents=2)
        self.observation_spaces = {agent: Box(-1, 1, (1,)) for agent in self.agents}
        self.action_spaces = {agent: Discrete(2) for agent in self.agents}

    def observe(self, key, time):
        """Of both agents."""
        return jnp.zeros(2)

    def reward(self, obs, actions, time):
        return jnp.ones(2)

    def ends(self, key, obs, time):
        """Whether the episode is terminated, and whether it is truncated."""
        return time == self.length, False

    def find_dead(self, key, is_dead, time):
        return is_dead

    def shape(self, actions):
        """What Overcooked calls shaped rewards."""
        return jnp.zeros(2)

    def name_agents(self, values):
        return dict(zip(self.agents, values, strict=True))

    def get_obs(self, state):
        return self.name_agents(state.obs[:, None])

    def reset(self, key):
        dead = jnp.zeros(2, dtype=bool)
        time, over = jnp.int32(0), jnp.array(False)
        obs = jnp.float32(self.observe(key, time))
        state = ProbeState(done=over, step=time, obs=obs, is_end=over, is_dead=dead)
        return self.get_obs(state), state

    def step_env(self, key, state, actions):
        obs_key, end_key, death_key = jax.random.split(key, 3)
        time = state.step + 1
        actions = jnp.stack([actions[agent] for agent in self.agents])
        rewards = jnp.float32(self.reward(state.obs, actions, time))
        is_end, is_cut = map(jnp.asarray, self.ends(end_key, state.obs[0], time))
        is_dead = self.find_dead(death_key, state.is_dead, time)
        obs = jnp.float32(self.observe(obs_key, time)) * ~is_dead
        done = is_end | is_cut
        state = ProbeState(done=done, step=time, obs=obs, is_end=is_end, is_dead=is_dead)
        dones = self.name_agents(is_dead | done) | {"__all__": done}
        shaped = {"shaped_reward": self.name_agents(self.shape(actions))}
        return self.get_obs(state), state, self.name_agents(rewards), dones, shaped

    def is_terminal(self, state):
        """As in SMAX and Overcooked, it is told of the time limit as well."""
        return state.is_end | state.done | (state.step >= 1000)


class ConstantValue(Probe):
    """Reward 1, then the end: the value is 1."""


class Discounting(Probe):
    """Reward 1 at the second step: the value is gamma, then 1."""

    length = 2

    def observe(self, key, time):
        return jnp.full(2, time)

    def reward(self, obs, actions, time):
        return jnp.full(2, time == 2)


class TruncatedEveryStep(Probe):
    """Reward 1 and a cut, again and again: the value is 1 / (1 - gamma)."""

    def ends(self, key, obs, time):
        return False, True


class RandomCuts(Probe):
    """Reward 1, and cuts at random moments: the value is 1 / (1 - gamma), with memory, too."""

    def ends(self, key, obs, time):
        return False, jax.random.bernoulli(key)


class TwoEnds(Probe):
    """After -1 the episode is terminated, after 1 truncated where 1 is seen again."""

    def observe(self, key, time):
        return jnp.full(2, jnp.where(time == 0, jax.random.rademacher(key), 1))

    def ends(self, key, obs, time):
        return obs < 0, obs > 0


class EachItsOwn(Probe):
    """The first agent sees -1 and gets 1, the second sees 1 and gets 3."""

    def observe(self, key, time):
        return jnp.array([-1, 1])

    def reward(self, obs, actions, time):
        return obs + 2


class Sacrifice(Probe):
    """The second agent, which sees -1, dies at the first of two steps; each pays 1 to both."""

    length = 2

    def observe(self, key, time):
        return jnp.where(time == 0, jnp.array([0.5, -1]), jnp.array([1, 0]))

    def find_dead(self, key, is_dead, time):
        return is_dead | jnp.array([False, True])


class ActionMatters(Probe):
    """Action 1 pays 1, action 0 costs 1."""

    def reward(self, obs, actions, time):
        return 2 * actions - 1


class ActionAndObsMatter(Probe):
    """Right is action 1 for who sees 1, and action 0 for who sees -1."""

    def observe(self, key, time):
        return jax.random.rademacher(key, (2,))

    def reward(self, obs, actions, time):
        return obs * (2 * actions - 1)


class Masked(Probe):
    """Action 1 pays 1, but who sees -1 cannot take it; who does loses 100."""

    def observe(self, key, time):
        return jax.random.rademacher(key, (2,))

    def reward(self, obs, actions, time):
        return jnp.where((obs < 0) & (actions == 1), -100, actions)

    def get_avail_actions(self, state):
        return self.name_agents(jnp.uint8([[1, 0], [1, 1]])[(state.obs > 0).astype(jnp.int32)])


class RecallTogether(Probe):
    """What each sees at the first of three steps tells which action pays it 1 at the last one."""

    length = 3

    def observe(self, key, time):
        return jnp.where(time == 0, jax.random.rademacher(key, (2,)), 0)

    def reset(self, key):
        obs, state = super().reset(key)
        return obs, StateWithHint(**vars(state), hint=state.obs)

    def step_env(self, key, state, actions):
        obs, after, _, dones, infos = super().step_env(key, state, actions)
        choices = jnp.stack([actions[agent] for agent in self.agents])
        rewards = jnp.where(after.step == 3, state.hint * (2 * choices - 1), 0)
        after = StateWithHint(**vars(after), hint=state.hint)
        return obs, after, self.name_agents(rewards), dones, infos


class Shaped(Probe):
    """No reward, and a shaped one of 1 for each."""

    def reward(self, obs, actions, time):
        return jnp.zeros(2)

    def shape(self, actions):
        return jnp.ones(2)


class MarkedLast(Probe):
    """Three steps, which can be seen, and a reward of 1 for the first agent, 2 for the second."""

    length = 3

    def observe(self, key, time):
        return jnp.full(2, time / 3)

    def reward(self, obs, actions, time):
        return jnp.array([1, 2])


class RandomEnds(Masked):
    """Random observations, rewards and shaped rewards, masks, deaths and ends of both kinds, all of
    them often."""

    def observe(self, key, time):
        return jax.random.uniform(key, (2,), minval=-1)

    def reward(self, obs, actions, time):
        return obs + actions - 0.3

    def ends(self, key, obs, time):
        is_end, is_cut = jax.random.bernoulli(key, 0.12, (2,))
        return is_end, is_cut

    def find_dead(self, key, is_dead, time):
        return is_dead | jax.random.bernoulli(key, 0.15, (2,))

    def shape(self, actions):
        return 0.5 * actions
