"""fp8 products: operands in the order that wgmma takes, and sums outside of it.

wgmma takes 8-bit operands in one order alone, what it contracts side by side. Keys and queries lie so, values do not: their
keys are to be side by side, so that they are turned on the way, to words of four keys, by a partition of its own. Weights,
which a thread has two by two, it is to have four by four: the keys of each 16 are taken in another order, 0 1 8 9, 2 3 10 11
and so on, in which a thread's two pairs are side by side, and so are values.

Sums of an fp8 product stay in the tensor core, which adds up 13 bits or so. So each step's p v is a product of its own, which
is added to acc in fp32: by multiply-adds, where acc of a product takes multiplications.

Source: Shah et al. 2024, FlashAttention-3, section 3.3; sums: DeepSeek-AI 2024, DeepSeek-V3, section 3.3.2, of linear layers.
"""

from flashtile.device import columns
from flashtile.device.compat import gl, gluon, reinterpret, warpgroup_mma, warpgroup_mma_wait

# Weights are 2**TOP at most: e4m3 reaches 448, and has fewer bits below 2**-6
TOP = gl.constexpr(8)
# Registers of a thread in which values are turned
_TURNED = gl.constexpr(16)
# The first bytes of four pairs to a word, and their second ones
_TURN = gl.constexpr(
    "{ .reg .b32 a, b; mov.b32 a, {$2, $3}; mov.b32 b, {$4, $5}; prmt.b32 $0, a, b, 0x6420; prmt.b32 $1, a, b, 0x7531; }"
)
# Four numbers to a word; those beyond its range become its largest
_NARROW = gl.constexpr(
    "{ .reg .b16 a, b; cvt.rn.satfinite.e4m3x2.f32 a, $2, $1; cvt.rn.satfinite.e4m3x2.f32 b, $4, $3; mov.b32 $0, {a, b}; }"
)


@gluon.constexpr_function
def _columns(live):
    """Columns of acc in one product, of those that count: a thread has few registers beside acc. By measurement."""
    return {128: 128, 256: 64}.get(live, 32)


@gluon.constexpr_function
def _together(acc_tensors, columns, first):
    """How many products are under way together, from number first on: of 32 columns three, if there are as many."""
    return min(3 if columns == 32 else 1, acc_tensors - first)


@gluon.constexpr_function
def _pairs_layout(keys, pairs, warps):
    """Of a tile of (keys, pairs of columns), as matrix loads give it that turn pairs: a thread has 0, 1, 8, 9 of the keys."""
    of_warps = warps.bit_length() - 1
    rest = [[0, 1 << bit] for bit in range(3, pairs.bit_length() - 1)]
    rest += [[1 << bit, 0] for bit in range(4, keys.bit_length() - 1)]
    regs = [[1, 0], [8, 0], *rest[of_warps:]]
    return gl.DistributedLinearLayout(regs, [[2, 0], [4, 0], [0, 1], [0, 2], [0, 4]], rest[:of_warps], [], [keys, pairs])


