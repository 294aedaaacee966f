"""The probes of tests/probes.py in the form of Isaac Lab: many in one, and tensors in dictionaries.

A step that ends an episode begins the next one. Each probe is registered as Isaac Lab registers its
own: as IsaacProbe/<name>-v0, which never tells the last observation of an episode, like its older
versions, and as TellingProbe/<name>-v0, which tells it if it is asked to, like the newer ones.
"""

from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import torch

from tests import probes


class Cfg:
    """What is asked for, with the names of Isaac Lab's configurations."""

    is_finite_horizon = False

    def __init__(self):
        self.scene, self.sim, self.seed = (
            SimpleNamespace(num_envs=1),
            SimpleNamespace(device="cuda:0"),
            None,
        )


class FiniteCfg(Cfg):
    is_finite_horizon = True


class IsaacProbe(gym.Env):
    """Copies of a Gymnasium environment. Its tensors are its own, and change at the next step."""

    metadata = {"render_modes": [None, "rgb_array"], "render_fps": 25.0}  # noqa: RUF012

    def __init__(self, cfg, probe, group="policy", tells=False, render_mode=None, **kwargs):
        self.cfg, self.num_envs, self.device, self.render_mode = (
            cfg,
            cfg.scene.num_envs,
            cfg.sim.device,
            render_mode,
        )
        self.envs, self.group = [gym.make(probe) for _ in range(self.num_envs)], group
        self.tells = tells and getattr(cfg, "compute_final_obs", False)
        space, self.single_action_space = self.envs[0].observation_space, self.envs[0].action_space
        self.single_observation_space = gym.spaces.Dict(
            {"critic": gym.spaces.Box(-1, 1, (99,)), group: space}
        )
        self.obs_buf = torch.zeros((self.num_envs, *space.shape), device=self.device)
        self.reward_buf = torch.zeros(self.num_envs, device=self.device)
        self.terminated, self.truncated = torch.zeros(
            (2, self.num_envs), dtype=torch.bool, device=self.device
        )
        self.extras = {"log": {}}

    def observe(self, obs):
        self.obs_buf[:] = torch.from_numpy(np.stack(obs).astype(np.float32))
        return {"critic": torch.full((self.num_envs, 99), torch.nan), self.group: self.obs_buf}

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            torch.manual_seed(seed)  # as simulators do
        seeds = [None if seed is None else seed + i for i in range(self.num_envs)]
        obs = [env.reset(seed=s)[0] for env, s in zip(self.envs, seeds, strict=True)]
        return self.observe(obs), self.extras

    def step(self, actions):
        assert isinstance(actions, torch.Tensor) and str(actions.device) == self.device
        obs, final_obs = [], []
        for i, (env, action) in enumerate(zip(self.envs, actions.numpy(), strict=True)):
            last, reward, terminated, truncated, _ = env.step(action)
            self.reward_buf[i], self.terminated[i], self.truncated[i] = (
                float(reward),
                terminated,
                truncated,
            )
            final_obs.append(last)
            obs.append(env.reset()[0] if terminated or truncated else last)
        if self.tells and (self.terminated | self.truncated).any():
            self.extras["final_obs"] = {
                self.group: torch.from_numpy(np.stack(final_obs).astype(np.float32))
            }
        self.extras["log"] = {"consecutive_successes": self.reward_buf.mean()}
        return self.observe(obs), self.reward_buf, self.terminated, self.truncated, self.extras

    def render(self):
        return np.full((64, 64, 3), 200, dtype=np.uint8)


class PointMass(gym.Env):
    """Carts without friction on a line, all in one tensor, to be pushed to 0 and held there.

    The reward is 0.1 less the distance. An episode ends at 2, and is cut after 100 steps.
    """

    metadata = {"render_modes": []}  # noqa: RUF012

    def __init__(self, cfg, render_mode=None, **kwargs):
        self.cfg, self.num_envs, self.device = cfg, cfg.scene.num_envs, cfg.sim.device
        self.single_observation_space = gym.spaces.Dict(
            policy=gym.spaces.Box(-np.inf, np.inf, (2,))
        )
        self.single_action_space = gym.spaces.Box(-np.inf, np.inf, (1,))

    def draw(self):
        return torch.rand((self.num_envs, 2), generator=self.generator) * 2 - 1

    def reset(self, *, seed=None, options=None):
        self.generator = torch.Generator().manual_seed(seed)
        self.state, self.time = self.draw(), torch.zeros(self.num_envs)
        return {"policy": self.state}, {}

    def step(self, actions):
        speed = self.state[:, 1] + 0.1 * actions[:, 0].clamp(-3, 3)
        place, self.time = self.state[:, 0] + 0.1 * speed, self.time + 1
        terminated, truncated = place.abs() > 2, self.time == 100
        is_over = terminated | truncated
        self.state = torch.where(is_over[:, None], self.draw(), torch.stack([place, speed], 1))
        self.time = self.time * ~is_over
        return {"policy": self.state}, 0.1 - 0.1 * place.abs(), terminated, truncated, {}


class LastIsKnown(probes.ValueFromObs):
    """Reward 1; at 1 the episode terminates, at -1 it is cut, with 1 as its last observation.

    The value of 1 is 1. That of -1 is 1 + gamma with the last observation, and 1 / (1 - gamma) if
    the one before stands in for it.
    """

    def step(self, action):
        before = self.obs[0]
        return np.ones(1, np.float32), 1.0, bool(before > 0), bool(before < 0), {}


gym.register(
    "ContinuousProbe/LastIsKnown-v0",
    entry_point=lambda **kwargs: probes.Continuous(LastIsKnown(**kwargs)),
)


def register(env_id, probe, cfg="tests.isaac_probes:Cfg", **kwargs):
    kwargs = {"env_cfg_entry_point": cfg, "probe": probe, **kwargs}
    gym.register(
        env_id, entry_point="tests.isaac_probes:IsaacProbe", disable_env_checker=True, kwargs=kwargs
    )


for probe in [env_id for env_id in gym.registry if env_id.startswith("ContinuousProbe/")]:
    name = probe.removeprefix("ContinuousProbe/")
    register(f"IsaacProbe/{name}", probe)
    register(f"TellingProbe/{name}", probe, tells=True)
register("IsaacProbe/Pendulum-v0", "Pendulum-v1")
register("IsaacProbe/FarAndWide-v0", "Probe/FarAndWide-v0", group="actor")
register("IsaacProbe/FiniteHorizon-v0", "ContinuousProbe/RandomEnds-v0", cfg=FiniteCfg)
register("IsaacProbe/OtherGroups-v0", "ContinuousProbe/ConstantValue-v0", group="images")
register("IsaacProbe/Pictures-v0", "Probe/ImageObs-v0")
register("IsaacProbe/Choices-v0", "CartPole-v1")
point_mass = dict(
    entry_point=PointMass, disable_env_checker=True, kwargs={"env_cfg_entry_point": Cfg}
)
gym.register("IsaacProbe/PointMass-v0", **point_mass)
