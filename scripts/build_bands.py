"""Rebuild cleanrl_utils/bands/ from the data in results/.

    python scripts/build_bands.py               # all files; random policies are measured once
    python scripts/build_bands.py ppo           # one file
    python scripts/build_bands.py --measure     # measure the random policies again
    python scripts/build_bands.py --leave-one-out   # how often is a published run called below?

A band has the return over steps of all published runs of one environment: mean, quantiles and
range over seeds. The random policy takes random actions in the environments that the file makes.
"""

import argparse
import csv
import json
import runpy
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path += [str(ROOT), str(ROOT / "scripts")]  # so that this runs from any folder
from cleanrl_utils import bands  # noqa: E402

RESULTS = ROOT / "results"
FILES = sorted((path.stem for path in (ROOT / "cleanrl").glob("*.py")), key=len)
EPISODES = 100  # of the random policy, fewer where they are long
FEW = 32  # of long ones
SECONDS = 120  # that may take


def find_algorithm(folder):
    """The file whose runs a folder of results/ holds: ppo_jax for ppo_jax_minatar."""
    return [stem for stem in FILES if f"{folder}_".startswith(f"{stem}_")][-1]


def read_folder(folder):
    """{env_id: {seed: rows of (step, return, seconds)}} and {env_id: flags} of runs.json."""
    told = json.loads((folder / "runs.json").read_text())
    runs, flags = {}, {}
    for path in sorted(folder.glob("*__*.csv")):
        if path.stem not in told:
            continue
        env_id, seed = path.stem.split("__")
        with path.open() as file:
            rows = np.array(list(csv.reader(file))[1:], dtype=float)
        runs.setdefault(env_id, {})[int(seed)] = rows
        flags[env_id] = told[path.stem]["args"]
    return runs, flags


def make_band(env_id, runs, flags, random):
    """The return over steps of all seeds; past the end of the shortest run, of those that go on."""
    last = max(rows[-1, 0] for rows in runs.values())
    steps = np.linspace(last / bands.POINTS, last, bands.POINTS)
    curves = []
    for rows in runs.values():
        own = bands.curve(rows, steps, steps[0])
        own[steps > rows[-1, 0] * 1.02] = np.nan
        curves.append(own)
    curves = np.array(curves)
    kept = ~np.isnan(curves).all(0)
    curves = curves[:, kept]
    low, q25, median, q75, high = np.nanquantile(curves, [0, 0.25, 0.5, 0.75, 1], axis=0)
    columns = [(~np.isnan(curves)).sum(0), np.nanmean(curves, axis=0), low, q25, median, q75, high]
    told = {name: value for name, value in flags.items() if name not in bands.HOUSEKEEPING}
    band = {"env_id": env_id, "seeds": sorted(runs), "planned": flags["total_timesteps"]}
    band |= {"flags": told, "random": random}
    band["steps"] = [round(step) for step in steps[kept]]
    for name, column in zip(bands.COLUMNS, columns, strict=True):
        band[name] = [int(x) if name == "runs" else float(f"{x:.5g}") for x in column]
    return band


