"""A job that can never fit is refused when it is ordered, by arithmetic over the base's outline."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.service.served import Served, config_of, serving
from tlora.api import OrderedData, OrderSpec
from tlora.job import LoraShape
from tlora.service import base_shapes, capacity
from tlora.service.base_shapes import Precision, adapter_parameters, find_outline, known_outline
from tlora.service.capacity import Capacity
from tlora.service.machine import Devices
from tlora.service.problems import RefusedError
from tlora.shape.base_shape import BaseShape
from tlora.shape.memory import ADAPTER_BYTES
from tlora.wording.numbers import gib

BASE = str(Path(__file__).parents[2] / "demo" / "base")


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the real outlines of the demo's base, on a GPU and on a CPU."""
    directory = tmp_path_factory.mktemp("server") / "bases"
    for device in ("cuda", "cpu"):
        find_outline(directory, BASE, Precision(device=device))
    return directory


def adapter_bytes(outline: BaseShape, shape: LoraShape) -> int:
    return ADAPTER_BYTES * adapter_parameters(outline, shape)


def test_an_outline_of_another_transformers_is_not_taken(bases: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert known_outline(bases, BASE, Precision()) is not None
    monkeypatch.setattr(base_shapes, "_transformers", lambda: "5.99.0")
    assert known_outline(bases, BASE, Precision()) is None


@pytest.fixture
def tight(bases: Path) -> Iterator[tuple[Served, int]]:
    """A server that has just enough memory for rank 128, and how much that is."""
    outline = known_outline(bases, BASE, Precision())
    assert outline is not None
    limit = outline.bytes + adapter_bytes(outline, LoraShape(r=128))
    with serving(bases.parent, base_models={"base": BASE}, memory_limit=limit) as served:
        yield served, limit


def test_a_rank_beyond_memory_is_refused_at_submission_and_nothing_is_kept(tight: tuple[Served, int]) -> None:
    served, limit = tight
    file = served.upload("alice")
    assert served.ask("alice", "POST", "/v1/jobs", 201, json=served.order("alice", file, r=128))["order"]["r"] == 128
    refused = served.ask("alice", "POST", "/v1/jobs", 400, json=served.order("alice", file, r=129))["error"]
    assert (refused["code"], refused["param"]) == ("rank_too_large", "r")
    for part in ("r: 129", "with its gradient and Adam's moments", f"(memory_limit) has {gib(limit)}", "Order a smaller r"):
        assert part in refused["message"], refused["message"]
    pattern = served.order("alice", file, r=8, rank_pattern={"q_proj": 256, "k_proj": 256, "v_proj": 256, "o_proj": 256})
    answer = served.ask("alice", "POST", "/v1/jobs", json=pattern | {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]})
    assert "error" not in answer, "what counts is the adapter, not its largest rank"
    sweep = {"job": served.order("alice", file), "sweep": {"r": [8, 256]}}
    assert served.ask("alice", "POST", "/v1/sweeps", 400, json=sweep)["error"]["code"] == "rank_too_large"
    assert len(served.ask("alice", "GET", "/v1/jobs", 200)["data"]) == 2


def test_targets_that_the_base_has_not_are_refused_at_submission(tight: tuple[Served, int]) -> None:
    served, _ = tight
    refused = served.ask("alice", "POST", "/v1/jobs", 400, json=served.order("alice", target_modules=["q_prj"]))["error"]
    assert refused["param"] == "target_modules" and "Did you mean q_proj?" in refused["message"]


def test_what_is_known_of_a_base_is_of_the_runs_that_the_server_makes(bases: Path) -> None:
    """A deterministic run computes otherwise: its outline is another, and was looked for under the name of the plain one."""
    capacities = [Capacity(config_of(bases.parent, deterministic=setting), Devices("cuda", (0,), None)) for setting in (False, True)]
    for capacity_of in capacities:
        capacity_of.learn("base", BASE)
    assert [each.parts_of("base") is not None for each in capacities] == [True, False], "none was made for it"
    find_outline(bases, BASE, Precision(deterministic=True))
    capacities[1].learn("base", BASE)
    assert capacities[1].parts_of("base") is not None


