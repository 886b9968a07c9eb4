"""What the ranks of a run must have in common: software and jobs file."""

from __future__ import annotations

from tlora.engine.messages import Hello
from tlora.errors import ConfigError
from tlora.store.model_card import library_versions
from tlora.version import __version__


def check_alike(hello: Hello, digest: str) -> None:
    """Raises ConfigError for a rank with other software or another jobs file than `digest`, which only a launcher can have started."""
    ours, what = library_versions() | {"tlora": __version__}, ""
    if differ := [name for name, version in ours.items() if hello.software.get(name) != version]:
        what = f"{differ[0]} {hello.software.get(differ[0])}, and rank 0 {ours[differ[0]]}. Install the same everywhere"
    elif hello.run_digest not in ("", digest):
        what = "another jobs file, or other options, than rank 0. Launch all with the same command"
    if what:
        raise ConfigError(f"rank {hello.rank} on {hello.host} has {what}")
