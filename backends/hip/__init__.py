"""The HIP monokernel for MI300X: one launch decodes whole requests (docs/HIP.md)."""
