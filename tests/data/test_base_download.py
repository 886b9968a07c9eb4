"""A base is downloaded from the hub once, by names of what transformers reads, with its progress and the disk's room said."""

from __future__ import annotations

import errno
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants
from small_hub import SmallHub, small_hub
from transformers import AutoModelForCausalLM

from tlora.data import base_files
from tlora.data.base_download import describe_download, fetch_base
from tlora.data.base_files import located
from tlora.data.tokenizer import load_tokenizer
from tlora.errors import ModelError
from tlora.supermodel.load import find_directory, load_base, load_config, load_weights, pin_revision
from tlora.supermodel.weight_files import check_unused, find_safetensors

DEMO = Path(__file__).parents[2] / "demo" / "base"
FILES = {path.name: path.read_bytes() for path in DEMO.iterdir() if path.is_file()}
OTHERS = ("pytorch_model.bin", "consolidated.safetensors", "onnx/model.onnx", "original/params.json", "q4.gguf", "tf_model.h5", "run.py")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SmallHub]:
    """A hub with the demo's base as org/name, and files beside it that are not read; the cache is empty."""
    with small_hub() as hub:
        hub.add("org/name", FILES | dict.fromkeys(OTHERS, b"not to be read"))
        monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
        template = hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)  # made of the endpoint as the library is imported
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache" / "hub"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        base_files.ask_commit.cache_clear()
        yield hub
        base_files.ask_commit.cache_clear()


@pytest.fixture(autouse=True)
def closed_clients() -> Iterator[None]:
    yield
    huggingface_hub.close_session()


def fetched(hub: SmallHub, name: str = "org/name") -> list[str]:
    """The files whose content was asked for."""
    return [asked.split("/", 5)[-1] for asked in hub.asked if asked.startswith(f"GET /{name}/resolve/")]


def download(base_model: str = "org/name", **options: Any) -> list[str]:
    """As a launch does it; the lines of progress."""
    shown: list[str] = []
    find_directory(base_model)
    fetch_base(base_model, shown.append, **options)
    return shown


def test_what_transformers_reads_is_fetched_once_and_all_is_read_from_its_directory(hub: SmallHub) -> None:
    total = sum(map(len, FILES.values()))
    shown = download()
    pinned = pin_revision("org/name")
    size = f"{total / 1e6:.1f} MB"
    assert shown[0] == f"downloading org/name: 718 B of {size}" and shown[-1].startswith(f"downloading org/name: {size} of {size}, ")
    assert sorted(fetched(hub)) == sorted(FILES)
    before = list(hub.asked)
    assert not download() and not download(pinned), "nothing is lacking"
    directory = str(find_directory(pinned))
    assert located(pinned, weights=True) == (directory, None) == located(pinned)
    weights = load_weights(pinned).state_dict()
    oracle = AutoModelForCausalLM.from_pretrained(DEMO).state_dict()
    assert weights.keys() == oracle.keys() and all(torch.equal(weights[name], oracle[name]) for name in oracle)
    assert load_tokenizer(pinned).get_vocab() == load_tokenizer(str(DEMO)).get_vocab()
    assert check_unused(pinned, load_config(pinned), "refuse") == []
    name, revision = pinned.split("@")
    assert find_safetensors(name, revision) == [Path(directory) / "model.safetensors"]
    assert [asked for asked in hub.asked[len(before) :] if "org/name" in asked] == []