def measure_random(algorithm, flags):
    """The return of random actions in the environments of a file, over whole episodes."""
    sys.argv = ["build_bands"]
    names = runpy.run_path(str(ROOT / "cleanrl" / f"{algorithm}.py"))
    fields = names["Args"].__dataclass_fields__
    args = names["Args"](**{name: value for name, value in flags.items() if name in fields})
    if compiled := compile_steps(names, args):
        return summarize(play_compiled(*compiled))
    envs = names["make_envs"](args, 8)
    envs.reset(seed=1)
    envs.action_space.seed(1)
    rng, is_pool = np.random.default_rng(1), "envpool" in algorithm or "procgen" in algorithm
    returns, start = [], time.time()
    counts = np.zeros(8, int)  # the same number of each environment, so that short ones do not win
    while counts.min() < -(-EPISODES // 8) and (time.time() - start < SECONDS or not counts.min()):
        if is_pool:
            actions = rng.integers(envs.single_action_space.n, size=8, dtype=np.int32)
        else:
            actions = envs.action_space.sample()
        *_, infos = envs.step(actions)
        for i in np.flatnonzero(infos.get("_episode", ())):
            returns.append((counts[i], float(infos["episode"]["r"][i])))
            counts[i] += 1
    return summarize([value for number, value in returns if number < counts.min()])


def compile_steps(names, args):
    """Many environments of a file whose environments live in JAX, or None.

    Their number, the most steps of an episode, functions to reset all with a key and to step all
    with a key: new state, rewards, and which episodes are over."""
    import jax

    if "make_gymnax_steps" in names and args.env_id not in names["gym"].registry:
        reset, draw, step = names["make_gymnax_steps"](args)
        num_actions = int(names["make_envs"](args, 1).single_action_space.n)

        def step_all(state, key):
            actions = jax.random.randint(key, (EPISODES,), 0, num_actions)
            drawn = jax.tree.map(lambda x: x[0], draw(key, (1, EPISODES)))
            _, state, rewards, terminated, truncated, _ = step(drawn, state, actions)
            return state, rewards, terminated | truncated

        return EPISODES, 4000, lambda keys: reset(keys)[1], step_all
    if "make_team_steps" in names:  # the return of a team is the mean over its agents
        env = names["make_env"](args)
        reset, draw, step, _ = names["make_team_steps"](env)
        shape, num_actions = (EPISODES, len(env.agents)), env.action_space(env.agents[0]).n

        def step_all(state, key):
            actions = jax.random.randint(key, shape, 0, num_actions)
            drawn = jax.tree.map(lambda x: x[0], draw(key, (1, EPISODES)))
            _, state, answers = step(drawn, state, actions)
            return state, answers["rewards"].mean(1), answers["is_last"]

        return EPISODES, 1000, lambda keys: reset(keys)[1], step_all
    if "make_game" in names:
        start, step, _, num_actions = names["make_game"](args)

        def step_all(state, key):
            actions = jax.random.randint(key, (FEW,), 0, num_actions)
            state, obs, rewards, _, is_last = jax.vmap(step)(*state, actions)
            return (state, obs), rewards, is_last

        return FEW, 3000, jax.vmap(start), step_all
    if "make_env" in names and "look" in names:
        env, most = names["make_env"](args)

        def step_all(state, key):
            actions = jax.random.uniform(key, (FEW, env.action_size), minval=-1, maxval=1)
            state = jax.vmap(env.step)(state, actions)
            _, rewards, terminated = names["look"](state)
            return state, rewards, terminated

        return FEW, most, jax.vmap(env.reset), step_all
    return None


def play_compiled(num_envs, most, reset, step_all):
    """The returns of the first episodes; what is not over after most steps is cut."""
    import jax
    import jax.numpy as jnp

    def act(before, key):
        state, returns, is_over = before
        state, rewards, ends = step_all(state, key)
        return (state, returns + rewards * ~is_over, is_over | ends), None

    start = reset(jax.random.split(jax.random.PRNGKey(1), num_envs))
    start = start, jnp.zeros(num_envs), jnp.zeros(num_envs, bool)
    keys = jax.random.split(jax.random.PRNGKey(2), most)
    (_, returns, _), _ = jax.jit(lambda start: jax.lax.scan(act, start, keys))(start)
    return returns


def summarize(returns):
    returns = np.array(returns, dtype=float)
    quantiles = np.quantile(returns, [0.05, 0.5, 0.95])
    measured = zip(("q5", "median", "q95"), quantiles, strict=True)
    told = {"episodes": len(returns), "mean": float(f"{returns.mean():.5g}")}
    return told | {name: float(f"{value:.5g}") for name, value in measured}


def known_random(algorithm):
    """{env_id: what an earlier call measured}, of this file before others."""
    known = {}
    for stem in (*FILES, algorithm):
        known |= {band["env_id"]: band["random"] for band in bands.read_bands(stem)}
    return known


def build(algorithm, folders, measure):
    found, known = [], {} if measure else known_random(algorithm)
    for folder in folders:
        runs, all_flags = read_folder(folder)
        for env_id, seeds in runs.items():
            random = known.get(env_id) or measure_random(algorithm, all_flags[env_id])
            found.append(make_band(env_id, seeds, all_flags[env_id], random))
            print(f"{algorithm}: {env_id}, {len(seeds)} runs, random {random['mean']}", flush=True)
            text = ",\n  ".join(json.dumps(band) for band in found)
            text = f'{{"file": "{algorithm}.py", "bands": [\n  {text}\n]}}\n'
            (bands.FOLDER / f"{algorithm}.json").write_text(text)


def leave_one_out(groups):
    """Each run against the band of the other seeds, at its end and at all points before."""
    verdicts, early = Counter(), Counter()
    for algorithm, folders in groups.items():
        for folder in folders:
            runs, all_flags = read_folder(folder)
            for env_id, seeds in runs.items():
                random = known_random(algorithm).get(env_id)
                if len(seeds) < 3 or random is None:
                    continue
                for seed, rows in seeds.items():
                    others = {other: seeds[other] for other in seeds if other != seed}
                    band = make_band(env_id, others, all_flags[env_id], random)
                    place = bands.place_rows(rows, band)
                    verdicts[place.verdict] += 1
                    if place.verdict in ("below", "dead"):
                        print(f"{folder.name}: {env_id}, seed {seed}: {place.line}")
                    for step in band["steps"]:
                        seen = rows[rows[:, 0] <= step]
                        early[bands.place_rows(seen, band).verdict] += 1
    print(f"at the end: {dict(verdicts)}; at all points: {dict(early)}")


def is_another_program(folder):
    """Not what the file is now, but what it was before, another library, or PPO beside it."""
    return folder.endswith(("_before", "_peer", "_jax_ppo"))


def find_groups():
    """{algorithm: its folders of results/ with runs}; what a changed copy left is no reference."""
    groups = {}
    for path in sorted(RESULTS.glob("*/runs.json")):
        if any(path.parent.glob("*__*.csv")) and not is_another_program(path.parent.name):
            groups.setdefault(find_algorithm(path.parent.name), []).append(path.parent)
    return groups


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", help="algorithm files such as ppo; all by default")
    parser.add_argument("--measure", action="store_true", help="measure the random policies again")
    parser.add_argument("--leave-one-out", action="store_true", help="check the published runs")
    args = parser.parse_args()
    groups = find_groups()
    if unknown := set(args.files) - set(groups):
        raise SystemExit(f"results/ has no runs of {', '.join(unknown)}: {', '.join(groups)}")
    if args.leave_one_out:
        return leave_one_out(groups)
    for algorithm in args.files or groups:
        build(algorithm, groups[algorithm], args.measure)


if __name__ == "__main__":
    main()
