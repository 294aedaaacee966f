"""What a failing test saw, in plain words.

explain() tells four cases apart: the file does something else (broken), the file stops with an
error of its own (broken), the test needs something that the file no longer has (untested), and
the training did not reach what the test is about (untested)."""

import re
import subprocess

import numpy as np

# of tests/probes.py: {observation: what it is the value of}
PLACES = {
    "ConstantValue": {0: "value before a termination"},
    "ValueFromObs": {-1: "value at observation -1", 1: "value at observation 1"},
    "Discounting": {0: "value one step before the reward", 1: "value at the reward"},
    "TruncatedEveryStep": {0: "value at truncation"},
    "TwoEnds": {-1: "value at termination", 1: "value at truncation"},
    "LateEnds": {-0.5: "value at termination", 0.5: "value at truncation"},
    "ActionMatters": {0: "values of the actions"},
    "ActionAndObsMatter": {-1: "values at observation -1", 1: "values at observation 1"},
}
# of tests/test_contract.py, in plain words
CONTRACT = {
    "test_no_episode_is_lost": "every episode is reported, at the step at which it ended",
    "test_reported_returns_are_what_the_environment_paid": "reported returns are true scores",
    "test_unknown_environments_get_one_line": "unknown environments and runs: a one-line error",
    "test_bad_values_get_one_line_that_names_the_flag": "bad values: an error that names the flag",
    "test_run_folder": "run folder: run.json, events, checkpoint",
    "test_resume_changes_nothing_but_the_episodes": "a resumed run is the uninterrupted one",
    "test_curves_and_schedules_continue": "curves and schedules continue on resume",
}
NO_NEXT_VALUE = "the file does not bootstrap from the next observation"
CUT_AS_END = "the file treats truncation as termination"
NOT_MET = re.compile(r"must (have|matter)")  # in the words of tests: what they need to tell


def explain(item, error, file, stderr):
    """(outcome, words) of a failed test."""
    import pytest  # here, so that --run does not need it

    frames = [entry.frame for entry in error.traceback]
    in_file = [f for f in frames if str(f.code.path) == str(file)]
    test_frames = [f.f_locals for f in reversed(frames) if is_in_tests(f)]
    value = error.value
    if isinstance(value, SystemExit):
        if value.code == 2:
            flags = re.findall(r"--[a-z][a-z-]+", stderr)
            return "untested", f"a flag of the test is rejected: {' '.join(dict.fromkeys(flags))}"
        return "broken", f"stops: {value.code}"
    if isinstance(value, AssertionError) and NOT_MET.search(shorten(value)):
        return "untested", f"its test cannot tell: {shorten(value)}"
    if isinstance(value, AssertionError | pytest.fail.Exception):
        words = ""
        for pattern, tell in TELLERS.items():
            if re.search(pattern, item.originalname):
                try:
                    words = tell(test_frames)
                except Exception:  # the test's variables are not what they were
                    words = ""
                if words:
                    break
        return "broken", words or shorten(value)
    if isinstance(value, KeyError) and not isinstance(value.args[0], str):
        return "broken", "it learns from transitions that never happened"  # a test looks it up
    if isinstance(value, subprocess.TimeoutExpired):
        return "untested", f"not over in {value.timeout:.0f} s: it hangs, or the machine is busy"
    if in_file and not is_in_tests(frames[-1]):
        line = in_file[-1].lineno + 1
        return "broken", f"line {line} fails: {type(value).__name__}: {shorten(value)}"
    if isinstance(value, KeyError | NameError | AttributeError):
        names = re.findall(r"'(\w+)'", str(value))
        return "untested", f"the file has no {names[-1] if names else value}"
    return "untested", f"the test does not fit: {type(value).__name__}: {shorten(value)}"


def is_in_tests(frame):
    return "/tests/" in str(frame.code.path)


def shorten(value):
    text = " ".join(str(value).split())
    text = re.sub(r" *\(up to [^)]*allowed\)| assert .*", "", text) or text
    return text[:160]


def find(frames, *names):
    """The innermost variable with one of these names."""
    for frame in frames:
        for name in names:
            if name in frame:
                return frame[name]
    raise KeyError(names[0])


