"""Device code, compiled by Triton: decode.py is the whole kernel, shared_step.py that of several
requests, stage.py one stage of it for measuring."""
