"""What the tests of all algorithm files share: run a file as a user would, in this process, and
look inside."""

import contextlib
import functools
import json
import multiprocessing
import runpy
import signal
import sys
import tempfile
import threading
from importlib import metadata
from itertools import pairwise
from pathlib import Path

import cloudpickle
import gymnasium as gym
import numpy as np
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.optim.optimizer import register_optimizer_step_pre_hook
from tqdm import tqdm

import tests.probes  # registers them

ROOT = Path(__file__).resolve().parent.parent
EVERY_FILE = {path.stem: path for path in sorted((ROOT / "cleanrl").glob("*.py"))}


def is_new(stem):
    """Whether `make new` made it: then its tests are those of its PARENT, under that name."""
    tests = ROOT / "tests" / f"test_{stem}.py"
    return tests.exists() and "\nPARENT = " in tests.read_text()


FILES = {stem: path for stem, path in EVERY_FILE.items() if not is_new(stem)}
PPO = FILES["ppo"]

# the names and versions of all packages, of which each run tells, are read once
PACKAGES, distributions = list(metadata.distributions()), metadata.distributions
metadata.distributions = lambda **of: distributions(**of) if of else iter(PACKAGES)
metadata.Distribution.metadata = property(functools.cache(metadata.Distribution.metadata.fget))


def sees_images(file):
    """Whether it has a network for them."""
    return "_atari" in file.stem or "_procgen" in file.stem or file.stem == "ppo_rnd_envpool"


def has_pools(file):
    """Whether EnvPool makes its environments."""
    return "envpool" in file.stem or "_procgen" in file.stem


def probe(file, name):
    """The id of a probe in the form that a file can handle."""
    if file.stem in ("ppo_jax", "ppo_rnn_jax", "pqn_jax"):
        from tests import gymnax_probes  # noqa: F401  registers them

        return f"GymnaxProbe/{name}-v0"
    if file.stem in ("ippo_jax", "mappo_rnn_jax"):
        return f"tests.jaxmarl_probes:{name}"
    if file.stem in ("ppo_continuous_action_jax", "fast_td3_jax", "fast_sac_jax"):
        from tests import brax_probes  # noqa: F401  registers them

        return f"brax/{name}"
    if file.stem == "ppo_dict":
        return f"DictProbe/{name}-v0"
    if "isaacgym" in file.stem:
        from tests import isaac_probes  # noqa: F401  registers them

        return f"IsaacProbe/{name}-v0"
    if "pettingzoo" in file.stem:
        import tests.pettingzoo_probes  # noqa: F401  registers them for two players

    if sees_images(file):
        return f"ImageProbe/{name}-v0"
    is_continuous = "_continuous" in file.stem or "simba" in file.stem
    return f"{'ContinuousProbe' if is_continuous else 'Probe'}/{name}-v0"


def make_pool(task_id, real=None, **settings):
    of_procgen = {
        f"{env_id.capitalize()}Easy-v0": env_id
        for env_id in gym.registry
        if env_id.startswith("ImageProbe/")
    }
    if not task_id.startswith("ImageProbe/") and task_id not in of_procgen:
        return real(task_id, **settings)
    probe = gym.spec(of_procgen.get(task_id, task_id)).vector_entry_point.args[0]
    return tests.probes.PoolOfProbes(probe, like_procgen=task_id in of_procgen, **settings)


TEACHERS = tempfile.TemporaryDirectory()


@functools.cache
def untrained_teacher(student, env_id):
    """A run folder, with new weights of the network that the student's file learns from."""
    names = runpy.run_path(str(FILES["dqn_atari_jax" if "_jax" in student else "dqn_atari"]))
    args = {"env_id": env_id, "sticky": False}
    try:
        envs = names["make_envs"](names["Args"](**args), 1)
    except Exception:  # the student refuses this environment, too
        return "nowhere"
    folder = Path(tempfile.mkdtemp(dir=TEACHERS.name))
    (folder / "run.json").write_text(json.dumps({"file": names["__file__"], "args": args}))
    if "_jax" in student:
        import jax
        from flax.serialization import msgpack_serialize

        obs = np.zeros((1, *envs.single_observation_space.shape), np.uint8)
        network, rng = names["QNetwork"](int(envs.single_action_space.n)), np.random.default_rng(1)
        shapes = jax.eval_shape(network.init, jax.random.key(1), obs)
        draw = jax.tree.map(lambda x: rng.normal(0, 0.02, x.shape).astype(np.float32), shapes)
        content = msgpack_serialize({"agent": {"params": draw}})
        (folder / "checkpoint.msgpack").write_bytes(content)
    else:
        network = names["QNetwork"](envs)
        torch.save({"q_network": network.state_dict()}, folder / "checkpoint.pt")
    return folder


