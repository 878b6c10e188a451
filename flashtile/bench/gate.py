"""Correctness before speed: a backend is timed only if its error is at most twice that of PyTorch in the same dtype.

Of fp8, of whose products PyTorch has none, that is naive attention in fp32 with weights rounded to e4m3.

Both errors are against float64. Key-value heads are independent of each other, so on large cases a few of them, spread over
the batch, are checked in full instead of all; and query rows go in blocks, so that no (seqlen_q, seqlen_k) tensor must fit.
Of packed sequences some are checked, each as a case of its own. Dropout draws differ between backends: they are checked
without it, and timed with it.
"""

from dataclasses import asdict, dataclass, replace

import torch

from flashtile.bench.peers import naive_attention, sequences

FACTOR = 2.0
# Scores checked a case, and scores in memory at once: by device type.
CHECKED_SCORES = {"cuda": 1 << 28, "cpu": 1 << 22}
BLOCK_SCORES = {"cuda": 1 << 26, "cpu": 1 << 21}
NAMES = ("out", "dq", "dk", "dv")
# Sequences of a packed case that are checked
MAX_SEQUENCES = 8
VANISHING_ULPS = 4


@dataclass(frozen=True)
class Error:
    """Of one tensor: the largest and the root mean square error against float64, of a backend and of PyTorch; the limit."""

    max_abs: float
    rmse: float
    torch_same_dtype: float
    limit: float
    passed: bool


@dataclass(frozen=True)
class Accuracy:
    """Result of a check: the error of each tensor, and how many of the case's (batch, key-value head) pairs were checked."""

    errors: dict[str, Error]
    checked: int
    of: int

    @property
    def passed(self) -> bool:
        return all(error.passed for error in self.errors.values())

    def to_json(self) -> dict:
        tensors = {name: asdict(error) for name, error in self.errors.items()}
        worst = max(self.errors.values(), key=lambda e: e.max_abs / e.limit if e.passed and e.limit else float("inf"))
        return {"max_abs": worst.max_abs, "torch_same_dtype": worst.torch_same_dtype, "passed": self.passed,
                "tensors": tensors, "checked_pairs": self.checked, "of_pairs": self.of}  # fmt: skip

    @classmethod
    def from_json(cls, found: dict) -> "Accuracy":
        # Not finite numbers are strings in a record.
        errors = {name: Error(**{key: float(x) if isinstance(x, str) else x for key, x in error.items()})
                  for name, error in found["tensors"].items()}  # fmt: skip
        return cls(errors, found["checked_pairs"], found["of_pairs"])


def describe_mismatch(accuracy: Accuracy) -> str:
    """Which tensors are wrong, and by how much."""
    wrong = [
        f"{name} max error {e.max_abs:.2e}, at most {e.limit:.2e} (PyTorch {e.torch_same_dtype:.2e})"
        for name, e in accuracy.errors.items()
        if not e.passed
    ]
    return "wrong result: " + "; ".join(wrong)


