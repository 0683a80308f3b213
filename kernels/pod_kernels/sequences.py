"""Where the sequences lie in the rows, as the fast backends want it: padding and several documents in a row.

Both take `lengths` and `document_ids` as `pod_kernels.shared_score_attention` does.
"""

import torch
from torch import Tensor

Group = tuple[Tensor, int, int]  # the rows [n] and the columns [start, stop) of equally placed sequences


def sequence_groups(q: Tensor, lengths: Tensor | None, document_ids: Tensor | None) -> list[Group] | None:
    """The sequences of queries [B, H, T, D], those of the same columns together; None when every row is one sequence.

    Reads `lengths` or `document_ids` on the host.

    Raises:
        ValueError: lengths outside 0..T, or the ids of a row decrease.
    """
    if q.shape[0] == 0 or q.shape[2] == 0:
        return []
    if document_ids is not None:
        return _rows_by_document(document_ids)
    return None if lengths is None else _rows_by_length(lengths, q.shape[2])


def _rows_by_length(lengths: Tensor, total: int) -> list[Group] | None:
    values = lengths.tolist()
    for row, value in enumerate(values):
        if not 0 <= value <= total:
            raise ValueError(f"lengths must lie in 0..{total}, the number of columns; row {row} has {value}")
    if all(value == total for value in values):
        return None
    rows: dict[int, list[int]] = {}
    for row, value in enumerate(values):
        rows.setdefault(value, []).append(row)
    return [(torch.tensor(members), total - value, total) for value, members in sorted(rows.items()) if value > 0]


def _rows_by_document(document_ids: Tensor) -> list[Group] | None:
    batch, length = document_ids.shape
    changes = document_ids[:, 1:] != document_ids[:, :-1]
    starts = torch.nn.functional.pad(changes, (1, 0), value=True).nonzero()
    found = torch.cat([starts, document_ids[starts[:, 0], starts[:, 1]][:, None]], dim=1).tolist()  # one read for all
    places: dict[tuple[int, int], list[int]] = {}
    last = {}
    for (row, start, document), following in zip(found, [*found[1:], [-1, 0, 0]], strict=True):
        stop = following[1] if following[0] == row else length
        if document < 0:
            continue
        if document < last.get(row, 0):
            raise ValueError(f"document_ids must not decrease: row {row} has {document} after {last[row]}")
        last[row] = document
        places.setdefault((start, stop), []).append(row)
    if list(places) == [(0, length)] and len(places[0, length]) == batch:
        return None
    return [(torch.tensor(rows), start, stop) for (start, stop), rows in places.items()]


def sequence_spans(
    batch: int, length: int, lengths: Tensor | None, document_ids: Tensor | None, device: torch.device
) -> Tensor | None:
    """Where each token's sequence begins and ends, without a read on the host.

    Lengths outside 0..T are taken as the nearest inside; each run of one id >= 0 is a document.

    Returns:
        [2, B, T] int32: the first column of the sequence, T at padding; the column after its last, 0 at padding. None
        when every row is one sequence.
    """
    if lengths is None and document_ids is None:
        return None
    column = torch.arange(length, device=device).expand(batch, length)
    if lengths is not None:
        starts = (length - lengths.to(device=device, dtype=torch.long).clamp(0, length))[:, None].expand(batch, length)
        stops, is_padding = torch.full_like(column, length), column < starts
    else:
        document_ids = document_ids.to(device)
        changes = document_ids[:, 1:] != document_ids[:, :-1]
        begins = torch.nn.functional.pad(changes, (1, 0), value=True)
        ends = torch.nn.functional.pad(changes, (0, 1), value=True)
        starts = torch.where(begins, column, 0).cummax(dim=1).values
        stops = torch.where(ends, column + 1, length).flip(1).cummin(dim=1).values.flip(1)
        is_padding = document_ids < 0
    spans = torch.stack([starts.masked_fill(is_padding, length), stops.masked_fill(is_padding, 0)])
    return spans.to(torch.int32)
