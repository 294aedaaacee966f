"""What params_fn samples and returns, checked."""

import json
import traceback
import warnings

from optuna.distributions import CategoricalDistribution
from optuna.trial import FixedTrial

from cleanrl_utils.errors import one_line

SET_BY_THE_TUNER = {"env-id", "seed"}
RENAMED = {
    "suggest_loguniform": "suggest_float(name, low, high, log=True)",
    "suggest_uniform": "suggest_float(name, low, high)",
    "suggest_discrete_uniform": "suggest_float(name, low, high, step=q)",
}


class OtherChoices(Exception):
    """A name is sampled from other choices than in an earlier trial, which Optuna refuses."""


def sample_flags(params_fn, trial):
    """The flags that params_fn returns for a trial, and hints for the user."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            flags = with_dashes(params_fn(trial))
            json.dumps(flags)
        except Exception as error:
            if traceback.extract_tb(error.__traceback__)[-1].name.endswith("_compatibility"):
                raise OtherChoices from None
            new = [f": it is now {RENAMED[old]}" for old in RENAMED if f"'{old}'" in str(error)]
            raise SystemExit("".join(["params_fn failed: ", one_line(error), *new])) from None
        unused = [name for name in trial.params if not is_used(name, trial, params_fn, flags)]
    if taken := SET_BY_THE_TUNER & set(flags):
        raise SystemExit(f"params_fn must not set {' and '.join(sorted(taken))}: the tuner does")
    hints = [f"note: {name} is sampled, but changes none of the flags" for name in unused]
    for old, new in RENAMED.items():
        if any(str(warning.message).startswith(old) for warning in caught):
            hints.append(f"hint: {old} in params_fn will be removed from Optuna: use trial.{new}")
    return flags, hints


def with_dashes(flags):
    return {str(name).lstrip("-").replace("_", "-"): value for name, value in flags.items()}


def is_used(name, trial, params_fn, flags):
    """Whether a sampled name is a flag, or another value of it would change some flag."""
    distribution = trial.distributions[name]
    if with_dashes({name: None}).keys() <= flags.keys() or distribution.single():
        return True
    if isinstance(distribution, CategoricalDistribution):
        values = distribution.choices
    else:
        values = distribution.low, distribution.high
    for value in values:
        try:
            other = FixedTrial(trial.params | {name: value}, number=trial.number)
            if with_dashes(params_fn(other)) != flags:
                return True
        except Exception:  # such as a name that is sampled only with this value
            return True
    return False
