"""The transfer engine for KV in GPU memory. Imported inside engines only: it needs torch, Triton and CUDA."""

from kvcellar.transfer.cuda.mover import CudaMover
from kvcellar.transfer.cuda.pins import Pins
from kvcellar.transfer.kernels import warm_up

__all__ = ["CudaMover", "Pins", "warm_up"]
