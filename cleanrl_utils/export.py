"""Export a trained policy, to run it without this repository.

    python -m cleanrl_utils.export runs/<run> policy.onnx         # for ONNX Runtime
    python -m cleanrl_utils.export runs/<run> policy.safetensors  # the weights by name
    python -m cleanrl_utils.export runs/<run> policy.json         # the layers of an MLP

The ONNX graph maps a batch of observations to the greedy action and to what it is chosen from: the
parameters of the action distribution, or the Q-values. Observation normalization, action masks and
action bounds are inside; a recurrent policy takes its state as inputs and returns the next one.
Before anything is written, the export is compared with the file's load_policy. JAX files are not
supported.
"""

import copy
import importlib
import inspect
import json
import logging
import os
import sys
import types
import warnings
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import tyro
from torch.overrides import TorchFunctionMode

from cleanrl_utils import enjoy
from cleanrl_utils.errors import explain

NETWORKS = ("agent", "actor", "q_network")  # what load_policy calls the network that acts
FORMATS = {  # and the modules that they need
    ".onnx": ("onnx", "onnxruntime", "onnxscript"),
    ".safetensors": ("safetensors",),
    ".json": (),
}
STEPS = 1000  # of the environment, on which an export is compared with load_policy
TOLERANCE = 1e-4  # absolute and relative
NEXT_STATE = ("next_hidden", "next_cell")
NOT_IN_AN_MLP = ("conv2d", "lstm", "layer_norm", "where", "cat")
ACTIVATIONS = {"tanh": np.tanh, "relu": lambda x: np.maximum(x, 0)}


@dataclass
class Args:
    run: tyro.conf.Positional[str]  # its folder, a checkpoint in it, or hf://entity/repository
    output: tyro.conf.Positional[Path]  # file to write: .onnx, .safetensors or .json
    file: Path | None = None  # algorithm file of the policy; by default, the run's in cleanrl/
    env_id: str | None = None  # environment, if it is not the run's or needs an import (module:id)


class Policy(nn.Module):
    """The function that load_policy returns, on tensors and with the greedy action."""

    def __init__(self, name, network, envs):
        super().__init__()
        self.name = name
        self.network = network
        self.space = envs.single_action_space
        if isinstance(self.space, gym.spaces.Box):
            self.register_buffer("low", torch.from_numpy(self.space.low.copy()))
            self.register_buffer("high", torch.from_numpy(self.space.high.copy()))
        else:
            self.register_buffer("start", torch.as_tensor(self.space.start).flatten())

    def forward(self, obs, hidden=None, cell=None):
        """All outputs by name; the first is the distribution or the Q-values, if there are any."""
        obs = self.normalize(obs)
        if hidden is None:
            return self.act(self.evaluate(obs))
        output, hidden, cell = self.evaluate_recurrent(obs, hidden, cell)
        return self.act(output) | dict(zip(NEXT_STATE, (hidden, cell), strict=True))

    def normalize(self, obs):
        if obs.dtype == torch.uint8:  # the network divides images by 255
            return obs
        if not hasattr(self.network, "obs_moments"):
            return obs.float()
        moments = self.network.obs_moments
        normalized = (obs.double() - moments.mean) / (moments.var + 1e-8).sqrt()
        return normalized.clamp(-10, 10).float()

    def evaluate(self, obs):
        if hasattr(self.network, "policy"):
            return self.network.policy(obs)
        if hasattr(self.network, "atoms") or hasattr(self.network, "taus"):
            return self.network.q_values(obs)
        output = self.network(obs)
        return output[0] if self.name == "agent" else output  # without the values

    def evaluate_recurrent(self, obs, hidden, cell):
        images = obs.dtype == torch.uint8
        features = self.network.network(obs / 255 if images else obs)
        outputs, (hidden, cell) = self.network.lstm(features[None], (hidden, cell))
        head = self.network.q_values if self.name == "q_network" else self.network.actor
        return head(outputs[0]), hidden, cell

    def act(self, output):
        if self.name == "q_network":
            return {"q_values": output, "action": output.argmax(-1) + self.start}
        if isinstance(self.space, gym.spaces.Discrete):
            log_probs = output.log_softmax(-1)
            return {"log_probs": log_probs, "action": log_probs.argmax(-1) + self.start}
        if isinstance(self.space, gym.spaces.MultiDiscrete):
            parts = torch.stack([log_probs.argmax(-1) for log_probs in output], -1)
            return {"log_probs": torch.cat(output, -1), "action": parts + self.start}
        if self.name == "agent":  # PPO: a Gaussian, clipped to the bounds
            mean = output.view(-1, *self.space.shape)
            log_std = self.network.log_std.expand_as(mean)
            return {"mean": mean, "log_std": log_std, "action": mean.clamp(self.low, self.high)}
        if isinstance(output, tuple):  # SAC: a Gaussian, squashed by tanh
            mean, log_std = output
            return {"mean": mean, "log_std": log_std, "action": self.rescale(mean.tanh())}
        return {"action": self.rescale(output)}

    def rescale(self, actions):
        """From [-1, 1] to the bounds."""
        share = (actions.view(-1, *self.space.shape) + 1) / 2
        return (self.low * (1 - share) + self.high * share).clamp(self.low, self.high)