def numbers(x):
    x = np.unique(np.ravel(np.array(x, dtype=float)).round(2)) if np.ptp(x) < 0.05 else x
    return " and ".join(f"{float(n):.3g}" for n in np.ravel(np.array(x, dtype=float)))


def tell_values(frames):
    """Learned values beside the known ones, and the usual reason for such a difference."""
    frame = next(frame for frame in frames if "learned" in frame)
    learned = np.asarray(frame["learned"], dtype=float)
    told = "/".join(str(frame.get(name, "")) for name in ("probe", "name", "env_id"))
    probe = next((part for part in re.split(r"\W", told) if part in PLACES), "")
    values = frame.get("values")
    if "obs" in frame and "expected" in frame:  # one observation after another
        right = np.asarray(frame["expected"], dtype=float)
        return f"{probe}: learned {numbers(learned)}, should be {numbers(right)}" + reason(
            probe, learned.mean(), right.mean()
        )
    right = np.array(list(values.values()), dtype=float)
    learned = learned.reshape(-1, *right.shape)[0]
    told = []
    for obs, own, true in zip(values, learned, right, strict=True):
        if np.abs(own - true).max() > 0.1:
            nowhere = f"value at {float(obs):.2g}"
            place = PLACES.get(probe, {}).get(float(obs), nowhere)
            verb = "are" if place.startswith("values") else "is"
            told.append(f"{place} {verb} {numbers(own)}, should be {numbers(true)}")
            if np.ptp(own) < 0.3:  # for all actions alike
                told[-1] += reason(probe, np.mean(own), np.mean(true))
    return "; ".join(told)


def reason(probe, learned, right):
    """What such a value is the sign of."""
    near = 0.25 * abs(right)
    is_cut = probe in ("TruncatedEveryStep", "TwoEnds", "LateEnds") and right == 2
    if is_cut and abs(learned - 1) < near:
        return f": {CUT_AS_END}"
    if probe in ("TwoEnds", "LateEnds") and right == 1 and learned > 1 + near:
        return ": the file bootstraps after termination"
    if probe == "Discounting" and right == 0.5:
        if abs(learned) < near:
            return f": {NO_NEXT_VALUE}"
        if abs(learned - 1) < near:
            return ": rewards are not discounted"
    if probe == "ValueFromObs" and abs(learned) < near:
        return ": the value does not depend on the observation"
    return ""


def tell_actions(frames):
    frame = next(frame for frame in frames if "returns" in frame)
    name = frame.get("probe") or frame.get("name") or frame.get("env_id") or "the probe"
    return (
        f"{name}: mean return through load_policy {np.mean(frame['returns']):.2f}, should be 1: "
        "the right actions are not learned, or not taken"
    )


def tell_normalization(frames):
    frame = next(frame for frame in frames if "raw" in frame)
    raw, used, all_rows = frame["raw"], frame["used"], frame["names"]["b_advantages"]
    over_all = (raw - all_rows.mean()) / (all_rows.std(correction=0) + 1e-8)
    if np.allclose(raw, used):
        return "advantages are not normalized"
    if np.allclose(over_all, used, atol=1e-2):
        return "advantages are normalized over the whole rollout, not per minibatch"
    return f"advantages have mean {used.mean():.3g} and standard deviation {used.std():.3g}"


def tell_loss(frames):
    """Which term of the loss differs, by the file's own variables."""
    frame = next(frame for frame in frames if "policy" in frame and "names" in frame)
    names, entropy = frame["names"], frame["policy"].entropy().detach()
    entropy = float((entropy.sum(1) if entropy.ndim == 2 else entropy).mean())
    loss, policy_loss, value_loss, own_entropy = (
        float(names[name].detach()) for name in ("loss", "policy_loss", "value_loss", "entropy")
    )
    if abs(own_entropy - entropy) > 0.01 * abs(entropy):
        words = f"entropy is {own_entropy:.3g}, should be {entropy:.3g}"
        rows, actions = names["log_probs"].shape if names["log_probs"].ndim == 2 else (0, 0)
        if actions and abs(own_entropy / entropy * actions / rows - 1) < 0.05:
            words += ": it is summed over the wrong axis"
        return words
    for own, right, name in (
        (policy_loss, float(-frame["gain"].detach().mean()), "policy loss"),
        (value_loss, float(frame["error"].detach().mean() / 2), "value loss"),
    ):
        if abs(own - right) > 0.01 * abs(right) + 1e-4:
            return f"{name} is {own:.4g}, should be {right:.4g}"
    of_entropy = (loss - policy_loss - 0.7 * value_loss) / own_entropy
    of_value = (loss - policy_loss + 0.3 * own_entropy) / value_loss
    if abs(of_entropy - 0.3) < 0.01:
        return "the entropy bonus has the wrong sign: the loss adds ent_coef * entropy"
    if abs(of_entropy) < 0.01:
        return "the loss has no entropy bonus"
    if abs(of_value - 0.7) > 0.01:
        return f"the value loss counts {of_value / 0.7:.2g} times vf_coef, should be 1"
    return "the gradient is not that of the loss: are gradients reset, are values detached?"


