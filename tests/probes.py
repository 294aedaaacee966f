"""Tiny environments whose values and best actions are known, so that what was learned can be
compared with the truth.

Each is registered under Probe/<class name>-v0; importing this module is enough, and so is the id
tests.probes:Probe/...-v0. Those with two actions come in two more forms: ContinuousProbe/... takes
a number, whose sign is the action, and ImageProbe/... shows its observation as Atari games do, in
stacks of images of 84 x 84, through Gymnasium's and through EnvPool's interface."""

from functools import partial
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
from gymnasium.envs.classic_control.pendulum import PendulumEnv


class Probe(gym.Env):
    """One observation, no choice, episodes of `length` steps; the subclasses change one thing
    each."""

    length = 1
    truncates = False  # how an episode ends: by termination, or by truncation
    observation_space = gym.spaces.Box(-1, 1, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, render_mode=None):
        self.render_mode = render_mode

    def observe(self):
        return np.zeros(1, np.float32)

    def reward(self, action):
        return 1.0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        self.obs = self.observe()
        return self.obs, {}

    def step(self, action):
        reward = self.reward(action)
        self.t += 1
        self.obs = self.observe()
        over = self.t == self.length
        return self.obs, reward, over and not self.truncates, over and self.truncates, {}


class ConstantValue(Probe):
    """Reward 1, then the end: the value is 1."""


class RandomReward(Probe):
    """Reward -1, 0 or 1, each with a chance of a third, then the end: the value is 0."""

    def reward(self, action):
        return float(self.np_random.integers(-1, 2))


class ValueFromObs(Probe):
    """The reward is the observation, -1 or 1, and so is its value."""

    def observe(self):
        return self.np_random.choice([-1, 1], size=1).astype(np.float32)

    def reward(self, action):
        return float(self.obs[0])


class Discounting(Probe):
    """Reward 1 at the second step only: the value is gamma at observation 0 and 1 at observation
    1."""

    length = 2

    def observe(self):
        return np.full(1, self.t % 2, np.float32)

    def reward(self, action):
        return float(self.t == 1)


class ActionMatters(Probe):
    """Action 1 pays 1, action 0 costs 1."""

    def reward(self, action):
        return 1.0 if action == 1 else -1.0


class ActionAndObsMatter(ValueFromObs):
    """The action that agrees with the observation's sign pays 1, the other costs 1."""

    def reward(self, action):
        return 1.0 if (action == 1) == (self.obs[0] > 0) else -1.0


class TruncatedEveryStep(Probe):
    """Reward 1 for ever, but cut after each step: the value is 1 / (1 - gamma), and 1 for who takes
    a cut for the end."""

    truncates = True


class TwoEnds(ValueFromObs):
    """Reward 1; at observation -1 the episode terminates (value 1), at 1 it is cut and would go on
    from where it is."""

    def step(self, action):
        before = self.obs
        return before, 1.0, bool(before[0] < 0), bool(before[0] > 0), {}


class LateEnds(ValueFromObs):
    """TwoEnds for who sees the last four observations, -0.5 or 0.5: reward 1, and only the fourth
    step ends the episode, by termination (value 1) or by a cut, at which they look as they do
    before that step and so are worth 1 / (1 - gamma)."""

    length = 4

    def observe(self):
        return super().observe() / 2 if self.t == 0 else self.obs

    def reward(self, action):
        return 1.0

    def step(self, action):
        obs, reward, over, _, _ = super().step(action)
        return obs, reward, bool(over and obs[0] < 0), bool(over and obs[0] > 0), {}


class RandomEnds(Probe):
    """Random observations and rewards, and either end at random moments: nothing to learn,
    everything to get wrong."""

    observation_space = gym.spaces.Box(-1, 1, (3,), np.float32)

    def observe(self):
        return self.np_random.uniform(-1, 1, 3).astype(np.float32)

    def step(self, action):
        reward, dice = float(self.np_random.normal()), self.np_random.random()
        return self.observe(), reward, bool(dice < 0.15), bool(dice > 0.85), {}


