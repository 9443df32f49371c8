"""AMD code executed on a CPU: the executor's own proof, litmus kernels, the Triton kernel for gfx942, gates."""
