"""`SuperModel.from_pretrained(shared=...)` on two processes: the bytes of training on a base of one's own, and what loading takes."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import save_file
from torch.distributed import FileStore
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig

from tests.kernels.interpreter import INTERPRETED_ALONE
from tests.sharing.ranks import Ranks, start_ranks, store_path
from tests.tiny import SHAPE, make_batch, make_model, make_samples
from tlora.errors import ModelError, TloraError
from tlora.job import LoraConfig, TrainConfig
from tlora.sharing.peers import Peers, Sharing
from tlora.supermodel.shared_base import Precision, shared_weights
from tlora.supermodel.supermodel import SuperModel
from tlora.supermodel.tensor_files import find_tensors

pytestmark = INTERPRETED_ALONE
LAYERS = {"num_hidden_layers": 4}
TRAIN = TrainConfig(learning_rate=1e-2, max_steps=10, seed=3)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with start_ranks(2) as found:
        yield found


def sharing(rank: int, store: str) -> Sharing:
    return Sharing(FileStore(store, 2), rank, 2)


def train(model: SuperModel, steps: int, seed: int) -> dict[str, bytes]:
    """What two jobs' adapters are after `steps` optimizer steps, with dropout in one."""
    for job_id, lora in {"a": LoraConfig(r=4), "b": LoraConfig(r=8, lora_dropout=0.3)}.items():
        model.join(job_id, lora, TRAIN)
    for step in range(steps):
        samples = {job_id: make_samples(3, seed + 10 * step + i) for i, job_id in enumerate("ab")}
        model.forward_backward(make_batch(samples, step))
        model.optim_step("ab")
    return {job_id: model.state(job_id).params.numpy().tobytes() for job_id in "ab"}


def check_bytes(rank: int, store: str, directory: str, dtype: str) -> None:
    """Rank 0 takes seven steps, rank 1 one of its own."""
    steps = 1 if rank else 7
    alone = SuperModel.from_pretrained(directory, dtype, deterministic=True)
    shared = SuperModel.from_pretrained(directory, dtype, deterministic=True, shared=sharing(rank, store))
    for name, parameter in shared.model.named_parameters():
        assert parameter.is_meta == (name.endswith("_proj.weight")), name
        assert parameter.dtype == alone.model.get_parameter(name).dtype
    assert shared.fetches is not None and alone.fetches is None
    assert train(shared, steps, rank) == train(alone, steps, rank)
    assert shared.fetches.layers > 8 * steps and shared.fetches.exposed_seconds > 0


@pytest.mark.parametrize(
    ("family", "stored", "dtype"), [pytest.param("llama", "float32", "auto", marks=pytest.mark.slow), ("llama-tied", "float32", "bfloat16")]
)
def test_each_rank_trains_to_the_bytes_of_one_process(family: str, stored: str, dtype: str, ranks: Ranks, tmp_path: Path) -> None:
    """From several files; with biases and tied embeddings; in another dtype than the files."""
    make_model(family, getattr(torch, stored), **LAYERS).save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    ranks.run(check_bytes, store_path(tmp_path), str(tmp_path), dtype)


_STILL = 1 << 20


class Highest:
    """The highest PSS of some processes together while something runs, above what it was, sampled all the time."""

    def __init__(self, ranks: Ranks) -> None:
        self._processes = [psutil.Process(process.pid) for process in ranks.processes]

    def __enter__(self) -> Highest:
        self._before, self.extra_bytes, self._over = sum(self._pss()), 0, threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def _pss(self) -> list[int]:
        return [process.memory_full_info().pss for process in self._processes]

    def _look(self) -> None:
        """A page that two processes map counts half in each: what they map must not have changed while one after the other was asked."""
        previous = self._pss()
        while not self._over.is_set():
            found = self._pss()
            if all(abs(one - other) < _STILL for one, other in zip(previous, found, strict=True)):
                self.extra_bytes = max(self.extra_bytes, sum(found) - self._before)
            previous = found

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def load(rank: int, store: str, directory: str) -> None:
    model = SuperModel.from_pretrained(directory, shared=sharing(rank, store))
    assert model.fetches is not None
    Peers(sharing(rank, store + "-end"))  # what a rank held is counted as the other's when it ends
    del model
    gc.collect()


