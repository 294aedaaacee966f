"""How fast one of our files trains, next to its peers on the same settings, and next to its environments alone.

    python -m cleanrl_utils.speed ppo
    python -m cleanrl_utils.speed ppo --rounds 3 --peers sb3 --json speed.json
    python -m cleanrl_utils.speed ppo --peers sb3 --side-by-side   # where the machine's speed comes and goes

Everything runs on the CPU, in one thread, one program after the other, round by round, so that a machine that slows down
slows them all; with --side-by-side ours and one peer run at the same time, on a core each, swapped from round to round, and
what counts is the time in which both are at work. Only the last 80% of each run count: imports, compilation and the first
steps do not. Our file runs as it is; the settings are its defaults, but for those in FLAGS, and the peers get them from its
run.json. Each peer has an environment of its own, made by uv, in which PyTorch and the other packages named below have their
versions of constraints.txt. All but rejax log to TensorBoard, as ours does; rejax trains in one call, so its second one is
measured.
Steps are counted as each program counts them: after an episode ours spends one on the reset (ppo_jax and dqn_jax do not),
the peers none.
"""
