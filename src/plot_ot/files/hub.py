"""The Hugging Face hub: files are put there and fetched from there through its own client, and failures are told."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from plot_ot.errors import PlotError

REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
"""The id of a repository: its owner and its name."""


def upload(repo_id: str, files: Mapping[str, bytes], message: str, *, private: bool, token: str | None) -> str:
    """Put files into a repository of models, in one commit; the repository is made if it is not there. Its address."""
    require_id(repo_id)
    hub = _client()
    with _told(
        f"'{repo_id}' could not be written",
        "Check the network, log in with `hf auth login`, or give a `token` that may write.",
    ):
        api = hub.HfApi(token=token)
        address = api.create_repo(repo_id, private=private, exist_ok=True)
        added = [hub.CommitOperationAdd(path_in_repo=name, path_or_fileobj=data) for name, data in files.items()]
        api.create_commit(repo_id, added, commit_message=message)
    return str(address)


def download(
    repo_id: str, name: str, *, kind: str = "model", revision: str | None = None, token: str | None = None
) -> Path:
    """The path of one file of a repository in the hub's own cache, fetched once."""
    require_id(repo_id)
    hub = _client()
    with _told(f"'{repo_id}' has no {name} that can be fetched", "Check the name, the revision and the network."):
        return Path(hub.hf_hub_download(repo_id, name, repo_type=kind, revision=revision, token=token))


def listed(repo_id: str, kind: str = "dataset") -> Sequence[str]:
    """The names of the files in a repository."""
    require_id(repo_id)
    hub = _client()
    with _told(f"'{repo_id}' is neither a local file nor a hub data set", "Check the name and the network."):
        return sorted(hub.list_repo_files(repo_id, repo_type=kind))


def require_id(repo_id: str) -> None:
    """Refuse what cannot be the id of a repository."""
    if not REPOSITORY.fullmatch(repo_id) or ".." in repo_id:
        raise PlotError(f"A repository on the hub is named owner/name, such as ann/carry-handle; found {repo_id!r}.")


def _client() -> Any:
    try:
        import huggingface_hub
    except ImportError:
        raise PlotError("The hub needs the `hf` extra: pip install 'plot-ot[hf]'.") from None
    return huggingface_hub


@contextmanager
def _told(what: str, advice: str) -> Iterator[None]:
    """A missing network, name or permission fails in many ways: say each in one line."""
    try:
        yield
    except PlotError:
        raise
    except Exception as e:
        reason = next((line.strip() for line in str(e).splitlines() if line.strip()), type(e).__name__)
        raise PlotError(f"{what}: {reason}{'' if reason.endswith(('.', '!', '?')) else '.'} {advice}") from e
