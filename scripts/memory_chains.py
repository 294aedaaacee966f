"""bsuite's memory chains in lengths that gymnax does not register.

    PYTHONPATH=scripts python cleanrl/ppo_rnn_jax.py --env-id memory_chains:MemoryChain-30

The agent must reproduce the bit of the first observation after that many steps: the reward is 1 if
it does, -1 if it does not.
"""

import gymnax
from gymnax.environments.bsuite.memory_chain import EnvParams, MemoryChain


class MemoryChainOf(MemoryChain):
    def __init__(self, memory_length):
        super().__init__()
        self.memory_length = memory_length

    @property
    def default_params(self):
        return EnvParams(memory_length=self.memory_length)


for memory_length in (15, 30, 60, 100):
    gymnax.register(
        f"MemoryChain-{memory_length}",
        lambda memory_length=memory_length: MemoryChainOf(memory_length),
    )