def test_a_base_beyond_memory_and_one_of_which_nothing_is_known(bases: Path) -> None:
    outline = known_outline(bases, BASE, Precision())
    assert outline is not None
    small = Capacity(config_of(bases.parent), Devices("cuda", (0,), int(outline.memory.least_weights(1))))
    assert small.why_never("base", 1) is None, "nothing is known of it yet"
    small.learn("other", "models/unknown")
    assert small.why_never("other", 1 << 40) is None
    small.learn("base", BASE)
    reason = small.why_never("base", 1)
    assert reason is not None and "alone takes" in reason and "a GPU here has" in reason
    assert small.least_gpus("base") == small.least_gpus("other") == 1, "it fits on none, or nothing is known"
    silent = Capacity(config_of(bases.parent), Devices("cuda", (0,), None))
    silent.learn("base", BASE)
    assert silent.why_never("base", 1 << 40) is None, "the driver does not tell how much there is"


def test_a_base_beyond_a_gpu_needs_several(bases: Path) -> None:
    outline = known_outline(bases, BASE, Precision())
    assert outline is not None and outline.bytes == outline.memory.bytes_by_gpus[0] > outline.memory.bytes_by_gpus[3]
    most = int(outline.memory.bytes_by_gpus[3] / 0.84)
    for gpus, least in ((1, 1), (3, 1), (4, 4), (8, 4)):
        several = Capacity(config_of(bases.parent), Devices("cuda", tuple(range(gpus)), most))
        several.learn("base", BASE)
        assert several.least_gpus("base") == least, gpus
        fits = outline.memory.least_weights(gpus) + ADAPTER_BYTES <= most
        assert (several.why_never("base", 1) is None) == fits
    listens = config_of(bases.parent).model_copy(update={"worker_listen": "tcp://127.0.0.1:7000"})
    for limit, least in (("auto", 1), (most, 4)):  # larger GPUs may come; what is ordered holds for them too
        capacity = Capacity(listens.model_copy(update={"memory_limit": limit}), Devices("cuda", (0, 1, 2, 3), most))
        capacity.learn("base", BASE)
        memory = capacity.memory_of("base")
        assert capacity.least_gpus("base") == least and memory is not None and memory.stages is not None
        assert memory.stages.fullest_bytes == outline.parts.bytes_by_stages()
    unstreamed = replace(outline, memory=replace(outline.memory, streamed_bytes=0.0))
    beyond = Capacity(config_of(bases.parent), Devices("cuda", (0, 1, 2, 3), outline.memory.bytes_by_gpus[3] - 1))
    beyond._outlines["base"] = unstreamed
    reason = beyond.why_never("base", 1)
    assert reason is not None and "on each of 4 GPUs" in reason


def test_a_base_that_is_ordered_in_stages_needs_two_gpus_and_gets_one_for_each_layer(bases: Path) -> None:
    outline = known_outline(bases, BASE, Precision())
    assert outline is not None
    layers, most = len(outline.parts.layers), 4 * outline.bytes
    for gpus, listens, cut in ((2, None, True), (1, "tcp://127.0.0.1:7000", True), (0, "tcp://127.0.0.1:7000", True), (1, None, False)):
        config = config_of(bases.parent).model_copy(update={"layout": "stages", "worker_listen": listens})
        ordered = Capacity(config, Devices("cuda", tuple(range(gpus)), most))
        assert ordered.least_gpus("base") == (2 if cut else 1), "also where nothing is known of it yet"
        ordered._outlines["base"] = outline
        assert ordered.least_gpus("base") == (2 if cut else 1) and ordered.why_never("base", 1) is None
        assert [ordered.most_gpus("base", there) for there in (0, 1, 2, layers + 9)] == (
            [layers, 1, 2, layers] if cut else [0, 1, 2, layers + 9]
        )
        ordered._outlines["base"] = replace(outline, parts=replace(outline.parts, no_stages="its layers share a cache"))
        why = "base_model 'base' cannot be cut into stages: its layers share a cache"
        assert ordered.why_uncut("base") == (why if cut else None) and ordered.why_never("base", 1) is None
        if cut:
            with pytest.raises(RefusedError, match=f"{why}. Order another base") as refused:
                ordered.check(OrderSpec(name="a", base_model="base", data=OrderedData(file="file-1")))
            assert refused.value.code == "base_not_served"