class MarkedLast(Probe):
    """Three steps, then the observation 1, which no step starts from: who learns from it has
    learned from a reset row."""

    length = 3

    def observe(self):
        return np.full(1, self.t / self.length, np.float32)


class LargeRewards(MarkedLast):
    """Reward 3 at each of three steps: whatever is learned from, 9 is what an episode paid."""

    def reward(self, action):
        return 3.0


class WideObs(Probe):
    """So many numbers to look at that writing a checkpoint takes a while."""

    observation_space = gym.spaces.Box(-1, 1, (40_000,), np.float32)

    def observe(self):
        return np.zeros(40_000, np.float32)


class Recall(Probe):
    """The first observation tells which action pays at the last step; what lies between tells
    nothing."""

    length = 5
    observation_space = gym.spaces.Box(
        -1, 1, (2,), np.float32
    )  # the hint, and whether it is time to answer

    def observe(self):
        if self.t == 0:
            self.hint = self.np_random.choice([-1, 1])
        return np.array([self.hint * (self.t == 0), self.t == self.length - 1], np.float32)

    def reward(self, action):
        return (1.0 if (action == 1) == (self.hint > 0) else -1.0) * (self.t == self.length - 1)


class ShortRecall(Recall):
    """Recall with one step between the hint and the answer."""

    length = 3


class ShiftedActions(ActionMatters):
    """ActionMatters with actions 3 and 4 in place of 0 and 1; anything else is an error."""

    action_space = gym.spaces.Discrete(2, start=3)

    def reward(self, action):
        assert self.action_space.contains(action), f"{action} is not an action"
        return 1.0 if action == 4 else -1.0


class ImageObs(ActionAndObsMatter):
    """ActionAndObsMatter seen as a small image of bytes: black or white."""

    observation_space = gym.spaces.Box(0, 255, (4, 3, 2), np.uint8)

    def observe(self):
        self.sign = super().observe()
        return np.full((4, 3, 2), 255 * (self.sign[0] > 0), np.uint8)

    def reward(self, action):
        return 1.0 if (action == 1) == (self.sign[0] > 0) else -1.0


class ColorPicture(RandomEnds):
    """RandomEnds seen as noise of 84 x 84 pixels in three colors."""

    observation_space = gym.spaces.Box(0, 255, (84, 84, 3), np.uint8)

    def observe(self):
        return self.np_random.integers(256, size=(84, 84, 3), dtype=np.uint8)


class ScalarObs(ActionAndObsMatter):
    """ActionAndObsMatter with a bare number for an observation, a Box of shape ()."""

    observation_space = gym.spaces.Box(-1, 1, (), np.float32)

    def observe(self):
        self.sign = super().observe()
        return self.sign[0]

    def reward(self, action):
        return 1.0 if (action == 1) == (self.sign[0] > 0) else -1.0


class ThreeLives(Probe):
    """Reward 1; every second step costs a life, and before the next one it takes a step that is no
    choice: FIRE, action 1."""

    length = 8
    lives = 3

    def observe(self):
        self.lives = 3 - (self.t + 1) // 3
        return np.full(
            1, self.t % 3 / 2, np.float32
        )  # 0 and 0.5 before the two steps of a life, 1 when it is lost

    def reward(self, action):
        assert self.obs[0] < 1 or action == 1, "FIRE starts a new life"
        return 1.0


class Corridor(Probe):
    """42 places in a row, each a stripe of its own: action 1 goes on, action 0 goes back, and only
    the last one pays. There is time for half as many steps again; who chooses at random comes to
    the end once in millions of episodes."""

    length = 63
    truncates = True
    places = 42
    observation_space = gym.spaces.Box(-1, 1, (places,), np.float32)

    def observe(self):
        self.place = 0 if self.t == 0 else self.place
        return np.where(np.arange(self.places) == self.place, 1, -1).astype(np.float32)

    def reward(self, action):
        self.place = max(0, self.place + (1 if action == 1 else -1))
        return float(self.place == self.places - 1)

    def step(self, action):
        obs, reward, _, truncated, _ = super().step(action)
        return obs, reward, reward == 1, truncated and reward == 0, {}


