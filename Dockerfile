# CleanRL with the extras of EXTRAS and all files in their places; AWS Batch runs benchmarks in it
# (docs/benchmark.md).
#
#     docker build --tag cleanrl .
#     docker run --rm --volume ./runs:/cleanrl/runs cleanrl python cleanrl/ppo.py
FROM python:3.12-slim
ARG EXTRAS="cluster atari envpool mujoco jax"
RUN apt-get update && \
    apt-get install --yes --no-install-recommends git libegl1 libgl1 libglib2.0-0 && \
    rm -rf /var/lib/apt/lists/*
WORKDIR /cleanrl
COPY requirements requirements
RUN for extra in $EXTRAS; do set -- "$@" -r "requirements/requirements-$extra.txt"; done && \
    pip install --no-cache-dir "$@"
COPY . .
ENV MUJOCO_GL=egl SDL_AUDIODRIVER=dummy
CMD ["python", "cleanrl/ppo.py"]
