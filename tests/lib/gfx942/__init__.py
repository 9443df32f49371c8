"""An executor for gfx942 (MI300X) code objects on a CPU: machine code run instruction by instruction, no AMD GPU.

code_object.py reads the file, decode.py its instructions (by tinygrad's decoder), cpp/ is what they mean, executor.py
runs them: all workgroups of a grid at once, scheduled at random from a seed, on one or several simulated GPUs.

Two memories. Plain: every access happens at once. Adversarial (cpp/caches.h, cpp/flights.h): as weak as LLVM's memory
model for gfx942 allows, so that code which passes relies on nothing else. Not modelled: time, rounding modes other than
the usual, AMD's last bits of exp, log, rcp and rsq, the order in which a matrix instruction adds.
"""