def with_teacher(file, flags):
    """The flags; a student without a teacher gets one, and acts at once."""
    flags = [*map(str, flags)]
    if "qdagger" not in Path(file).stem or {"--resume", "--teacher", "--help"} & {*flags}:
        return flags
    env_id = "BreakoutNoFrameskip-v4"
    for flag, value in pairwise(flags):
        env_id = value if flag == "--env-id" else env_id
    teacher = untrained_teacher(Path(file).stem, env_id)
    return f"--teacher {teacher} --offline-steps 0 --teacher-eval-episodes 1".split() + flags


def train(file, folder, *flags, on_update=None):
    """Run an algorithm file inside folder and return its global names; on_update(names) looks at
    them before each update, at the optimizer that makes it, and at the names of the function that
    it is in."""

    def look(optimizer, *_):
        frame, names = sys._getframe(), {"optimizer": optimizer}
        while frame.f_globals.get("__file__") != str(file) or frame.f_code.co_name != "<module>":
            names = (
                {**frame.f_locals, **names}
                if frame.f_globals.get("__file__") == str(file)
                else names
            )
            frame = frame.f_back
        on_update(frame.f_globals | names)

    if has_pools(Path(file)):
        import envpool

        if envpool.make_gymnasium.__name__ == "make_gymnasium":  # not yet ours
            envpool.make_gymnasium = functools.partial(make_pool, real=envpool.make_gymnasium)
            envpool.make_gymnasium.__name__ = "make_pool"
    argv, hook = sys.argv, register_optimizer_step_pre_hook(look) if on_update else None
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    sys.argv = [str(file), *with_teacher(file, flags)]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with contextlib.chdir(folder):
            return runpy.run_path(str(file), run_name="__main__")
    finally:
        sys.argv = argv
        for number, handler in handlers.items():  # a run takes them over
            signal.signal(number, handler)
        if hook:
            hook.remove()


def compiled_quickly(call):
    """The result of a call that compiles in half the time, to programs that are a little slower."""
    import jax

    jax.config.update("jax_disable_most_optimizations", True)
    try:
        return call()
    finally:
        jax.config.update("jax_disable_most_optimizations", False)


def start(function, *args):
    """Call a function in a process that has the imports already. It is forked from a server, not
    from us: what our threads hold at that moment (XLA's, TensorBoard's) would be locked in it for
    ever."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.test_ppo_atari_multigpu"])
    process = context.Process(target=call, args=(cloudpickle.dumps((function, args)),))
    with contextlib.chdir(ROOT):  # where the server, when it starts, finds the tests
        process.start()
    return process


def call(pickled):
    tqdm.set_lock(
        threading.RLock()
    )  # not the one that all processes share: if one is killed while it holds that, others hang
    function, args = cloudpickle.loads(pickled)
    function(*args)


def only_run(folder):
    (run,) = (folder / "runs").iterdir()
    return run


def scalars(run):
    """What TensorBoard shows of a run: {metric: [(step, value), ...]}."""
    events = EventAccumulator(str(run), size_guidance={"scalars": 0}).Reload()
    return {
        tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]
    }


def read_checkpoint(run):
    if (run / "checkpoint.msgpack").exists():
        from flax.serialization import msgpack_restore

        return msgpack_restore((run / "checkpoint.msgpack").read_bytes())
    return torch.load(run / "checkpoint.pt", weights_only=True, map_location="cpu")


def weights(run):
    """What acts: PPO's agent, the actor of continuous control, or the network of a value
    learner."""
    checkpoint = read_checkpoint(run)
    return next(
        checkpoint[name] for name in ("agent", "actor", "q_network", "params") if name in checkpoint
    )


def same(a, b):
    """Whether two checkpoints, or parts of them, are equal bit for bit."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[name], b[name]) for name in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return np.array_equal(a, b)


def about(run):
    return json.loads((run / "run.json").read_text())


def flat_grad(agent):
    return torch.cat([p.grad.flatten() for p in agent.parameters()])
