"""The decode step as data: the schedule says what is computed, a lowering says how one backend does it.

    topology   a GPU as data                    lowering   blocks, tiles, K splits: who computes what
    schedule   stages, segments                 cuda       the CUDA monokernel's lowering
    exchanges  what blocks tell each other      triton     the Triton megakernel's
    check      refuse what could not run        packing    weights in the order in which they are read
    rope       the rotation as a table          wire       words that carry their own readiness

Nothing here imports torch or touches a device.
"""