def test_shards_are_those_that_the_index_names(hub: SmallHub, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_pretrained(DEMO).save_pretrained(tmp_path / "sharded", max_shard_size="500KB")
    shards = {path.name: path.read_bytes() for path in (tmp_path / "sharded").iterdir()}
    assert sum(name.endswith(".safetensors") for name in shards) > 1
    rest = {name: content for name, content in FILES.items() if name != "model.safetensors"}
    hub.add("org/sharded", rest | shards | {"model-of-another-kind.safetensors": b"not to be read"})
    download("org/sharded")
    read = {name for name in fetched(hub, "org/sharded") if name.endswith(".safetensors")}
    assert read == {name for name in shards if name.endswith(".safetensors")}
    assert load_base("org/sharded").num_bytes == load_base(str(DEMO)).num_bytes


def test_a_base_without_safetensors_has_its_bin_files(hub: SmallHub, tmp_path: Path) -> None:
    torch.save(AutoModelForCausalLM.from_pretrained(DEMO).state_dict(), tmp_path / "pytorch_model.bin")
    files = {name: content for name, content in FILES.items() if name != "model.safetensors"}
    hub.add("org/bin", files | {"pytorch_model.bin": (tmp_path / "pytorch_model.bin").read_bytes()})
    download("org/bin")
    before = len(hub.asked)
    assert load_base("org/bin").num_bytes == load_base(str(DEMO)).num_bytes
    assert [asked for asked in hub.asked[before:] if "org/bin" in asked] == []


def test_the_disk_must_have_room_for_what_the_cache_lacks(hub: SmallHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(variable, raising=False)
    hub.sizes["model.safetensors"] = 10**18
    place = tmp_path / "cache" / "hub"
    needed = (
        rf"base_model org/name: 1000000\.0 TB are to be downloaded, and the disk of {place} has \d+\.\d [GM]B free\. Free space there, "
    )
    find_directory("org/name")
    with pytest.raises(ModelError, match=needed + "or set HF_HOME to a directory on a larger disk"):
        fetch_base("org/name", print)
    with pytest.raises(ModelError, match=needed):
        describe_download("org/name")
    assert "model.safetensors" not in fetched(hub)
    monkeypatch.setenv("HF_HUB_CACHE", str(place))
    with pytest.raises(ModelError, match="or set HF_HUB_CACHE to"):
        fetch_base("org/name", print)
    del hub.sizes["model.safetensors"]
    fetch_base("org/name", lambda line: None)
    hub.sizes["model.safetensors"] = 10**18  # of a newer commit with the same weights, which the cache has
    hub.add("org/name", {**FILES, "tokenizer_config.json": FILES["tokenizer_config.json"] + b" "})
    base_files.ask_commit.cache_clear()
    find_directory("org/name")
    fetch_base("org/name", lambda line: None)
    assert fetched(hub).count("model.safetensors") == 1


def test_check_fetches_no_weights_and_says_what_training_will(hub: SmallHub) -> None:
    download(weights=False)
    assert "model.safetensors" not in fetched(hub) and "tokenizer.json" in fetched(hub)
    size = len(FILES["model.safetensors"]) / 1e6
    line = describe_download("org/name")
    assert line is not None and line.startswith(f"training downloads {size:.1f} MB of org/name first, to ") and line.endswith(" free)")
    download()
    assert describe_download("org/name") is None


def test_a_cut_download_goes_on_where_it_was(hub: SmallHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 50_000)  # pieces of 10 MB are more than the whole file
    hub.cuts["model.safetensors"] = 100_000
    shown = download()
    assert "model.safetensors from 100000" in fetched(hub)
    assert (find_directory("org/name") / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert shown[-1].startswith("downloading org/name: 4.6 MB of 4.6 MB, ")


def test_a_download_that_fails_is_one_error(hub: SmallHub, monkeypatch: pytest.MonkeyPatch) -> None:
    find_directory("org/name")
    hub.gated.add("org/name")  # from now on
    with pytest.raises(ModelError, match=r"base_model org/name: cannot be downloaded: GatedRepoError: .* start again to go on"):
        fetch_base("org/name", lambda line: None)
    hub.gated.clear()

    def fill_up(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(huggingface_hub, "snapshot_download", fill_up)
        with pytest.raises(ModelError, match=r"are to be downloaded, and the disk of .* Free space there"):
            fetch_base("org/name", lambda line: None)
    shutil.rmtree(Path(constants.HF_HUB_CACHE).parent)
    find_directory("org/name")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # discard: nothing listens
    with pytest.raises(ModelError, match="its weights are not in the hub's cache, and the hub does not list its files"):
        fetch_base("org/name", lambda line: None)


def test_an_interrupt_ends_the_download(hub: SmallHub) -> None:
    find_directory("org/name")

    def interrupt(line: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch_base("org/name", interrupt)
    # where its hub has gone, the library's thread tries again for 23 s and closes the client that all threads share at each try
    downloads = [thread for thread in threading.enumerate() if thread.name == "download"]
    for thread in downloads:
        thread.join(600)
    assert not any(thread.is_alive() for thread in downloads)