class Gate:
    """The reference of one case, computed once, against which every backend is checked.

    Args:
        case: BenchCase.
        inputs: q, k, v and dout (None without gradients) as `make_inputs` gives them.
    """

    def __init__(self, case, inputs):
        q, k, v, dout = inputs
        if case.dtype == "fp8":
            q, k, v = (x.float() for x in (q, k, v))
        self.device = q.device
        scores = case.group_size * case.seqlen_q * case.seqlen_k
        pairs = case.batch * case.num_heads_kv
        self.of, self.checked = pairs, max(1, min(pairs, CHECKED_SCORES[self.device.type] // scores))
        # Spread from the first to the last pair.
        chosen = [i * (pairs - 1) // max(1, self.checked - 1) for i in range(self.checked)]
        index = torch.tensor(chosen, device=self.device)
        self.batches, self.heads_kv = index // case.num_heads_kv, index % case.num_heads_kv
        self.heads_q = self.heads_kv[:, None] * case.group_size + torch.arange(case.group_size, device=self.device)
        self.case = replace(case, batch=self.checked, num_heads=case.group_size, num_heads_kv=1)
        self.alibi_slopes = case.alibi_slopes(self.device)[self.heads_q] if case.alibi else None
        sliced = (self._queries(q), self._keys(k), self._keys(v), None if dout is None else self._queries(dout))
        self.reference = self._attend(*(None if x is None else x.double() for x in sliced))
        same_dtype = self._attend(*sliced)
        self.vanishing = 0.0 if dout is None else self._vanishing(*sliced)
        self.torch_errors = [(a.double() - b).abs().max().item() for a, b in zip(same_dtype, self.reference, strict=True)]

    def check(self, out, grads=None) -> Accuracy:
        """Compare out (batch, seqlen_q, num_heads, head_dim_v) and, where given, (dq, dk, dv) of the whole case."""
        sliced = [self._queries(out)]
        if grads is not None:
            dq, dk, dv = grads
            sliced += [self._queries(dq), self._keys(dk), self._keys(dv)]
        errors = {}
        for name, got, expected, torch_error in zip(NAMES, sliced, self.reference, self.torch_errors, strict=False):
            difference = got.double() - expected
            # fp32: another order of summation may cost a few more units in the last place than PyTorch's.
            limit = FACTOR * torch_error + 2e-6 * expected.abs().max().item()
            if name in ("dq", "dk"):
                limit = max(limit, self.vanishing)
            max_abs, rmse = difference.abs().max().item(), difference.square().mean().sqrt().item()
            # A nan fails the comparison.
            errors[name] = Error(max_abs, rmse, torch_error, limit, max_abs <= limit)
        return Accuracy(errors, self.checked, self.of)

    def _vanishing(self, q, k, v, dout):
        """What rounding to fp32 may leave of dq and dk where they are 0 by cancellation: where a query sees one key.

        Their terms are below |dout| |v| times an element of k or q; torch may be exact there, and so no yardstick.
        """
        q, k, v, dout = (x.float() for x in (q, k, v, dout))
        largest = dout.norm(dim=-1).max() * v.norm(dim=-1).max() * torch.maximum(q.abs().max(), k.abs().max())
        return VANISHING_ULPS * torch.finfo(torch.float32).eps * self.case.head_dim**-0.5 * largest.item()

    def _queries(self, x):
        """(pairs, seqlen_q, group, dim) of a (batch, seqlen_q, num_heads, dim) tensor."""
        return x.detach()[self.batches[:, None], :, self.heads_q].transpose(1, 2)

    def _keys(self, x):
        """(pairs, seqlen_k, 1, dim) of a (batch, seqlen_k, num_heads_kv, dim) tensor."""
        return x.detach()[self.batches, :, self.heads_kv].unsqueeze(2)

    def _attend(self, q, k, v, dout):
        """[out] or [out, dq, dk, dv] by naive attention in the dtype of its arguments, block by block."""
        case, limit = self.case, BLOCK_SCORES[self.device.type]
        scores_a_row = case.group_size * case.seqlen_k
        rows_at_once = max(1, min(case.seqlen_q, limit // scores_a_row))
        pairs_at_once = max(1, limit // (scores_a_row * rows_at_once))
        results = []
        for pair in range(0, case.batch, pairs_at_once):
            pairs = slice(pair, pair + pairs_at_once)
            slopes = None if self.alibi_slopes is None else self.alibi_slopes[pairs]
            outs, dqs, dkv = [], [], None
            for row in range(0, case.seqlen_q, rows_at_once):
                rows = range(row, min(case.seqlen_q, row + rows_at_once))
                part = [q[pairs, rows.start : rows.stop], k[pairs], v[pairs]]
                if dout is None:
                    with torch.no_grad():
                        outs.append(naive_attention(*part, case, rows, slopes))
                    continue
                part = [x.detach().requires_grad_() for x in part]
                with torch.enable_grad():
                    out = naive_attention(*part, case, rows, slopes)
                dq, *dkv_part = torch.autograd.grad(out, part, dout[pairs, rows.start : rows.stop])
                outs.append(out.detach())
                dqs.append(dq)
                # Row blocks add up in at least fp32, as the sum over rows of one matrix product would.
                dkv_part = [x.to(torch.promote_types(x.dtype, torch.float32)) for x in dkv_part]
                dkv = dkv_part if dkv is None else [a + b for a, b in zip(dkv, dkv_part, strict=True)]
            results.append([torch.cat(outs, 1)] + ([torch.cat(dqs, 1), *dkv] if dkv else []))
        return [torch.cat(parts) for parts in zip(*results, strict=True)]


class PackedGate:
    """The same for a case with varlen: a Gate for each of some sequences, the longest and the shortest among them."""

    def __init__(self, case, inputs):
        self.of = case.batch * case.num_heads_kv
        parts = sorted(sequences(case), key=lambda part: part[1].seqlen_k)
        count = min(MAX_SEQUENCES, len(parts))
        chosen = [parts[i * (len(parts) - 1) // max(1, count - 1)] for i in range(count)][::-1]
        self.gates = [(rows, Gate(one, [self._one(x, rows) for x in inputs])) for rows, one in chosen]

    def check(self, out, grads=None) -> Accuracy:
        """Compare out (total tokens, num_heads, head_dim_v) and, where given, (dq, dk, dv).

        The largest error of a sequence against the largest limit: of a sequence of one token PyTorch's error is 0.
        """
        found = [one.check(self._one(out, rows), None if grads is None else [self._one(x, rows) for x in grads])
                 for rows, one in self.gates]  # fmt: skip
        errors = {}
        for name in found[0].errors:
            each = [accuracy.errors[name] for accuracy in found]
            largest = [max(getattr(error, what) for error in each) for what in ("max_abs", "rmse", "torch_same_dtype", "limit")]
            # A nan fails the comparison.
            errors[name] = Error(*largest, all(error.max_abs <= largest[-1] for error in each))
        return Accuracy(errors, sum(accuracy.checked for accuracy in found), self.of)

    @staticmethod
    def _one(x, rows):
        return None if x is None else x[rows].unsqueeze(0)


def make(case, inputs):
    """The Gate or PackedGate of a case, without its dropout."""
    case = replace(case, dropout=0.0)
    return (PackedGate if case.varlen else Gate)(case, inputs)
