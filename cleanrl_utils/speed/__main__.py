import tyro

from cleanrl_utils import speed
from cleanrl_utils.speed.measure import Args, main

if __name__ == "__main__":
    main(tyro.cli(Args, prog="python -m cleanrl_utils.speed", description=speed.__doc__))