class ShortCorridor(Corridor):
    """Ten places, of which random play reaches the last in 3% of the episodes."""

    length = 15
    places = 10
    observation_space = gym.spaces.Box(-1, 1, (places,), np.float32)


class Outlier(Probe):
    """Nothing, and once an episode 1000."""

    length = 200

    def reward(self, action):
        return 1000.0 * (self.t == 100)


class MultiDiscreteActions(Probe):
    """Each part of the action has its own right answer, 1 and 2; every right part pays 1."""

    action_space = gym.spaces.MultiDiscrete([2, 3])

    def reward(self, action):
        return float(action[0] == 1) + float(action[1] == 2)


class ContinuousTarget(Probe):
    """The reward is minus the squared distance of each part of the action to 0.5 and -1: the best
    return is 0."""

    action_space = gym.spaces.Box(np.array([-1, -2], np.float32), np.array([1, 2], np.float32))

    def reward(self, action):
        return -float(np.sum((action - np.array([0.5, -1])) ** 2))


class ContinuousTargetFromObs(ValueFromObs):
    """The reward is minus the squared distance of the action to half the observation."""

    action_space = gym.spaces.Box(-1, 1, (1,), np.float32)

    def reward(self, action):
        return -float((action[0] - self.obs[0] / 2) ** 2)


class UnevenActions(Probe):
    """Two rows and two columns of actions, each with bounds of its own and a right place between
    them, as a share of its width: the reward is minus the squared distance to that."""

    action_space = gym.spaces.Box(
        np.float32([[0, -3], [10, -1]]), np.float32([[1, 5], [10.5, 100]])
    )

    def reward(self, action):
        assert self.action_space.contains(action), f"{action} is not an action"
        low, high = self.action_space.low, self.action_space.high
        return -float(
            np.sum(((action - low) / (high - low) - np.array([[0.2, 0.4], [0.6, 0.8]])) ** 2)
        )


class UnboundedActions(Probe):
    """Any number is an action."""

    action_space = gym.spaces.Box(-np.inf, np.inf, (1,), np.float32)


class ShiftedMultiDiscrete(Probe):
    """Two parts that count from 3 and from -1: the right answers are 4 and 1, and every right part
    pays 1."""

    action_space = gym.spaces.MultiDiscrete([2, 3], start=[3, -1])

    def reward(self, action):
        assert self.action_space.contains(action), f"{action} is not an action"
        return float(action[0] == 4) + float(action[1] == 1)


class GridOfActions(Probe):
    """The parts of the action in two rows and two columns; the right answers are all different,
    every right part pays 1."""

    action_space = gym.spaces.MultiDiscrete([[2, 3], [4, 5]])

    def reward(self, action):
        assert self.action_space.contains(action), f"{action} is not an action"
        return float(np.sum(action == [[1, 2], [3, 4]]))


class DiscreteObs(Probe):
    """Observations 5, 6 and 7 at random, to be answered with actions 0, 1 and 2: the right one pays
    1, the others cost 1."""

    observation_space = gym.spaces.Discrete(3, start=5)
    action_space = gym.spaces.Discrete(3)

    def observe(self):
        return self.np_random.integers(5, 8)

    def reward(self, action):
        return 1.0 if action == self.obs - 5 else -1.0


class MaskedActions(Probe):
    """Reward 1; an invalid action ends the game at once and costs 1. Only the mask, new at each
    step, tells which they are."""

    length = 4
    action_space = gym.spaces.MultiDiscrete([3, 2])

    def draw_mask(self, over):
        """Which values of the first part are valid, then of the second: one of each at least, and
        none when all is over."""
        self.valid = [
            self.np_random.permutation(np.arange(n) < self.np_random.integers(1, n)) & (not over)
            for n in (3, 2)
        ]
        return {"action_mask": np.concatenate(self.valid).astype(np.int8)}

    def reset(self, *, seed=None, options=None):
        obs, _ = super().reset(seed=seed)
        return obs, self.draw_mask(over=False)

    def step(self, action):
        if not all(valid[value] for valid, value in zip(self.valid, action, strict=True)):
            return self.obs, -1.0, True, False, self.draw_mask(over=True)
        obs, reward, terminated, truncated, _ = super().step(action)
        return obs, reward, terminated, truncated, self.draw_mask(over=terminated)