def warn_if_changed(run_folder, file):
    """What is imported is the checkout's file, never a run's own copy: warn if they differ."""
    recorded = enjoy.read_run(run_folder).get("sha256")
    if recorded is not None and recorded != sha256(file.read_bytes()).hexdigest():
        print(f"warning: {file.name} has changed since this run started", file=sys.stderr)


def read_policy(policy, envs):
    """The graph of the function that load_policy returned."""
    function = inspect.unwrap(policy)  # without no_grad
    names = inspect.getclosurevars(function).nonlocals
    found = [name for name in NETWORKS if isinstance(names.get(name), nn.Module)]
    if not found:
        raise SystemExit(
            f"load_policy has no PyTorch network called {', '.join(NETWORKS[:-1])} or "
            f"{NETWORKS[-1]}: JAX files cannot be exported"
        )
    # torch.export looks up the file's global names in its module, which runpy did not keep
    module = types.ModuleType(function.__globals__["__name__"])
    vars(module).update(function.__globals__)
    sys.modules.setdefault(module.__name__, module)
    if isinstance(envs.single_observation_space, gym.spaces.Dict):
        raise SystemExit("a policy of Dict observations cannot be exported: it has several inputs")
    if "memory" in names:
        raise SystemExit("a policy with a Transformer-XL memory cannot be exported")
    return Policy(found[0], copy.deepcopy(names[found[0]]).cpu(), envs).eval()


def zero_state(graph, num_envs):
    """The state of a recurrent policy at the start of an episode; () for others."""
    if not hasattr(graph.network, "lstm"):
        return ()
    lstm = graph.network.lstm
    return tuple(torch.zeros(lstm.num_layers, num_envs, lstm.hidden_size) for _ in range(2))


