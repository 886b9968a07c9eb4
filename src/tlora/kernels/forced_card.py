"""A newer GPU's compiler, told to make what an older one runs."""

from __future__ import annotations

from tlora.kernels.cards import CardClass


def compile_as(card: CardClass, capability: int) -> None:
    """A developer's switch, to try an older card's kernels on a newer card: its bits are those of the older instructions, its speed is not.

    From now on Triton chooses instructions as for `card`, assembles them for a GPU of `capability`, and refuses what takes more shared
    memory than `card` has.
    """
    import triton.backends.nvidia.compiler as backend
    import triton.compiler.compiler as compiler
    from triton import knobs

    at_hand = backend.sm_arch_from_capability(capability)
    knobs.runtime.override_arch = f"sm{card.capability}"
    backend.sm_arch_from_capability = lambda _: at_hand
    compiler.max_shared_mem = lambda _: card.shared_memory
