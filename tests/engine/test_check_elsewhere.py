"""`tlora check --gpu`: the plan for a GPU that is not here, from what is known of it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from tests.engine.tiny_runs import job, run_spec, save_base
from tlora.engine.check import check
from tlora.engine.check_gpus import Devices
from tlora.errors import CapacityError, ConfigError, ModelError
from tlora.job import RunSpec
from tlora.planning.memory import count_base
from tlora.planning.streaming import Machine
from tlora.shape.gpu_models import find_gpu
from tlora.sharing.host_memory import Streaming
from tlora.supermodel.load import outline
from tlora.supermodel.shared_base import load_shared_base
from tlora.supermodel.supermodel import SuperModel


@pytest.fixture
def run(base: Path, data: Path, tmp_path: Path) -> RunSpec:
    return run_spec(base, tmp_path / "out", [job("a", str(data / "a.jsonl")), job("b", str(data / "b.jsonl"))], dtype="bfloat16")


def card(path: Path, **changed: object) -> str:
    fields = {"name": "RTX 9999", "memory": "24GiB", "compute_capability": 8.9, "tflops": 165}
    path.write_text(json.dumps({key: value for key, value in (fields | changed).items() if value is not None}))
    return str(path)


@pytest.mark.parametrize("name", ["rtx4090", "RTX 4090", "NVIDIA GeForce RTX 4090", "rtx-4090"])
def test_a_gpu_by_its_names(name: str) -> None:
    found = find_gpu(name)
    assert (found.name, found.capability, found.memory_bytes) == ("RTX 4090", 89, 24564 << 20)


@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        ("rtx4090", "fused, sm_89, 99 KB"),
        ("a100-40", "fused, sm_80, 163 KB"),
        ("h100", "fused, sm_90, 227 KB"),
        ("rtx5090", "fused, sm_120, 99 KB"),
        ("t4", "plain: compute capability 7.5 has no bf16"),
    ],
)
def test_what_it_would_run_and_what_fits(run: RunSpec, name: str, kernels: str) -> None:
    found = check(run, gpu=name)
    gpu = find_gpu(name)
    assert (found.kernels, found.device, found.limit_bytes) == (kernels, gpu.name, gpu.limit_bytes)
    assert not found.problems and found.resident_jobs == 2 and 0 < found.predicted_bytes < found.limit_bytes
    plain = kernels.startswith("plain")
    assert found.tokens_per_second > 100 and bool(found.recompute_choices) != plain
    assert gpu.name in found.rated_as


def test_a_gpu_that_is_too_small(run: RunSpec, tmp_path: Path) -> None:
    whole = check(run, gpu="rtx4090")
    small = card(tmp_path / "small.json", memory=whole.base_bytes)
    found = check(run, gpu=small)
    (said,) = {problem for one in found.jobs for problem in one.problems}
    assert said.startswith("the base model has ") and said.endswith("Take a smaller base, or take a larger GPU")
    larger = check(run, gpu=card(tmp_path / "larger.json", memory="24GiB"))
    assert not [problem for one in larger.jobs for problem in one.problems], "the remedy"


def test_fp8_is_for_those_that_have_it(run: RunSpec) -> None:
    in_fp8 = run.model_copy(update={"base_precision": "fp8"})
    assert not check(in_fp8, gpu="rtx4090").problems
    (problem,) = check(in_fp8, gpu="a100-40").problems
    assert "fp8 needs a GPU of compute capability 8.9 or above" in problem
    assert problem.endswith("and A100-40 has 8.0. Take base_precision out")


def test_a_file_of_a_gpu_with_a_key_twice(tmp_path: Path) -> None:
    path = Path(card(tmp_path / "gpu.json"))
    path.write_text(path.read_text().replace("{", '{"memory": "80GiB", ', 1))
    with pytest.raises(ConfigError, match="gpu.json: the key 'memory' stands twice in one object; keep one of the two. Write such as {"):
        find_gpu(str(path))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"memory": "24XB"}, "memory: not a number of bytes"),
        ({"memory": 24}, "memory: Input should be greater than or equal to 131072"),
        ({"compute_capability": 89}, "compute_capability: Input should be less than or equal to 20"),
        ({"tflops": None}, "tflops: Field required"),
        ({"compute_capability": "new"}, "compute_capability: Input should be a valid number"),
        ({"links": 3}, "links: Extra inputs are not permitted"),
    ],
)
def test_a_file_that_describes_none(tmp_path: Path, changed: dict[str, object], said: str) -> None:
    file = card(tmp_path / "gpu.json", **changed)
    with pytest.raises(ConfigError) as caught:
        find_gpu(file)
    assert str(caught.value).startswith(f"--gpu {file}: {said}") and "Write such as {" in str(caught.value)
    example = str(caught.value).partition("Write such as ")[2]
    (tmp_path / "right.json").write_text(example)
    assert find_gpu(str(tmp_path / "right.json")).capability == 89, "the remedy"


def test_what_is_not_known(run: RunSpec, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--gpu rtx9999: is not known; name one of .*rtx4090.*, or a JSON file with name, memory"):
        check(run, gpu="rtx9999")
    with pytest.raises(ConfigError, match=r"nowhere\.json"):
        find_gpu(str(tmp_path / "nowhere.json"))
    with pytest.raises(ConfigError, match="Leave --device out"):
        check(run, gpu="rtx4090", device="cpu")
    for gpus in ("all", "0,1", "0"):
        with pytest.raises(ConfigError, match="Give --gpus 2, or leave it out"):
            check(run, gpu="rtx4090", gpus=gpus)


def test_a_card_too_small_for_the_base_streams_it_over_its_link(tmp_path: Path, data: Path) -> None:
    """Room for a few of eight layers: those stay there. Half the link takes twice the time."""
    base = save_base(tmp_path / "base", num_hidden_layers=8)
    run = run_spec(base, tmp_path / "out", [job("a", str(data / "a.jsonl"))], dtype="bfloat16", recompute="none")
    whole = check(run, gpu="rtx4090")
    assert not whole.streamed and whole.stream_cost is None
    small = whole.predicted_bytes - whole.base_bytes // 3
    limited = run.model_copy(update={"memory_limit": small, "token_budget": whole.token_budget})
    found = [check(limited, gpu=card(tmp_path / f"{link}.json", link_gb_per_second=link)) for link in (20, 10)]
    for each in found:
        assert not each.problems and each.predicted_bytes <= small and each.base_bytes < whole.base_bytes
        assert "of 8 layers at a time on the device): with the whole base on the device a does not fit" in each.streamed
    costs = [each.stream_cost for each in found]
    assert costs[0] is not None and costs[1] is not None and costs[1].link_seconds == 2 * costs[0].link_seconds
    assert costs[0].product_seconds == costs[1].product_seconds
    assert 0 < found[1].tokens_per_second <= found[0].tokens_per_second


def test_a_card_too_small_for_two_layers_says_what_it_would_need(run: RunSpec) -> None:
    (problem,) = check(run.model_copy(update={"memory_limit": 20_000}), gpu="rtx4090").problems
    assert "Streamed from the host's memory it needs" in problem and "Take a smaller base, or raise memory_limit" in problem


@pytest.mark.parametrize("gpus", [1, 2])
def test_a_base_that_cannot_be_cut_is_held_whole_or_refused_as_a_load_does(tmp_path: Path, data: Path, gpus: int) -> None:
    """NF4 whose rows are no whole groups lies on one GPU as it is. Several cannot share it, but hold it in stages; none can stream it."""
    base = save_base(tmp_path / "base", hidden_size=96, num_attention_heads=4, head_dim=24, num_hidden_layers=4)
    run = run_spec(base, tmp_path / "out", [job("a", str(data / "a.jsonl"))], base_precision="nf4")
    whole = check(run, gpu="rtx4090", gpus=gpus)
    assert not whole.problems and not whole.streamed
    below = check(run.model_copy(update={"memory_limit": whole.base_bytes - 1}), gpu="rtx4090", gpus=gpus)
    if gpus == 2:
        assert not below.problems and below.form.startswith("the base cannot be shared: GPU 0: layers 0 to 1, "), below.jobs
        return
    (problem,) = below.problems
    with pytest.raises(ModelError) as loaded:
        load_shared_base(str(base), "auto", torch.device("cpu"), "nf4", Streaming())
    words = "a base in parts with base_precision nf4 needs input widths that are multiples of 64, and .* has 96. Take it out, or use GPUs"
    assert re.match(words, str(loaded.value)) and re.match(words, problem)
    counted = count_base(SuperModel(outline(str(base), base_precision="nf4")), torch.device("cuda"))
    assert set(counted.bytes_by_gpus) == {whole.base_bytes} and counted.streamed_bytes == 0, "as a scheduler plans with it"


def test_a_base_that_fits_stays_on_a_card_whose_host_pins_no_memory(tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that does not fit is refused with the driver's reason."""

    def refuse(*_: object) -> float:
        raise CapacityError("cannot be pinned")

    base = save_base(tmp_path / "base", num_hidden_layers=12)
    run = run_spec(base, tmp_path / "out", [job("a", str(data / "a.jsonl"), batch_size=24)], dtype="bfloat16")
    roomy = check(run, gpu="rtx4090")
    monkeypatch.setattr(Devices, "machine", lambda *_: Machine(refuse, elsewhere=True))
    tight = run.model_copy(update={"memory_limit": roomy.base_bytes + (roomy.predicted_bytes - roomy.base_bytes) // 2})
    found = check(tight, gpu="rtx4090")
    assert not found.problems and not found.streamed and found.recomputed_layers > 0
    assert check(run.model_copy(update={"memory_limit": roomy.base_bytes - 1}), gpu="rtx4090").problems == ("cannot be pinned",)


def test_a_base_that_leaves_little_room_is_streamed_where_that_is_clearly_faster(tmp_path: Path, data: Path) -> None:
    """It fits, with micro-batches that recompute nearly all; over a slow link it stays on the card."""
    base = save_base(tmp_path / "base", num_hidden_layers=12)
    run = run_spec(base, tmp_path / "out", [job("a", str(data / "a.jsonl"), batch_size=24)], dtype="bfloat16")
    roomy = check(run, gpu="rtx4090")
    assert not roomy.streamed and roomy.recomputed_layers == 0
    tight = run.model_copy(update={"memory_limit": roomy.base_bytes + (roomy.predicted_bytes - roomy.base_bytes) // 2})
    found = {link: check(tight, gpu=card(tmp_path / f"{link}.json", link_gb_per_second=link)) for link in (0.001, 1000)}
    assert all(not problem for each in found.values() for one in each.jobs for problem in one.problems)
    assert not found[0.001].streamed and "times as fast, by prediction, as with the whole base on the device" in found[1000].streamed
    assert found[1000].tokens_per_second >= 1.1 * found[0.001].tokens_per_second > 0


def test_a_base_that_is_streamed_by_order_has_two_layers_on_the_card(tmp_path: Path, data: Path) -> None:
    base = save_base(tmp_path / "base", num_hidden_layers=8)
    run = run_spec(base, tmp_path / "out", [job("a", str(data / "a.jsonl"))], dtype="bfloat16", layout="streamed")
    found = [check(run, gpu=card(tmp_path / f"{link}.json", link_gb_per_second=link)) for link in (0.001, 1000)]
    for each in found:
        assert "2 of 8 layers at a time on the device): the jobs file orders it" in each.streamed
    assert 0 < found[0].tokens_per_second < found[1].tokens_per_second


def test_gpus_of_two_kinds_are_planned_each_by_its_own_kind(run: RunSpec, tmp_path: Path) -> None:
    """The second has twice the speed, half the memory, other kernels and fixed work of its own."""
    slow = card(tmp_path / "slow.json", name="slow", training_tflops=50, layer_seconds=0.0)
    fast = card(tmp_path / "fast.json", name="fast", memory="12GiB", compute_capability=9.0, training_tflops=100, layer_seconds=1e-3)
    found = check(run, gpu=f"{slow},{fast}")
    assert not found.problems and found.device == "slow and fast" and found.rated_as == "measured on slow, and measured on fast"
    one, other = found.gpus
    assert (one.name, other.name) == ("slow", "fast") and {*one.jobs, *other.jobs} == {"a", "b"}
    assert (one.limit_bytes, other.limit_bytes) == tuple(find_gpu(each).limit_bytes for each in (slow, fast))
    assert one.predicted_bytes > 0 and other.predicted_bytes > 0
    alone = [check(run, gpu=each).tokens_per_second for each in (slow, fast)]
    assert other.tokens_per_second == pytest.approx(2 * one.tokens_per_second, rel=0.05), "samples differ a little"
    assert alone[1] < 2 * alone[0], "its layers take a millisecond besides"
    swapped = check(run, gpu=f"{fast},{slow}").gpus
    assert [gpu.name for gpu in swapped] == ["fast", "slow"]
    assert swapped[0].tokens_per_second == pytest.approx(2 * swapped[1].tokens_per_second, rel=0.05)


def test_a_job_that_one_kind_alone_holds_is_planned_there(run: RunSpec, tmp_path: Path) -> None:
    room = check(run, gpu=card(tmp_path / "any.json")).predicted_bytes
    large = card(tmp_path / "large.json", name="large")
    small = card(tmp_path / "small.json", name="small", memory=room // 4)
    found = check(run, gpu=f"{small},{large}")
    assert not found.problems and found.gpus[0].jobs == () and set(found.gpus[1].jobs) == {"a", "b"}
    assert "fits on GPU 1 alone" in found.form


def test_a_card_of_the_plain_path_has_a_speed_of_its_own(run: RunSpec) -> None:
    """65 TFLOP/s by cuBLAS, beside 165 by the kernels: 13 times slower, where an H200's speed was taken before."""
    both, alone = check(run, gpu="rtx4090,t4"), check(run, gpu="t4")
    assert not both.problems and both.rated_as == "extrapolated for RTX 4090, and extrapolated for T4 on the plain path"
    assert both.gpus[0].jobs == ("a", "b") and both.gpus[1].jobs == (), "either ends there before the T4 would end one"
    assert alone.rated_as == "extrapolated for T4 on the plain path"
    assert 0 < alone.tokens_per_second < 0.2 * check(run, gpu="rtx4090").tokens_per_second, "small layers count fixed work besides"


def test_gpus_that_are_no_multiple_of_their_models_are_refused(run: RunSpec) -> None:
    with pytest.raises(ConfigError, match="--gpus 3: is no multiple of the 2 models in --gpu rtx4090,rtx3090"):
        check(run, gpu="rtx4090,rtx3090", gpus=3)