def test_a_base_that_is_ordered_in_stages_counts_as_its_fullest_stage(bases: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On GPUs that would hold it whole too: it was counted whole on each of them."""
    outline = known_outline(bases, BASE, Precision())
    assert outline is not None
    monkeypatch.setattr(capacity, "known_outline", lambda *_: outline)
    layers, room = len(outline.parts.layers), 100 * outline.bytes
    for layout, listens in (("stages", "tcp://127.0.0.1:7000"), ("auto", None)):
        config = config_of(bases.parent).model_copy(update={"layout": layout, "worker_listen": listens})
        ordered = Capacity(config, Devices("cuda", (0,), room))
        ordered.learn("base", BASE)
        memory = ordered.memory_of("base")
        assert memory is not None and memory.weights(1, room) == outline.bytes
        if layout == "auto":
            assert memory.weights(2, room) == outline.bytes and memory.is_whole(room)
            continue
        part = outline.parts.stage_bytes
        halves = [max(part(0, cut), part(cut, layers)) for cut in range(1, layers)]
        assert memory.weights(2, room) in halves and not memory.is_whole(room)
        assert memory.weights(layers, room) == max(part(layer, layer + 1) for layer in range(layers)) < outline.bytes
        assert memory.weights(layers, 1) == memory.weights(layers, room) and len(memory.bytes_by_gpus) == layers
        assert memory.room_on((1.0,) * (layers + 1), (room,) * (layers + 1)) == room, "no cut has more stages than there are layers"


def test_what_its_own_gpus_lack_refuses_no_job_of_a_server_to_which_hosts_may_come(bases: Path) -> None:
    outline = known_outline(bases, BASE, Precision())
    assert outline is not None
    for update, judged in (({}, True), ({"worker_listen": "tcp://127.0.0.1:7000"}, False), ({"backend": "ray"}, True)):
        small = Capacity(config_of(bases.parent).model_copy(update=update), Devices("cuda", (0,), int(outline.memory.least_weights(1))))
        small._outlines["base"] = outline
        assert (small.why_never("base", 1) is not None) == judged, update


def test_a_base_beyond_the_only_gpu_is_streamed_to_it(bases: Path) -> None:
    """As a worker does; it is refused where not even two layers fit."""
    outline = known_outline(bases, BASE, Precision())
    assert outline is not None and 0 < outline.memory.streamed_bytes < outline.bytes
    least = int(outline.memory.streamed_bytes) + ADAPTER_BYTES
    for limit, reason in ((least, None), (least - 1, "beside"), (int(outline.memory.streamed_bytes), "streamed from the host's memory")):
        one = Capacity(config_of(bases.parent), Devices("cuda", (0,), limit))
        one.learn("base", BASE)
        found = one.why_never("base", 1)
        assert found is None if reason is None else found is not None and reason in found
    assert outline.memory.weights(1, least) == outline.memory.streamed_bytes
    assert outline.memory.weights(1, 2 * outline.bytes) == outline.bytes
    assert outline.memory.weights(4, least) == outline.memory.bytes_by_gpus[3]


def test_one_that_was_accepted_before_its_base_was_known_fails_before_it_reaches_a_worker(bases: Path, tmp_path: Path) -> None:
    with serving(tmp_path / "server", base_models={"base": BASE}, memory_limit=1000) as served:
        job = served.submit("alice")
        known = tmp_path / "server" / "bases"
        assert not list(known.iterdir())
        served.wait("alice", job["id"], "succeeded")
        for path in bases.iterdir():
            (known / path.name).write_bytes(path.read_bytes())
        served.intakes[0].held = True
        late = served.submit("alice", name="late")
        served.intakes[0].tell({"key": "base:base", "bytes": 1 << 30})
        served.intakes[0].let_go()
        failed = served.wait("alice", late["id"], "failed")
        assert "alone takes" in failed["reason"] and late["id"] not in served.cluster.submitted
