"""A developer's switch: the kernels of another class of GPU, compiled for that class and assembled for the card at hand.

So an older card's instructions (mma.sync, cp.async; no wgmma, no bulk copies) and its limit of shared memory can be tried on a newer card.
Its bits are those of the older card's instructions; its speed is not.
"""

from __future__ import annotations

from tlora.kernels.cards import CardClass


def compile_as(card: CardClass, capability: int) -> None:
    """From now on Triton chooses instructions as for `card`, assembles them for a GPU of `capability`, and refuses what takes more shared
    memory than `card` has.
    """
    import triton.backends.nvidia.compiler as backend
    import triton.compiler.compiler as compiler
    from triton import knobs

    at_hand = backend.sm_arch_from_capability(capability)
    knobs.runtime.override_arch = f"sm{card.capability}"
    backend.sm_arch_from_capability = lambda _: at_hand
    compiler.max_shared_mem = lambda _: card.shared_memory
