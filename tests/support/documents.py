"""Documents of random tokens in a list, and rows of one document alone, for the measures' slow references."""

import torch

from fathom.model.rows import PackedRows, pack_documents


class Listed:
    """Documents that are the list itself."""

    def __init__(self, documents: list[tuple[list[int], list[bool]]]) -> None:
        self.documents = documents

    def __len__(self) -> int:
        return len(self.documents)

    def document(self, number: int) -> tuple[list[int], list[bool]]:
        return self.documents[number]

    def rows(self, number: int) -> PackedRows:
        return pack_documents([self.documents[number]], [number])


def random_documents(lengths: list[int], seed: int = 0, vocab: int = 97) -> Listed:
    """The second half of each is supervised, with a hole in it."""
    generator = torch.Generator().manual_seed(seed)
    documents = []
    for length in lengths:
        ids = torch.randint(vocab, (length,), generator=generator).tolist()
        documents.append((ids, [2 * place >= length and place != length - 2 for place in range(length)]))
    return Listed(documents)