class MaskedActionsInParts(MaskedActions):
    """The same with a mask for each part, as Gymnasium's spaces take them."""

    def draw_mask(self, over):
        super().draw_mask(over)
        return {"action_mask": tuple(valid.astype(np.int8) for valid in self.valid)}


class FarAndWide(ContinuousTargetFromObs):
    """ContinuousTargetFromObs with observations that no network would like as they are: 900 and
    1100."""

    observation_space = gym.spaces.Box(0, 2000, (1,), np.float32)

    def observe(self):
        self.sign = super().observe()
        return 1000 + 100 * self.sign

    def reward(self, action):
        return -float((action[0] - self.sign[0] / 2) ** 2)


class DictObs(ConstantValue):
    """ConstantValue with a dictionary for an observation, which most files refuse."""

    observation_space = gym.spaces.Dict({"a": Probe.observation_space})

    def observe(self):
        return {"a": super().observe()}


class ValueFromDict(Probe):
    """The reward is the sum of what an image, a vector, a choice and a text say, each by a sign: 1,
    0.5, 0.25 and 0.125, or minus that."""

    observation_space = gym.spaces.Dict(
        {
            "choice": gym.spaces.Discrete(2, start=3),
            "image": gym.spaces.Box(0, 255, (4, 3, 2), np.uint8),
            "text": gym.spaces.Text(10, charset="abcdefghijklmnopqrstuvwxyz "),
            "vector": gym.spaces.Box(-1, 1, (2,), np.float32),
        }
    )

    def observe(self):
        self.signs = self.np_random.choice([-1, 1], size=4)
        return self.show(*self.signs)

    @staticmethod
    def show(image, vector, choice, text):
        return {
            "choice": np.int64(4 if choice > 0 else 3),
            "image": np.full((4, 3, 2), 255 * (image > 0), np.uint8),
            "text": "go right" if text > 0 else "go left",
            "vector": np.float32([0, vector]),
        }

    def reward(self, action):
        return float(np.sum(self.signs * [1, 0.5, 0.25, 0.125]))


class ActionAndDictMatter(ValueFromDict):
    """Action 1 is right if the image is white and the text says right, or neither: the right one
    pays 1, the other costs 1."""

    def reward(self, action):
        return 1.0 if (action == 1) == (self.signs[0] == self.signs[3]) else -1.0


class ShiftedDictActions(ValueFromDict):
    """Action 4 is right, action 3 is wrong, whatever the dictionary says."""

    action_space = gym.spaces.Discrete(2, start=3)

    def reward(self, action):
        assert self.action_space.contains(action), f"{action} is not an action"
        return 1.0 if action == 4 else -1.0


class DoorOfAColor(Probe):
    """Four doors of different colors among the tiles ahead, coded as MiniGrid's, and a mission that
    names one of them. Action 1 pays 1 if that is the door in front, one time in four; action 0 pays
    0.22. Who does not read the mission gets 0.25, who does 0.415."""

    colors = ("red", "green", "blue", "purple", "yellow", "grey")
    observation_space = gym.spaces.Dict(
        {
            "image": gym.spaces.Box(0, 1, (7, 7, 20), np.float32),
            "mission": gym.spaces.Text(30, charset="abcdefghijklmnopqrstuvwxyz "),
        }
    )

    def observe(self):
        image = np.zeros((7, 7, 20), np.float32)
        image[..., [1, 11, 17]] = 1
        doors = self.np_random.permutation(6)[:4]
        places = [(3, 5), *map(tuple, self.np_random.integers(7, size=(3, 2)))]
        for color, place in reversed(list(zip(doors, places, strict=True))):
            image[place] = 0
            image[place][[4, 11 + color, 18]] = 1
        goal = self.np_random.choice(doors)
        self.is_in_front = goal == doors[0]
        return {"image": image, "mission": f"go to the {self.colors[goal]} door"}

    def reward(self, action):
        return float(self.is_in_front) if action == 1 else 0.22