@gluon.jit
def _as_numbers(tile, DTYPE: gl.constexpr):
    """tile of fp8 as one of wider numbers, which have several columns."""
    BITS: gl.constexpr = DTYPE.primitive_bitwidth
    layout: gl.constexpr = gl.NVMMASharedLayout(tile.layout.swizzle_byte_width, BITS, 2)
    return reinterpret(tile, DTYPE, [tile.shape[0], tile.shape[1] * 8 // BITS], layout)


@gluon.jit
def _fours(x):
    """The four tensors of (..., 2, 2) numbers; the last dim comes first."""
    even, odd = x.split()
    first, third = even.split()
    second, fourth = odd.split()
    return first, second, third, fourth


@gluon.jit
def allocate_turned(COUNT: gl.constexpr, KEYS: gl.constexpr, DIM: gl.constexpr):
    """Shared memory for tiles of values (DIM, KEYS), keys side by side."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([DIM, KEYS], gl.float8e4nv)
    return gl.allocate_shared_memory(gl.float8e4nv, [COUNT, DIM, KEYS], layout)


@gluon.jit
def turn(tile, turned, WARPS: gl.constexpr):
    """Values (KEYS, DIM) to a tile (DIM, KEYS)."""
    KEYS: gl.constexpr = tile.shape[0]
    DIM: gl.constexpr = tile.shape[1]
    PAIRS: gl.constexpr = min(DIM, _TURNED * 4 * 32 * WARPS // KEYS) // 2
    layout: gl.constexpr = _pairs_layout(KEYS, PAIRS, WARPS)
    for i in gl.static_range(DIM // 2 // PAIRS):
        pairs = _as_numbers(tile, gl.int16).slice(i * PAIRS, PAIRS, dim=1).load(layout)
        _as_numbers(turned, gl.int32).slice(2 * i * PAIRS, 2 * PAIRS, dim=0).store(_turned(pairs))


@gluon.jit
def _turned(pairs):
    """Words of four keys (DIM, KEYS / 4) of (KEYS, pairs of columns)."""
    KEYS: gl.constexpr = pairs.shape[0]
    PAIRS: gl.constexpr = pairs.shape[1]
    # Of a key's bits 0 and 3 the word's place, of the others the word
    a, b, c, d = _fours(pairs.reshape([KEYS // 16, 2, 4, 2, PAIRS]).permute((0, 2, 4, 1, 3)))
    left, right = gl.inline_asm_elementwise(_TURN, "=r,=r,h,h,h,h", [a, b, c, d], dtype=(gl.int32, gl.int32), is_pure=True,
                                            pack=1)  # fmt: skip
    return gl.join(left, right).permute((2, 3, 0, 1)).reshape([2 * PAIRS, KEYS // 4])


@gluon.jit
def weights(p):
    """Weights in words of four: what a loop carries as bytes it would take apart and put together in every step."""
    # Of each 16 columns those that `_TURN` puts together
    a, b, c, d = _fours(p.reshape([p.shape[0], p.shape[1] // 16, 2, 4, 2]).permute((0, 1, 3, 2, 4)))
    return gl.inline_asm_elementwise(_NARROW, "=r,r,r,r,r", [a, b, c, d], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _operand(words, acc):
    """`weights` as left operand of a product that acc takes: keys in the order of `turn`, none of which moves."""
    ROWS: gl.constexpr = words.shape[0]
    # In halves, which the compiler knows how to take for the whole
    low, high = words.to(gl.int16), (words >> 16).to(gl.int16)
    low = gl.join(low.to(gl.int8), (low >> 8).to(gl.int8))
    high = gl.join(high.to(gl.int8), (high >> 8).to(gl.int8))
    p = gl.join(low, high).permute((0, 1, 2, 4, 3)).reshape([ROWS, 16 * words.shape[1]])
    return gl.convert_layout(p.to(gl.float8e4nv, bitcast=True), gl.DotOperandLayout(0, acc.type.layout, 4))


@gluon.jit
def accumulators(ROWS: gl.constexpr, LIVE: gl.constexpr):
    """Zeros of ROWS rows and the columns that count, in tensors of as many columns as a product has."""
    COLUMNS: gl.constexpr = _columns(LIVE)
    zeros = gl.zeros([ROWS, COLUMNS], gl.float32, columns.layout_of(COLUMNS, K=32))
    acc = ()
    for _ in gl.static_range(LIVE // COLUMNS):
        acc = acc + (zeros,)
    return acc


@gluon.jit
def start(words, turned, acc, NUMBER: gl.constexpr):
    """Start p v of the columns of one of acc's tensors."""
    ROWS: gl.constexpr = words.shape[0]
    COLUMNS: gl.constexpr = acc[0].shape[1]
    layout: gl.constexpr = acc[0].type.layout
    v = turned.slice(NUMBER * COLUMNS, COLUMNS, dim=0).permute((1, 0))
    nothing = gl.zeros([ROWS, COLUMNS], gl.float32, layout)
    return warpgroup_mma(_operand(words, acc[0]), v, nothing, use_acc=False, is_async=True)


@gluon.jit
def start_some(words, turned, acc, FIRST: gl.constexpr):
    """Start p v of acc's tensors from number FIRST on, of as many as can be under way."""
    products = ()
    for i in gl.static_range(_together(len(acc), acc[0].shape[1], FIRST)):
        products = products + (start(words, turned, acc, FIRST + i),)
    return products


@gluon.jit
def add(acc, correction, products, FIRST: gl.constexpr):
    """acc, of which the tensors from number FIRST on are multiplied with the correction, and their products added."""
    added = ()
    for i in gl.static_range(len(acc)):
        if i >= FIRST and i < FIRST + len(products):
            product = products[i - FIRST]
            added = added + (acc[i] * columns.per_row(correction, product) + product,)
        else:
            added = added + (acc[i],)
    return added


@gluon.jit
def add_rest(acc, correction, products, words, turned, FIRST: gl.constexpr):
    """`add` for the tensors from number FIRST on, of which the first products are under way."""
    if len(products) == 1:
        done = (warpgroup_mma_wait(0, deps=[products[0]]),)
    else:
        done = warpgroup_mma_wait(0, deps=products)
    acc = add(acc, correction, done, FIRST)
    NEXT: gl.constexpr = FIRST + len(products)
    if NEXT < len(acc):
        return add_rest(acc, correction, start_some(words, turned, acc, NEXT), words, turned, NEXT)
    else:
        return acc
