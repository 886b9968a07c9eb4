"""Imported once for all ranks of the tests. Kernels among it are interpreted."""

import warnings

import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from tests.kernels.interpreter import interpreted

    with interpreted():
        import tlora.kernels.pass_operations
    import tlora.supermodel.supermodel  # noqa: F401

torch.set_num_threads(1)