def trace(graph, envs):
    """The graph as torch.export sees it, for any number of observations."""
    space = envs.single_observation_space
    obs = torch.from_numpy(np.zeros((2, *space.shape), space.dtype))
    batch = torch.export.Dim("batch")
    state = zero_state(graph, 2)
    shapes = ({0: batch}, *({1: batch} for _ in state))
    with explain("trace this policy"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.export.export(graph, (obs, *state), dynamic_shapes=shapes, strict=True)


def output_names(program):
    """The names of the outputs, in their order."""
    return program.call_spec.out_spec.context


# the three formats


def write_onnx(program, graph, about, path):
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    state = ("hidden", "cell")[: len(zero_state(graph, 1))]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        onnx_program = torch.onnx.export(
            program,
            dynamo=True,
            verbose=False,
            input_names=["obs", *state],
            output_names=output_names(program),
        )
    onnx_program.model.metadata_props.update(about)
    onnx_program.save(path)


def run_onnx(path):
    """A function from observations and state to all outputs by name."""
    from onnxruntime import InferenceSession, SessionOptions

    options = SessionOptions()
    options.intra_op_num_threads = 1
    session = InferenceSession(path, options, providers=["CPUExecutionProvider"])
    inputs = [x.name for x in session.get_inputs()]
    names = [x.name for x in session.get_outputs()]

    def run(*values):
        outputs = session.run(None, dict(zip(inputs, values, strict=True)))
        return dict(zip(names, outputs, strict=True))

    return run


def tensor_names(program):
    """Of the graph's inputs that are weights or constants: their names in the module."""
    signature = program.graph_signature
    return signature.inputs_to_parameters | signature.inputs_to_buffers


def used_tensors(program):
    """The weights and constants that the graph reads, under their names in the file's network."""
    names = tensor_names(program)
    used = [node.name for node in program.graph.find_nodes(op="placeholder") if node.users]
    tensors = {names[name]: program.state_dict[names[name]] for name in used if name in names}
    return {name.removeprefix("network."): x.detach() for name, x in tensors.items()}


def write_safetensors(program, graph, about, path):
    from safetensors.torch import save

    tensors = {name: x.clone().contiguous() for name, x in used_tensors(program).items()}
    path.write_bytes(save(tensors, about))


def run_graph(program):
    """As run_onnx, in PyTorch and with the traced weights."""
    module = program.module()

    @torch.no_grad()
    def run(*values):
        outputs = module(*(torch.from_numpy(x) for x in values))
        return {name: x.numpy() for name, x in outputs.items()}

    return run


def numbers(tensor, digits=None):
    """A tensor as lists: the shortest numbers that give the same floats, or rounded ones."""
    x = tensor.detach().numpy()
    if digits is not None:
        return np.round(x.astype(float), digits).tolist()
    return np.vectorize(lambda value: float(str(value)), otypes=[float])(x).tolist()


def read_layers(program, digits=None):
    """Weights, biases and activations of an MLP, walking back from the action to obs."""
    names = tensor_names(program)
    (outputs,) = program.graph.output_node().args
    node = outputs[output_names(program).index("action")]
    layers, activation = [], None
    while node.name != "obs":
        operation = node.target.__name__.split(".")[0]
        if operation in ACTIVATIONS:
            activation = operation
        if operation == "linear":
            weight, bias = (program.state_dict[names[x.name]] for x in node.args[1:])
            layer = {"weight": numbers(weight, digits), "bias": numbers(bias, digits)}
            layers.insert(0, layer | {"activation": activation})
            activation = None
        sources = [x for x in node.all_input_nodes if x.name not in names]
        if not sources or operation in NOT_IN_AN_MLP:
            raise SystemExit("a .json holds multilayer perceptrons only: export to .onnx")
        node = sources[0]
    return layers


def make_document(program, graph, about, digits=None):
    """What a .json holds."""
    document = about | {"layers": read_layers(program, digits)}
    tensors = used_tensors(program)
    if "obs_moments.mean" in tensors:
        document["obs_mean"] = numbers(tensors["obs_moments.mean"])
        document["obs_std"] = numbers((tensors["obs_moments.var"] + 1e-8).sqrt())
    if "atoms" in tensors:
        document["atoms"] = numbers(tensors["atoms"])
    if hasattr(graph.network, "taus"):
        document["num_quantiles"] = len(graph.network.taus)
    if isinstance(graph.space, gym.spaces.Box):
        document["action"] = "clip" if graph.name == "agent" else "scale"
        document |= {"low": numbers(graph.low), "high": numbers(graph.high)}
    else:
        document |= {"action": "argmax", "start": int(graph.start)}
    return document


def write_json(program, graph, about, path):
    path.write_text(json.dumps(make_document(program, graph, about), separators=(",", ":")) + "\n")


def run_json(path):
    """As run_onnx, for a .json; the only output is the action."""
    document = json.loads(path.read_text())
    layers = [
        (np.array(layer["weight"]).T, np.array(layer["bias"]), layer["activation"])
        for layer in document["layers"]
    ]

    def run(obs):
        x = obs.reshape(len(obs), -1)
        if "obs_mean" in document:
            x = ((x - document["obs_mean"]) / document["obs_std"]).clip(-10, 10)
        for weight, bias, activation in layers:
            x = x @ weight + bias
            x = ACTIVATIONS[activation](x) if activation else x
        if "atoms" in document:  # C51: Q-values are the means of distributions over atoms
            logits = x.reshape(len(x), -1, len(document["atoms"]))
            chances = np.exp(logits - logits.max(-1, keepdims=True))
            x = (chances / chances.sum(-1, keepdims=True)) @ document["atoms"]
        if "num_quantiles" in document:  # QR-DQN: Q-values are the means of quantiles
            x = x.reshape(len(x), -1, document["num_quantiles"]).mean(-1)
        if document["action"] == "argmax":
            return {"action": x.argmax(-1) + document["start"]}
        low, high = np.array(document["low"]), np.array(document["high"])
        x = x.reshape(-1, *low.shape)
        if document["action"] == "scale":  # from [-1, 1] to the bounds
            x = low * (1 - (x + 1) / 2) + high * (x + 1) / 2
        return {"action": x.clip(low, high)}

    return run


# the comparison with load_policy


class Recorder(TorchFunctionMode):
    """Makes a policy greedy, and keeps what its actions come from, by the names of the outputs."""

    def __init__(self, policy, graph):
        super().__init__()
        self.policy = policy
        self.graph = graph
        self.seen = {}
        inspect.unwrap(policy).__globals__["sample"] = self.sample  # those of PPO and SAC

    def sample(self, *parameters):
        first = parameters[0]
        if len(parameters) > 1:
            self.seen = {"mean": first, "log_std": parameters[1].expand_as(first)}
            return first
        if isinstance(first, list):
            self.seen = {"log_probs": torch.cat(first, -1)}
            return torch.stack([log_probs.argmax(-1) for log_probs in first], -1)
        self.seen = {"log_probs": first.log_softmax(-1)}
        return first.argmax(-1)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.argmax and self.graph.name == "q_network":
            self.seen = {"q_values": args[0]}
        return function(*args, **(kwargs or {}))

    def __call__(self, obs, is_last):
        with self:
            actions = self.policy(obs, is_last)
        outputs = {name: x.detach().cpu().numpy() for name, x in self.seen.items()}
        outputs["action"] = torch.as_tensor(actions).cpu().numpy()
        if isinstance(self.graph.space, gym.spaces.Box):  # as a simulator of tensors does itself
            outputs["action"] = outputs["action"].clip(self.graph.space.low, self.graph.space.high)
        return actions, outputs


def largest_difference(expected, outputs):
    """(difference, name) of the output that differs most, beyond what rounding explains.

    A difference that is not a number is the largest."""
    worst = 0.0, ""
    for name in expected.keys() & outputs.keys():
        a, b = expected[name].astype(float), outputs[name].astype(float)
        scores = expected.get("log_probs", expected.get("q_values"))
        if name == "action" and scores is not None and a.ndim == 1:  # two may be equally good
            best = np.sort(scores, -1)[:, -2:]
            a, b = (np.where(best[:, -1] - best[:, 0] > TOLERANCE, x, 0) for x in (a, b))
        difference = float((np.abs(a - b) - TOLERANCE * np.abs(a)).max())
        if np.isnan(difference):
            return difference, name
        worst = max(worst, (difference, name))
    return worst


def compare(run, graph, policy, envs):
    """End with an error if an export and load_policy differ while the policy plays."""
    recorder = Recorder(policy, graph)
    obs, _ = envs.reset(seed=0)
    is_last = np.zeros(len(obs), dtype=bool)
    state = tuple(x.numpy() for x in zero_state(graph, len(obs)))
    for step in range(STEPS):
        actions, expected = recorder(obs, is_last)
        outputs = run(torch.as_tensor(obs).cpu().numpy(), *state)
        difference, name = largest_difference(expected, outputs)
        if not difference <= TOLERANCE:
            raise SystemExit(
                f"{name} differs from load_policy's by {difference:.2g} at step {step}: "
                "this policy cannot be exported"
            )
        state = tuple(outputs[name] * ~is_last[:, None] for name in NEXT_STATE[: len(state)])
        obs, _, terminated, truncated, _ = envs.step(actions)
        is_last = np.asarray(torch.as_tensor(terminated | truncated).cpu())


# a run


def describe(run_folder, checkpoint, env_id, envs):
    """What every format says about the policy, as strings."""
    run = enjoy.read_run(run_folder)
    return {
        "file": str(run["file"]),
        "env_id": env_id,
        "seed": str(run["args"].get("seed")),
        "global_step": str(int(checkpoint.get("global_step", 0))),
        "observation_space": str(envs.single_observation_space),
        "action_space": str(envs.single_action_space),
    }


def export(run_folder, checkpoint, output, file=None, env_id=None):
    """Write the policy of a checkpoint to a file, once it is known to be equal to load_policy's."""
    env_id, envs, policy = enjoy.make_agent(run_folder, checkpoint, file=file, env_id=env_id)
    graph = read_policy(policy, envs)
    program = trace(graph, envs)
    about = describe(run_folder, checkpoint, env_id, envs)
    part = output.with_name(f".part-{output.name}")
    try:
        if output.suffix == ".onnx":
            write_onnx(program, graph, about, part)
            compare(run_onnx(part), graph, policy, envs)
        elif output.suffix == ".json":
            write_json(program, graph, about, part)
            compare(run_json(part), graph, policy, envs)
        else:
            write_safetensors(program, graph, about, part)
            compare(run_graph(program), graph, policy, envs)
        os.replace(part, output)
    finally:
        part.unlink(missing_ok=True)
    envs.close()
    print(f"{output}: {output.stat().st_size:,} bytes, equal to load_policy over {STEPS:,} steps")
    if output.suffix == ".onnx":
        print(f"outputs: {', '.join(output_names(program))}")


def main():
    args = tyro.cli(Args, description=__doc__)
    if args.output.suffix not in FORMATS:
        raise SystemExit(f"{args.output} does not end in {', '.join(FORMATS)}")
    if args.output.is_dir():
        raise SystemExit(f"{args.output} is a folder")
    if not args.output.absolute().parent.is_dir():
        raise SystemExit(f"there is no folder {args.output.parent}")
    with explain(f"write {args.output}"):
        for module in FORMATS[args.output.suffix]:
            importlib.import_module(module)
    run_folder, path = enjoy.locate(args.run)
    file_name = str(enjoy.read_run(run_folder)["file"])
    file = args.file or enjoy.ALGORITHMS / Path(file_name).name
    if path.suffix == ".msgpack":
        raise SystemExit(f"{run_folder} is a run of {file.name}: JAX files cannot be exported")
    checkpoint = enjoy.load_checkpoint(path)
    if file.is_file():
        warn_if_changed(run_folder, file)
    export(run_folder, checkpoint, args.output, args.file, args.env_id)


if __name__ == "__main__":
    main()
