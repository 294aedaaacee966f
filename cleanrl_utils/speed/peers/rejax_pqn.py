"""Run by cleanrl_utils.speed: rejax's PQN with settings given as JSON; prints steps over time."""

import json
import sys
import time
from importlib.metadata import distributions

import flax.linen as nn
import jax
from rejax import PQN
from rejax.networks import DiscreteQNetwork, EpsilonGreedyPolicy

settings = json.loads(sys.argv[1])
num_steps = settings["total_timesteps"]


def activation(x):
    return nn.relu(nn.LayerNorm()(x))


# rejax neither anneals the learning rate nor bootstraps truncated episodes, clips gradients element
# by element, and has Adam where the paper has RAdam. It evaluates and logs nothing here
agent = PQN.create(
    env=settings["env_id"],
    total_timesteps=num_steps,
    eval_freq=num_steps,
    num_envs=settings["num_envs"],
    num_steps=settings["num_steps"],
    num_epochs=settings["update_epochs"],
    num_minibatches=settings["num_minibatches"],
    learning_rate=settings["learning_rate"],
    gamma=settings["gamma"],
    td_lambda=settings["q_lambda"],
    eps_start=settings["start_e"],
    eps_end=settings["end_e"],
    exploration_fraction=settings["exploration_fraction"],
    max_grad_norm=settings["max_grad_norm"],
)
num_actions = agent.env.action_space(agent.env_params).n
network = EpsilonGreedyPolicy(DiscreteQNetwork)(  # 64 and 64 units, if not replaced
    hidden_layer_sizes=(120, 84), action_dim=num_actions, activation=activation
)
agent = agent.replace(agent=network, eval_callback=lambda *_: ())
train, marks = jax.jit(agent.train), []
for run in range(2):  # each is one call: the first one compiles, and is the warm-up of the second
    done = jax.block_until_ready(train(jax.random.PRNGKey(settings["seed"] + run)))
    marks.append(((run + 1) * int(done[0].global_step), time.time()))
print(json.dumps({"marks": marks, "versions": {d.name: d.version for d in distributions()}}))
