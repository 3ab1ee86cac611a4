"""Hugging Face repositories: from the local cache (engines), or downloaded into it (fetch)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from shadowsup.workers.errors import WorkerError
from shadowsup.workers.transformers.model_ref import HubLookup

_WANTED = ("*.json", "*.jinja", "*.safetensors", "tokenizer*", "*.model", "*.txt")
_PROGRESS_S = 2.0


def cached(repository: str, revision: str | None, gguf: str | None) -> Path:
    """Return the snapshot folder in the local cache; no network.

    Raises:
        WorkerError: (fatal) it is not there.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(repository, revision=revision, allow_patterns=_patterns(gguf), local_files_only=True))
    except (LocalEntryNotFoundError, OSError, ValueError) as error:
        at = f" at revision {revision}" if revision else ""
        raise WorkerError(
            f"model {repository}{at} is not in the local cache",
            f"fetch it first: python -m shadowsup.workers.transformers.fetch {repository}",
            fatal=True,
        ) from error


def download(progress: Callable[[str], None]) -> HubLookup:
    """Return a lookup that downloads what is missing and tells ``progress`` a line now and then.

    The lookup raises WorkerError: fatal where there is no such repository, revision or permission; not fatal for the network.
    """

    def lookup(repository: str, revision: str | None, gguf: str | None) -> Path:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import (
            GatedRepoError,
            HfHubHTTPError,
            LocalEntryNotFoundError,
            OfflineModeIsEnabled,
            RepositoryNotFoundError,
            RevisionNotFoundError,
        )

        def failed(message: str, hint: str, *, fatal: bool) -> WorkerError:
            return WorkerError(f"model {repository}: {message}", hint, fatal=fatal)

        try:
            with _told(repository, progress):
                return Path(snapshot_download(repository, revision=revision, allow_patterns=_patterns(gguf)))
        except GatedRepoError as error:
            raise failed("access is restricted", "ask for access and set HF_TOKEN", fatal=True) from error
        except RevisionNotFoundError as error:
            raise failed(f"there is no revision {revision}", "correct revision:", fatal=True) from error
        except RepositoryNotFoundError as error:
            raise failed("there is no such repository, or it is private", "correct the name, or set HF_TOKEN", fatal=True) from error
        except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
            raise failed(
                f"not in the cache, and the hub cannot be reached: {error}", "check the network, or copy it here", fatal=False
            ) from error
        except (HfHubHTTPError, OSError) as error:
            raise failed(f"the download failed: {error}", "try again", fatal=False) from error

    return lookup


def _patterns(gguf: str | None) -> list[str]:
    return [gguf] if gguf is not None else list(_WANTED)


@contextmanager
def _told(repository: str, progress: Callable[[str], None]) -> Iterator[None]:
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()  # bars redraw themselves, which is no use in a log
    blobs = Path(HF_HUB_CACHE) / f"models--{repository.replace('/', '--')}" / "blobs"
    over = threading.Event()

    def tell() -> None:
        while not over.wait(_PROGRESS_S):
            have = sum(file.stat().st_size for file in blobs.glob("*")) if blobs.is_dir() else 0
            progress(f"{repository}: {have / 2**20:.0f} MiB")

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield
    finally:
        over.set()
        teller.join()