def tell_advantages(frames):
    """Which other formula the advantages come from, if one of the usual mistakes explains them."""
    frame = next(frame for frame in frames if "names" in frame and "is_last" in frame)
    names, terminated, is_last = (frame[name] for name in ("names", "terminated", "is_last"))
    values, rewards, own = (np.asarray(names[n]) for n in ("values", "rewards", "advantages"))
    args, rows = names["args"], ~is_last[:-1]

    def estimate(ends, cuts, weight):
        advantage, advantages = 0, np.zeros_like(rewards)
        deltas = rewards + args.gamma * values[1:] * ~ends - values[:-1]
        for t in reversed(range(len(rewards))):
            advantage = deltas[t] + weight * advantage * ~cuts[t]
            advantages[t] = advantage
        return advantages

    none, weight = np.zeros_like(terminated), args.gamma * args.gae_lambda
    for words, ends, cuts, decay in (
        ("truncation is treated as termination", is_last[1:], is_last[1:], weight),
        ("values are bootstrapped after termination", none, is_last[1:], weight),
        ("advantages leak from one episode into the one before", terminated, none, weight),
        ("they do not decay with lambda", terminated, is_last[1:], args.gamma),
        ("they do not decay with gamma", terminated, is_last[1:], args.gae_lambda),
        ("they are one-step errors", terminated, is_last[1:], 0.0),
    ):
        if np.allclose(estimate(ends, cuts, decay)[rows], own[rows], atol=1e-4):
            return f"advantages are wrong: {words}"
    if np.allclose(estimate(terminated, is_last[1:], weight)[rows], own[rows], atol=1e-4):
        return "advantages are right, returns are not advantage plus value"
    return f"advantage {own[frame['t'], frame['e']]:.3g}, should be {frame['expected']:.3g}"


def tell_transitions(frames):
    """Transitions in the training data that never happened."""
    frame = next(frame for frame in frames if "happened" in frame and "learned" in frame)
    true = {step[:3]: step[3:] for step in frame["happened"]}
    wrong = [step for step in frame["learned"] if step not in frame["happened"]]
    next_obs = [step for step in wrong if step[:3] in true and true[step[:3]][0] != step[3]]
    ends = [step for step in wrong if step[:3] in true and true[step[:3]][0] == step[3]]
    share = f"{len(wrong)} of {len(frame['learned'])} transitions never happened"
    if next_obs and len(next_obs) >= len(ends):
        return f"{share}: the next observation is wrong, such as the first one after a reset"
    if ends:
        return f"{share}: truncation and termination are mixed up"
    return f"{share}: steps that only reset an environment are trained on" if wrong else ""


def tell_target(frames):
    frame = next(frame for frame in frames if "differs" in frame and "moves" in frame)
    if frame.get("before"):
        same = all(
            np.array_equal(a, b) for a, b in zip(frame["target"], frame["before"][1], strict=True)
        )
        if same and frame["moves"]:
            return f"the target network was not updated at step {frame['step']}, when it was due"
        if not frame["moves"]:
            return "the target network moves when it should be frozen"
    return f"the target network moved {frame['moves']} times"


def tell_exploration(frames):
    frame = next(frame for frame in frames if "other" in frame and "expected" in frame)
    own, right = frame["other"].mean(), frame["expected"].mean()
    dead = ": exploration is dead" if own < 0.2 * right else ""
    return f"{own:.1%} of the actions are not the greedy one, should be {right:.1%}{dead}"


