"""GPUs of no row in the table: figures from what the driver says of one, or a guess where only its name is known. Nothing was measured.

A multiprocessor's floating-point operations a clock are those of dense products of 16-bit floats, summed in fp32, by compute capability
(NVIDIA's white papers of each architecture). Times the multiprocessors and the clock they give the data sheets' rates.
"""

from __future__ import annotations

import math

from tlora.shape.gpu_models import GEN3, GEN4, GEN5, GpuModel, in_table

_PER_CLOCK = {0: 256, 70: 1024, 80: 2048, 86: 1024, 90: 4096, 100: 8192, 120: 1024}  # from that capability on
_GEFORCE_FROM = 75  # those sum in fp32 at half the rate, and their drivers' names say GeForce
_USUAL_HZ = 1.7e9  # where the driver names no clock: those of the table are from 1.4 to 2.6 GHz


def gpu_by_properties(name: str, memory_bytes: int, capability: int, multiprocessors: int, clock_hz: float) -> GpuModel:
    """Of `capability` 89 for 8.9. `clock_hz`: the highest of its multiprocessors, 0 where the driver does not say it. That it reads the
    memory of others is not assumed.
    """
    per_clock = _PER_CLOCK[max(first for first in _PER_CLOCK if first <= capability)]
    if capability >= _GEFORCE_FROM and "geforce" in name.lower():
        per_clock //= 2
    link = GEN3 if capability < 80 else GEN4 if capability < 90 else GEN5
    return GpuModel(name, memory_bytes, capability, per_clock * multiprocessors * (clock_hz or _USUAL_HZ) / 1e12, link)


def gpu_by_name_alone(name: str) -> GpuModel:
    """In the geometric middle between the slowest and the fastest of the table: at most 9 times off for any of these, until workers have
    measured.
    """
    ordered = sorted(in_table(), key=lambda gpu: gpu.flops)
    slowest, fastest = ordered[0], ordered[-1]
    middle = math.sqrt(slowest.flops * fastest.flops)
    typical = min(ordered, key=lambda gpu: abs(math.log(gpu.flops / middle)))
    return GpuModel(name, typical.memory_bytes, typical.capability, typical.tflops * middle / typical.flops, typical.link_gb_per_second)
