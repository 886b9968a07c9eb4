"""The facts on a run in `run.json` besides its order."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import torch

from tlora.engine.session import Loaded


def launch_facts(loaded: Loaded, device: torch.device) -> dict[str, Any]:
    """Of a run, or of one of its ranks, that is about to train."""
    model, threads = loaded.model, loaded.threads
    kernels = {"kernels": model.kernels_on(device, model.deterministic)} if device.type == "cuda" else {}
    return (
        {
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "device": f"cpu ({threads} thread{'s' * (threads > 1)})" if threads else torch.cuda.get_device_name(device),
            "token_budget": loaded.plan.token_budget,
            "recomputed_layers": loaded.plan.recomputed_layers,
            "recomputed_by_tokens": loaded.plan.recomputed_by_tokens,
            "base_parameters": loaded.base_parameters,
        }
        | kernels
        | _stream_facts(loaded)
        | ({"tiles": model.tiles} if model.tiles else {})
    )


def _stream_facts(loaded: Loaded) -> dict[str, Any]:
    """Of a base that is streamed: the layers on the device, and the link's GB/s."""
    if loaded.plan.streaming is None or loaded.link_bytes_per_second is None:
        return {}
    return {"streamed": {"slots": loaded.plan.streaming.slots, "link_gb_per_second": round(loaded.link_bytes_per_second / 1e9, 2)}}