class UnknownWord(ValueFromDict):
    """A text with a word that is in no vocabulary."""

    def observe(self):
        return super().observe() | {"text": "go xyzzy"}


class NestedDict(Probe):
    """A dictionary in a dictionary."""

    inner = gym.spaces.Dict({"a": Probe.observation_space})
    observation_space = gym.spaces.Dict({"inner": inner})

    def observe(self):
        return {"inner": {"a": super().observe()}}


class LongRecall(Recall):
    """Recall with 38 steps between the hint and the answer."""

    length = 40


class MyBox(gym.spaces.Box):
    """A Box, as far as anyone is concerned."""


class SubclassedBox(ConstantValue):
    """ConstantValue with a kind of Box for its observations."""

    observation_space = MyBox(-1, 1, (1,), np.float32)


def make_same_step(num_envs, render_mode=None):
    same_step = gym.vector.AutoresetMode.SAME_STEP
    return gym.vector.SyncVectorEnv([ConstantValue] * num_envs, autoreset_mode=same_step)


class Continuous(gym.Wrapper):
    """A probe that takes one number for an action: above 0 stands for action 1, all others for
    action 0."""

    action_space = gym.spaces.Box(-1, 1, (1,), np.float32)

    def step(self, action):
        assert np.all(np.abs(action) <= 1), f"{action} is out of bounds"
        return self.env.step(int(action[0] > 0))


class InDict(gym.ObservationWrapper):
    """A probe whose observation is an entry of a dictionary, beside one that never changes."""

    def __init__(self, env):
        super().__init__(env)
        same = gym.spaces.Discrete(3)
        self.observation_space = gym.spaces.Dict({"obs": env.observation_space, "same": same})

    def observation(self, obs):
        return {"obs": obs, "same": np.int64(1)}


