"""Compare the training throughput of one of our files with its peers and the bare environments.

    python -m cleanrl_utils.speed ppo
    python -m cleanrl_utils.speed ppo --rounds 3 --peers sb3 --json speed.json
    python -m cleanrl_utils.speed ppo --peers sb3 --side-by-side   # on machines of varying speed

Everything runs on the CPU in one thread. The programs take turns, round by round, so that a machine
that slows down slows all of them. With --side-by-side, our file and one peer run at the same time
on one core each, swap cores every round, and only the time in which both are training counts. Only
the last 80% of a run count, without imports, compilation and the first steps.

Our file runs with its defaults and the FLAGS of measure.py; the peers get the same settings from
its run.json. uv creates an environment for each peer, with PyTorch and the other packages at their
versions in constraints.txt. All peers but rejax log to TensorBoard, as our files do; rejax trains
in one call, so its second call is measured. Steps are counted as each program counts them: after an
episode, our files spend one step on the reset (ppo_jax and dqn_jax do not), the peers none.
"""