@pytest.mark.slow
def test_loading_takes_the_memory_of_one_base_over_all_processes(ranks: Ranks, tmp_path: Path) -> None:
    """159 MB in 48 layers, of which two slots on each rank hold two more each."""
    shape = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 48, "num_attention_heads": 4, "num_key_value_heads": 1}
    make_model("llama", **shape).save_pretrained(tmp_path)
    ranks.run(load, store_path(tmp_path), str(tmp_path))  # what the first load imports is no base
    base_bytes = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    assert base_bytes > 150e6
    with Highest(ranks) as highest:
        ranks.run(load, store_path(tmp_path), str(tmp_path))
    assert 0.9 * base_bytes < highest.extra_bytes <= 1.3 * base_bytes, f"{highest.extra_bytes / base_bytes:.2f} times the base"


def say(rank: int, store: str, directories: list[str]) -> str:
    try:
        SuperModel.from_pretrained(directories[rank], shared=sharing(rank, store))
    except (TloraError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return "loaded"


def test_a_rank_that_cannot_load_says_why_and_the_other_hears_it(ranks: Ranks, tmp_path: Path) -> None:
    make_model("llama").save_pretrained(tmp_path)
    heard, said = ranks.run(say, store_path(tmp_path), [str(tmp_path), str(tmp_path / "missing")])
    assert said.startswith("ModelError: base_model") and "no such directory" in said
    assert heard.startswith("RankError: the base was not loaded: rank 1 failed (base_model") and "no such directory" in heard


def test_ranks_with_different_bases_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    for name, layers in (("one", 2), ("two", 3)):
        make_model("llama", num_hidden_layers=layers).save_pretrained(tmp_path / name)
    said = ranks.run(say, store_path(tmp_path), [str(tmp_path / "one"), str(tmp_path / "two")])
    assert all("has a base of layout" in line and "Start all ranks alike" in line for line in said)


def test_a_mixture_of_experts_is_refused(tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(MixtralConfig(**SHAPE, num_local_experts=2)).save_pretrained(tmp_path)
    with pytest.raises(TloraError, match="mixture of experts.*Load it whole"):
        SuperModel.from_pretrained(str(tmp_path), shared=Sharing(FileStore(store_path(tmp_path), 1), 0, 1))


class NoLayers(torch.nn.Module):
    """A model that is one linear and a head."""

    base_model_prefix, config = "model", LlamaConfig(**SHAPE)

    def __init__(self) -> None:
        super().__init__()
        self.model, self.head = torch.nn.Sequential(torch.nn.Linear(4, 4)), torch.nn.Linear(4, 8)

    def get_output_embeddings(self) -> torch.nn.Linear:
        return self.head


def test_a_model_without_decoder_layers_is_refused() -> None:
    with pytest.raises(ModelError, match="base_model b: NoLayers .*Load it whole"):
        shared_weights(NoLayers(), "b")


def test_widths_that_a_form_cannot_have_are_refused() -> None:
    odd = make_model("llama", intermediate_size=100)
    with pytest.raises(ModelError, match="fp8 needs widths .* model.layers.0.mlp.gate_proj has 64 to 100"):
        shared_weights(odd, "b", Precision("fp8", torch.float32))
    with pytest.raises(
        ModelError, match="in parts with base_precision nf4 needs .* multiples of 64, and model.layers.0.mlp.down_proj has 100"
    ):
        shared_weights(odd, "b", Precision("nf4", torch.float32))


def test_headers_that_are_none_and_files_that_end_early_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"\xff" * 20)
    with pytest.raises(ModelError, match="model.safetensors: .*safetensors"):
        find_tensors([file])
    save_file({"x": torch.arange(12.0).view(4, 3)}, file)
    stored = find_tensors([file])["x"]
    assert torch.equal(stored.read(1, 3), torch.arange(3.0, 9.0).view(2, 3))
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(ModelError, match="cut off: 20 of 24 bytes"):
        stored.read(2, 4)


def test_files_of_another_format_and_damaged_ones_are_refused(tmp_path: Path) -> None:
    model = make_model("llama")
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-100])
    with pytest.raises(TloraError, match="is cut off or damaged"):
        SuperModel.from_pretrained(str(tmp_path), shared=Sharing(FileStore(store_path(tmp_path), 1), 0, 1))
    file.unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(TloraError, match="no safetensors files"):
        SuperModel.from_pretrained(str(tmp_path), shared=Sharing(FileStore(store_path(tmp_path), 1), 0, 1))
