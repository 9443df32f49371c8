"""Device code, compiled by Triton: decode.py is the whole kernel, stage.py one stage of it for measuring."""
