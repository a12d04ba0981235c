"""Depth labels of a reference model: which tokens of the data it gets wrong, or finds hardest (TaH, methods 2.3)."""

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fathom.config.schema import MethodConfig
from fathom.errors import ConfigError, ModelError
from fathom.model.folder import load_model, load_tokenizer
from fathom.model.hub import resolve_base
from fathom.model.rows import PackedRows, pack_documents
from fathom.model.vocabulary import HeadOutput

FORWARD_TOKENS, HEAD_ROWS = 4096, 512
"""Tokens of one forward, and rows whose logits exist at once."""

Document = tuple[list[int], list[bool]]


class ReferenceModel:
    """A pretrained model that says how deep each row should go; read from disk when it is first asked.

    Args:
        spec: what ``model.base`` takes. Of a looped model's folder the base part labels.
        tokenizer: of the data's token ids.

    Raises:
        ModelError: no such model, or it cannot be read.
        ConfigError: it has another tokenizer.
    """

    def __init__(self, spec: str, tokenizer: Any) -> None:
        try:
            self.folder = resolve_base(spec)
        except ModelError as error:
            raise ModelError(error.message.replace("model.base", "data.label_model"), error.remedy) from error
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if load_tokenizer(self.folder).get_vocab() != tokenizer.get_vocab():
            raise ConfigError(
                f"data.label_model: {spec} has another tokenizer than model.base, its predictions are of other tokens",
                "name a model of the same family as the base, or the base itself",
            )

    @property
    def digest(self) -> str:
        """sha256 (hex) of its weights."""
        digest = hashlib.sha256()
        for path in sorted(Path(self.folder).glob("*.safetensors")):
            with path.open("rb") as file:
                while block := file.read(1 << 20):
                    digest.update(block)
        return digest.hexdigest()

    @torch.no_grad()
    def depths(self, documents: Sequence[Document]) -> list[list[int]]:
        """Per document and row 2 where the row is supervised and the likeliest next token is not the target, else 1.

        The documents are those of one forward: each sees itself alone, as in training.
        """
        rows, head = self._read(documents, 1)
        wrong = rows.supervised & (head.top_ids[:, 0] != rows.targets)
        return [part.tolist() for part in (1 + wrong.long()).split([len(ids) for ids, _ in documents])]

    @torch.no_grad()
    def losses(self, documents: Sequence[Document]) -> list[list[float]]:
        """Per document and row -log q of the target; NaN where the row is not supervised."""
        rows, head = self._read(documents, 0)
        loss = torch.where(rows.supervised, -head.log_prob, torch.nan)
        return [part.tolist() for part in loss.split([len(ids) for ids, _ in documents])]

    def _read(self, documents: Sequence[Document], k: int) -> tuple[PackedRows, HeadOutput]:
        rows = pack_documents(documents).to(self.device)
        hidden = self._model(rows).depths[0].hidden
        return rows, self._model.read_out(hidden, rows.targets, k, HEAD_ROWS)

    @property
    def _model(self) -> Any:
        if not hasattr(self, "_loaded"):
            self._loaded = load_model(self.folder, MethodConfig(preset="standard")).to(self.device)
        return self._loaded


def quantile_depths(losses: Sequence[Sequence[float]], shares: Sequence[float]) -> list[list[int]]:
    """Depths of rows by the quantile of their loss: the easiest share goes to depth 1, the next to depth 2, and so on.

    Row i of n in order of loss goes to the depth m with b_(m-1) <= i < b_m, where b_m is n (s_1 + ... + s_m), rounded;
    of equal losses the earlier row counts as the easier.

    Args:
        losses: per document and row, from :meth:`ReferenceModel.losses`; rows without one go to depth 1.
        shares: s_1, ..., s_M, that sum to 1 (published for M = 3: 0.88, 0.06, 0.06).
    """
    flat = np.concatenate([np.asarray(part, dtype=np.float64) for part in losses])
    depths = np.ones(len(flat), dtype=np.int64)
    learned = np.flatnonzero(~np.isnan(flat))
    order = learned[np.argsort(flat[learned], kind="stable")]
    bounds = np.rint(np.cumsum(shares[:-1]) * len(order))
    depths[order] = 1 + np.searchsorted(bounds, np.arange(len(order)), side="right")
    return [part.tolist() for part in np.split(depths, np.cumsum([len(part) for part in losses])[:-1])]


def forwards(documents: Sequence[Document]) -> Iterator[Sequence[Document]]:
    """The documents in order, as many at a time as make a forward."""
    begin, tokens = 0, 0
    for number, (ids, _) in enumerate(documents):
        if number > begin and tokens + len(ids) > FORWARD_TOKENS:
            yield documents[begin:number]
            begin, tokens = number, 0
        tokens += len(ids)
    if documents:
        yield documents[begin:]
