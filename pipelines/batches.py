"""Training examples: token ids held compactly, in an order that is a function of (seed, epoch, step)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from guidance.errors import InputError
from pipelines.artifacts import Artifact
from pipelines.files import open_parquet
from pipelines.manifest import ArtifactDamaged


@dataclass(frozen=True)
class Examples:
    """The sequences of one split: all ids in one array, with the bounds of each sequence.

    Two bytes a token for vocabularies below 65,536, else four; eight more with ``places``, (tokens, 2): document and
    sentence, negative at special tokens.
    """

    ids: np.ndarray
    bounds: np.ndarray
    places: np.ndarray | None = None

    @classmethod
    def read(cls, artifact: Artifact, split: str, vocab_size: int, *, places: bool = False) -> Examples:
        """The ``id`` column of a split of a sequences artifact; no sequences if the split has no file.

        Args:
            places: read document and sentence of each token too, for `segments`.

        Raises:
            ArtifactDamaged: the file is no table; or the column is missing, of another type, has nulls or empty lists, or an id outside the
                vocabulary.
        """
        dtype = np.uint16 if vocab_size <= 1 << 16 else np.uint32
        name = f"{split}.parquet"
        if name not in artifact.files:
            return cls(np.zeros(0, dtype), np.zeros(1, np.int64))
        ids, lengths, found_places = [np.zeros(0, dtype)], [np.zeros(0, np.int64)], [np.zeros((0, 2), np.int32)]
        wanted = ["id", "document", "sentence"] if places else ["id"]
        with artifact.open(name) as file:
            try:
                table = open_parquet(file)
                found = [field.type for field in table.schema_arrow if field.name == "id"]
                if len(found) != 1 or not pa.types.is_list(found[0]) or found[0].value_type != pa.int32():
                    raise ArtifactDamaged(
                        f"{artifact.path / name}: column id is {' and '.join(map(str, found)) or 'missing'}, not list<int32>"
                    )
                for batch in table.iter_batches(columns=wanted):
                    column = batch.column("id")
                    values = column.flatten()
                    sizes = np.diff(column.offsets.to_numpy())
                    if column.null_count or values.null_count or (sizes == 0).any():
                        raise ArtifactDamaged(f"{artifact.path / name}: column id has nulls or empty sequences")
                    row_ids = values.to_numpy()
                    if len(row_ids) and not 0 <= row_ids.min() <= row_ids.max() < vocab_size:
                        raise ArtifactDamaged(
                            f"{artifact.path / name}: a token id is outside the vocabulary of {vocab_size}"
                        )
                    ids.append(row_ids.astype(dtype))
                    lengths.append(sizes)
                    if places:
                        pair = [batch.column(n).flatten().to_numpy() for n in wanted[1:]]
                        found_places.append(np.stack(pair, axis=1).astype(np.int32))
            except (pa.ArrowException, KeyError, ValueError) as error:
                raise ArtifactDamaged(f"{artifact.path / name}: unreadable ({str(error)[:160]!r})") from error
        bounds = np.concatenate([[0], np.cumsum(np.concatenate(lengths))])
        return cls(np.concatenate(ids), bounds, np.concatenate(found_places) if places else None)

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def __getitem__(self, index: int) -> np.ndarray:
        return self.ids[self.bounds[index] : self.bounds[index + 1]].astype(np.int64)

    def segments(self, index: int) -> np.ndarray:
        """The number of its sentence, from 0, for each token of a sequence; special tokens go with the sentence before
        them, the first one with the one after it."""
        assert self.places is not None
        places = self.places[self.bounds[index] : self.bounds[index + 1]]
        ordinary = places[:, 0] >= 0
        before = np.maximum.accumulate(np.where(ordinary, np.arange(len(places)), 0))
        filled = places[np.maximum(before, ordinary.argmax())]
        return np.concatenate([[0], np.cumsum((filled[1:] != filled[:-1]).any(1))])


class Order:
    """Which examples a step sees: every epoch is a permutation of all, and batches run on across epochs."""

    def __init__(self, num_examples: int, batch_size: int, seed: int) -> None:
        if not num_examples:
            raise InputError("there are no training sequences")
        self.num_examples, self.batch_size, self.seed = num_examples, batch_size, seed
        self._epoch, self._permutation = -1, np.zeros(0, np.int64)

    def batch(self, step: int) -> list[tuple[int, int]]:
        """(epoch, example) for each place of the batch of a step."""
        places = range(step * self.batch_size, (step + 1) * self.batch_size)
        return [(p // self.num_examples, self._example(p)) for p in places]

    def _example(self, place: int) -> int:
        epoch, within = divmod(place, self.num_examples)
        if epoch != self._epoch:
            random = np.random.Generator(np.random.Philox(key=[self.seed, epoch]))
            self._epoch, self._permutation = epoch, random.permutation(self.num_examples)
        return int(self._permutation[within])


def pad(rows: list[np.ndarray], value: int, length: int, device: Any = None) -> Tensor:
    """Rows of different lengths as one (B, T) tensor, filled up on the right."""
    filled = np.full((len(rows), length), value, np.int64)
    for place, row in enumerate(rows):
        filled[place, : len(row)] = row
    return torch.from_numpy(filled).to(device, non_blocking=True)


def shares(items: list[Any], parts: int) -> list[list[Any]]:
    """A list cut into ``parts`` runs whose lengths differ by one at most."""
    size, extra = divmod(len(items), parts)
    starts = [part * size + min(part, extra) for part in range(parts + 1)]
    return [items[starts[part] : starts[part + 1]] for part in range(parts)]