class Image(gym.Wrapper):
    """A probe whose numbers, between -1 and 1, are the brightness of stripes in the newest of
    several images, and which counts lives. The older images are those of the steps before; before a
    game's first they are black, or that one again."""

    size, colors = 84, 1

    def __init__(self, env, stack_num, repeat_first):
        super().__init__(env)
        self.observation_space = gym.spaces.Box(
            0, 255, (stack_num * self.colors, self.size, self.size), np.uint8
        )
        self.stack_num, self.repeat_first = stack_num, repeat_first

    def draw(self, obs):
        stripes = 127.5 * (1 + np.atleast_1d(obs))[np.arange(self.size) * np.size(obs) // self.size]
        return np.broadcast_to(
            stripes.astype(np.uint8)[:, None], (self.colors, self.size, self.size)
        )

    def reset(self, **kwargs):
        obs, _ = self.env.reset(**kwargs)
        first = self.draw(obs)
        older = first if self.repeat_first else np.zeros_like(first)
        self.images = np.concatenate([older] * (self.stack_num - 1) + [first])
        return self.images, {"lives": getattr(self.env, "lives", 0)}

    def step(self, action):
        obs, reward, terminated, truncated, _ = self.env.step(action)
        self.images = np.concatenate([self.images[self.colors :], self.draw(obs)])
        return self.images, reward, terminated, truncated, {"lives": getattr(self.env, "lives", 0)}


class Picture(Image):
    """The same as Procgen shows its games: one picture in three colors, all of them alike here."""

    size, colors = 64, 3


class ImageProbes(gym.vector.SyncVectorEnv):
    """Several of them as ale_py's vector environment makes them, whose flags they take and
    ignore."""

    def __init__(self, probe, num_envs, stack_num=4, repeat_first=False, view=Image, **protocol):
        from ale_py import Action

        super().__init__([lambda: view(probe(), stack_num, repeat_first)] * num_envs)
        self.ale = SimpleNamespace(get_action_set=lambda: [Action.NOOP, Action.FIRE])


class PoolOfProbes(ImageProbes):
    """Several of them as EnvPool makes them: tests.harness has EnvPool make these where an id
    begins with ImageProbe/."""

    def __init__(self, probe, num_envs, seed, like_procgen=False, **settings):
        super().__init__(
            probe,
            num_envs,
            **(dict(stack_num=1, view=Picture) if like_procgen else {}),
            repeat_first=True,
        )
        self.pool_seed, self.elapsed_step, self.is_over = (
            seed,
            np.zeros(num_envs, np.int32),
            np.zeros(num_envs, bool),
        )

    def reset(self, *, seed=None, options=None):
        assert seed is None, "EnvPool takes its seed when a pool is made"
        return super().reset(seed=self.pool_seed)

    def send(self, actions):
        self.sent = actions

    def recv(self):
        obs, rewards, terminated, truncated, infos = self.step(self.sent)
        self.elapsed_step = np.where(self.is_over, 0, self.elapsed_step + 1)
        self.is_over = terminated | truncated
        infos |= {"terminated": terminated.astype(np.int32), "elapsed_step": self.elapsed_step}
        return obs, rewards, terminated, truncated, infos

    def xla(self):
        """EnvPool's functions for compiled programs, by calls back to Python. The handle counts
        steps, and those that come out of order are seen in self.handles; self.answers are what the
        environments said, and to which actions."""
        import jax

        self.handles, self.answers = [], []

        def call(handle, actions):
            self.handles.append(int(handle[0]))
            self.send(np.asarray(actions))
            obs, rewards, terminated, truncated, infos = self.recv()
            infos = {name: infos[name].astype(np.int32) for name in ("terminated", "elapsed_step")}
            self.answers.append(
                (
                    obs.copy(),
                    rewards.astype(np.float32),
                    terminated,
                    truncated,
                    infos | {"actions": self.sent},
                )
            )
            return handle + np.uint8(1), (*self.answers[-1][:4], infos)

        def step(handle, actions):
            number, yes = (
                jax.ShapeDtypeStruct((self.num_envs,), dtype) for dtype in (np.float32, bool)
            )
            whole = jax.ShapeDtypeStruct((self.num_envs,), np.int32)
            obs = jax.ShapeDtypeStruct(
                (self.num_envs, *self.single_observation_space.shape), np.uint8
            )
            answer = obs, number, yes, yes, {"terminated": whole, "elapsed_step": whole}
            shapes = jax.ShapeDtypeStruct(handle.shape, handle.dtype), answer
            return jax.experimental.io_callback(call, shapes, handle, actions)

        return np.zeros(1, np.uint8), None, None, step


class PendulumWithoutVelocity(PendulumEnv):
    """The pendulum to swing up, seen in single pictures: how fast it moves has to be remembered
    from where it was."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)

    def _get_obs(self):
        return super()._get_obs()[:2]


gym.register(
    "Probe/PendulumWithoutVelocity-v0", entry_point=PendulumWithoutVelocity, max_episode_steps=200
)
gym.register("Probe/SameStep-v0", vector_entry_point=make_same_step)
for probe in [
    v
    for v in list(globals().values())
    if isinstance(v, type) and issubclass(v, Probe) and v is not Probe
]:
    gym.register(f"Probe/{probe.__name__}-v0", entry_point=probe)
    if probe.action_space == Probe.action_space and isinstance(
        probe.observation_space, gym.spaces.Box
    ):
        gym.register(
            f"ContinuousProbe/{probe.__name__}-v0",
            entry_point=lambda probe=probe, **kwargs: Continuous(probe(**kwargs)),
        )
        gym.register(
            f"ImageProbe/{probe.__name__}-v0", vector_entry_point=partial(ImageProbes, probe)
        )
        gym.register(
            f"DictProbe/{probe.__name__}-v0",
            entry_point=lambda probe=probe, **kwargs: InDict(probe(**kwargs)),
        )
gym.register(
    "DictProbe/CartPole-v0",
    entry_point=lambda **kwargs: InDict(gym.make("CartPole-v1", **kwargs).unwrapped),
    max_episode_steps=500,
)
