"""What makes a folder an artifact: a manifest, written last, that names every file with its sha256.

A folder without `manifest.json` is unfinished and is refused by name. The manifest holds only what inputs, params and
code decide, so a second run writes the same bytes; clocks, hosts and versions go to the run record.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlpipe.errors import ArtifactError

MANIFEST = "manifest.json"
RESUME = ".resume"
"""Folder in an unfinished output: what its step keeps there to go on from after a kill. No part of the artifact."""
SCHEMA_VERSION = 1


def files_of(folder: Path) -> Iterator[Path]:
    """Every file of an artifact but its manifest, sorted by relative name."""
    found = (path for path in folder.rglob("*") if path.is_file() and path != folder / MANIFEST and not path.is_relative_to(folder / RESUME))
    return iter(sorted(found, key=lambda path: path.relative_to(folder).as_posix()))


def sha256(path: Path) -> str:
    """Hex sha256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fingerprint_of(hashes: dict[str, str]) -> str:
    """One sha256 over the sorted relative names and content hashes."""
    lines = "".join(f"{name}\0{hashes[name]}\n" for name in sorted(hashes))
    return hashlib.sha256(lines.encode()).hexdigest()


def fingerprint(path: Path) -> str:
    """Sha256 over the sorted relative names and contents of an artifact's files, the manifest left out.

    The files are read, not the manifest believed.

    Raises:
        ArtifactError: the folder has no manifest.
    """
    read_manifest(path)
    return folder_fingerprint(path)


def folder_fingerprint(path: Path) -> str:
    """The fingerprint of any folder's content, finished or not: for a user's own model folder."""
    return fingerprint_of({file.relative_to(path).as_posix(): sha256(file) for file in files_of(path)})


def content_key(path: Path) -> str:
    """What a step's input contributes to its key: a file's sha256, or an artifact's recorded fingerprint."""
    if path.is_file():
        return sha256(path)
    return str(read_manifest(path)["fingerprint"])


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a finished artifact.

    Raises:
        ArtifactError: the path is missing, is not a folder, has no manifest, or has one of another schema version.
    """
    if not path.is_dir():
        raise ArtifactError("artifact not found", got=str(path), accepted="a folder with manifest.json", do="run the step that writes it")
    file = path / MANIFEST
    if not file.is_file():
        raise ArtifactError(
            f"{path} has no {MANIFEST}: it is unfinished",
            got=", ".join(sorted(os.listdir(path))[:5]) or "an empty folder",
            do="run the step that writes it again",
        )
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ArtifactError(f"{file} is damaged", got=str(error), do="remove the folder and run the step again") from error
    if not isinstance(manifest, dict) or not isinstance(manifest.get("files"), dict) or manifest.get("schema_version") != SCHEMA_VERSION:
        got = manifest.get("schema_version") if isinstance(manifest, dict) else type(manifest).__name__
        raise ArtifactError(f"{file} has another schema version", got=got, accepted=SCHEMA_VERSION, do="run the step again with this version")
    return manifest


def outcome(path: Path) -> str | None:
    """The outcome recorded with an artifact, see `rlpipe.step.Report`."""
    value = read_manifest(path).get("outcome")
    return None if value is None else str(value)


def write_manifest(folder: Path, **facts: Any) -> dict[str, Any]:
    """Write the manifest of `folder`, after all its files are on disk; returns it."""
    files: dict[str, dict[str, Any]] = {}
    for path in files_of(folder):
        sync(path)
        files[path.relative_to(folder).as_posix()] = {"sha256": sha256(path), "bytes": path.stat().st_size}
    manifest = {
        "schema_version": SCHEMA_VERSION,
        "fingerprint": fingerprint_of({name: entry["sha256"] for name, entry in files.items()}),
        "files": files,
        **facts,
    }
    write_text(folder / MANIFEST, json.dumps(manifest, indent=1, sort_keys=True) + "\n")
    return manifest


def verify(path: Path) -> dict[str, Any]:
    """The manifest, after every file was found with the sha256 it names.

    Raises:
        ArtifactError: names the first file that is missing, added or changed.
    """
    manifest = read_manifest(path)
    present = {file.relative_to(path).as_posix(): file for file in files_of(path)}
    for name in sorted(manifest["files"].keys() | present.keys()):
        check_file(path, name, manifest)
    return manifest


def check_sizes(path: Path) -> None:
    """Refuse an artifact of which a file is missing or of another size than its manifest says, without reading any.

    Raises:
        ArtifactError: names the first such file.
    """
    manifest = read_manifest(path)
    for name in sorted(manifest["files"]):
        _check_size(path, name, manifest)


def check_file(path: Path, name: str, manifest: dict[str, Any]) -> None:
    """Refuse a file of an artifact that is missing, unknown to the manifest, or has another content."""
    _check_size(path, name, manifest)
    if sha256(path / name) != manifest["files"][name]["sha256"]:
        raise ArtifactError(f"{path / name} is damaged", got="another sha256 than the manifest's", do="restore it with `dvc checkout` or run the step again")


def _check_size(path: Path, name: str, manifest: dict[str, Any]) -> None:
    expected = manifest["files"].get(name)
    file = path / name
    if expected is None or not file.is_file():
        problem = "is not in the manifest" if expected is None else "is missing"
        raise ArtifactError(f"{file} {problem}", do="restore the artifact with `dvc checkout` or run the step again")
    size = file.stat().st_size
    if size != expected["bytes"]:
        raise ArtifactError(
            f"{file} is damaged", got=f"{size} bytes", accepted=f"{expected['bytes']} bytes", do="restore it with `dvc checkout` or run the step again"
        )


def write_text(path: Path, text: str) -> None:
    """Write a file that is either whole or absent."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    sync(partial)
    os.replace(partial, path)


def write_json(path: Path, content: Any) -> None:
    """Write JSON that is either whole or absent, with sorted keys."""
    write_text(path, json.dumps(content, indent=1, sort_keys=True, allow_nan=False) + "\n")


def sync(path: Path) -> None:
    """Flush a file to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def partial_path(path: Path) -> Path:
    """Where an output is made until it is whole: beside it, so that renaming is one operation of the file system."""
    return path.with_name(f".{path.name}.partial")


def move(source: Path, target: Path) -> None:
    """Put a folder in another's place, in one operation of the file system where that place is free."""
    shutil.rmtree(target, ignore_errors=True)
    os.replace(source, target)


def publish(partial: Path, path: Path) -> None:
    """Put a finished folder or file in its place; a kill in between leaves the place empty, never half-filled."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    os.replace(partial, path)


def copy_contents(source: Path, target: Path) -> None:
    """Hard-link (or copy, across file systems) every file of an artifact but its manifest."""
    for file in files_of(source):
        place = target / file.relative_to(source)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.unlink(missing_ok=True)
        try:
            os.link(file.resolve(), place)
        except OSError as error:
            if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP):
                raise
            shutil.copyfile(file, place)
