"""Run by cleanrl_utils.speed: rejax's PPO with settings given as JSON; prints steps over time."""

import json
import sys
import time
from importlib.metadata import distributions

import jax
from rejax import PPO

settings = json.loads(sys.argv[1])
num_steps = settings["total_timesteps"]

# rejax neither anneals the learning rate nor bootstraps truncated episodes, and it clips gradients
# element by element. It evaluates and logs nothing here
agent = PPO.create(
    env=settings["env_id"],
    agent_kwargs=dict(activation="tanh", hidden_layer_sizes=(64, 64)),
    total_timesteps=num_steps,
    eval_freq=num_steps,
    num_envs=settings["num_envs"],
    num_steps=settings["num_steps"],
    num_epochs=settings["update_epochs"],
    num_minibatches=settings["num_minibatches"],
    learning_rate=settings["learning_rate"],
    gamma=settings["gamma"],
    gae_lambda=settings["gae_lambda"],
    clip_eps=settings["clip_coef"],
    ent_coef=settings["ent_coef"],
    vf_coef=settings["vf_coef"],
    max_grad_norm=settings["max_grad_norm"],
).replace(eval_callback=lambda *_: ())
train, marks = jax.jit(agent.train), []
for run in range(2):  # each is one call: the first one compiles, and is the warm-up of the second
    done = jax.block_until_ready(train(jax.random.PRNGKey(settings["seed"] + run)))
    marks.append(((run + 1) * int(done[0].global_step), time.time()))
print(json.dumps({"marks": marks, "versions": {d.name: d.version for d in distributions()}}))