def tell_epsilon(frames):
    frame = next(frame for frame in frames if "seen" in frame and "expected" in frame)
    step = next(s for s, x in frame["expected"].items() if abs(frame["seen"].get(s, 9) - x) > 1e-6)
    own = frame["seen"].get(step)
    dead = (
        ": exploration is dead" if own is not None and own < 0.2 * frame["expected"][step] else ""
    )
    return f"epsilon at step {step} is {own}, should be {frame['expected'][step]:.3g}{dead}"


def tell_sampling(frames):
    counts, probs = find(frames, "counts"), find(frames, "probs")
    shares = numbers(counts / counts.sum())
    dead = (
        ": always the most likely action, exploration is dead"
        if counts.max() == counts.sum()
        else ""
    )
    return f"actions are drawn with probabilities {shares}, should be {numbers(probs)}{dead}"


def tell_resume(frames):
    frame = next(frame for frame in frames if "cut" in frame and "whole" in frame)
    whole, cut, schedule = frame["whole"], frame["cut"], frame.get("schedule")
    if isinstance(whole, dict) and schedule in whole and cut.get(schedule) != whole[schedule]:
        own = dict(cut.get(schedule, []))
        step, right = next((s, x) for s, x in whole[schedule] if own.get(s) != x)
        name = schedule.split("/")[1].replace("_", " ")
        seen = f"{own[step]:.3g}" if step in own else "not logged"
        return f"after a resume the {name} at step {step} is {seen}, should be {right:.3g}"
    if isinstance(whole, dict) and whole.keys() != cut.keys():
        return f"checkpoints differ in {', '.join(sorted(whole.keys() ^ cut.keys()))}"
    return ""


def tell_checkpoints(frames):
    from tests.harness import same

    frame = next(frame for frame in frames if "cut" in frame and "whole" in frame)
    whole, cut = frame["whole"], frame["cut"]
    parts = [name for name in whole if not same(whole[name], cut.get(name))]
    return f"after a resume, {', '.join(parts)} is not what an uninterrupted run has"


def tell_paid(frames):
    frame = next(frame for frame in frames if "paid" in frame)
    return (
        f"reported returns are {numbers(sorted(set(frame['reported'])))}, the environment's are "
        f"{frame['paid']:g}: rewards are changed (clipped, scaled) before they are reported"
    )


def tell_rate(frames):
    used = find(frames, "used")
    expected = np.repeat(find(frames, "expected"), 6)
    if len(set(np.round(used, 9))) == 1:
        return f"the learning rate stays at {used[0]:.3g}, should fall to 0"
    return f"the last learning rate is {used[-1]:.3g}, should be {expected[-1]:.3g}"


def tell_density(frames):
    """Of Gaussian actions, whose components are independent."""
    frame = next(frame for frame in frames if "normal" in frame and "names" in frame)
    names, normal = frame["names"], frame["normal"]
    actions = names["b_actions"][names["mb"]]
    each = normal.log_prob(actions).detach()
    log_std = normal.scale.detach().log()[0]
    own = names["log_prob"](normal.mean.detach(), log_std, actions).detach()
    if own.shape != each.shape[:1]:
        return (
            f"log-probabilities have shape {list(own.shape)}, should be {list(each.shape[:1])}: "
            "they are not summed over the components of an action"
        )
    if np.allclose(own, each.mean(1), atol=1e-4):
        return "log-probabilities are averaged over the components of an action, not summed"
    return f"log-probability {float(own[0]):.3g}, should be {float(each[0].sum()):.3g}"


def tell_same_seed(frames):
    return "two runs of one seed differ, or two seeds do not"


TELLERS = {  # by the name of the test
    "test_values_of": tell_values,
    "test_actions_of": tell_actions,
    "core_7_advantages": tell_normalization,
    "core_10": tell_loss,
    "core_5|advantages_are_of": tell_advantages,
    "core_4": tell_rate,
    "dqn_2_only_what": tell_transitions,
    "dqn_3_so_many": tell_exploration,
    "dqn_3_the_chance": tell_epsilon,
    "dqn_6_the_target": tell_target,
    "sampled_actions": tell_sampling,
    "curves_and_schedules": tell_resume,
    "resume_changes_nothing": tell_checkpoints,
    "reported_returns": tell_paid,
    "continuous_3": tell_density,
    "same_seed": tell_same_seed,
}
