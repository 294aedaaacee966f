import os

# before PyTorch is imported anywhere: one thread for each of pytest's workers, and none of their windows or sounds
os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", SDL_VIDEODRIVER="dummy", SDL_AUDIODRIVER="dummy")
os.environ.setdefault("WANDB_MODE", "offline")
