"""Products over the live columns of a tile: TMA fills the rest of its block with zeros, see `tiles.live_columns`.

A tile has BLOCK columns in shared memory, a power of two, and LIVE of them count: all, or those of its left half and a power of
two of its right half. Products with the tile as right operand then have two accumulators: a tuple of one or two tensors. Not
where BLOCK is 128: accumulators of 64 and of 32 columns are no faster than one of 128 that is zeros from 96 on (H200, 4 x 4096
tokens of 16 heads of dim 96, single runs: forward 739 and 734 us, dv and dk in the backward 2317 and 2017 us).
"""

from flashtile.device.compat import gl, gluon, warpgroup_mma, warpgroup_mma_wait


def _rescaling(count):
    """PTX that multiplies `count` registers of acc by their rows' corrections, unless these are 1 in the whole warp.

    acc is in $0 and on, and tied to the outputs; corrections follow, one for each register, of two rows in turn.
    """
    first, second = f"${2 * count}", f"${2 * count + 2}"
    products = " ".join(f"mul.f32 ${i}, ${i}, {second if i & 2 else first};" for i in range(count))
    return (
        f"{{ .reg .pred q; setp.neu.f32 q, {first}, 0f3F800000; setp.neu.or.f32 q, {second}, 0f3F800000, q; "
        f"vote.sync.any.pred q, q, 0xffffffff; @!q bra DONE; {products} DONE: }}"
    )


def _rescaling_constraints(count):
    return ",".join(["=f"] * count + [str(i) for i in range(count)] + ["f"] * count)


def _hiding(count, both):
    """PTX that puts -inf in those of `count` registers of scores whose columns lie from a row's end on, or before its first.

    Scores are in $0 and on, and tied to the outputs; ends follow, one for each register, of two rows in turn, and with both
    firsts. Of each 8 columns a thread has two: which, its lane says, and all else is constants.
    """
    lines = [".reg .pred q; .reg .s32 lane, end<2>, first<2>;"]
    lines.append("mov.u32 lane, %laneid; and.b32 lane, lane, 3; shl.b32 lane, lane, 1;")
    for row in range(2):
        lines.append(f"sub.s32 end{row}, ${2 * count + 2 * row}, lane;")
        if both:
            lines.append(f"sub.s32 first{row}, ${3 * count + 2 * row}, lane;")
    for i in range(count):
        row, column = i >> 1 & 1, 8 * (i >> 2) + (i & 1)
        lines.append(f"setp.gt.s32 q, end{row}, {column};")
        if both:
            lines.append(f"setp.le.and.s32 q, first{row}, {column}, q;")
        lines.append(f"selp.f32 ${i}, ${i}, 0fFF800000, q;")
    return f"{{ {' '.join(lines)} }}"


def _hiding_constraints(count, both):
    return ",".join(["=f"] * count + [str(i) for i in range(count)] + ["r"] * count * (1 + both))


# By columns of scores, and whether rows have firsts too
_HIDE = gl.constexpr({(n, both): _hiding(n // 2, both) for n in (64, 128) for both in (False, True)})
_HIDE_CONSTRAINTS = gl.constexpr({(n, both): _hiding_constraints(n // 2, both) for n in (64, 128) for both in (False, True)})
# By columns of acc, of which a thread has half as many registers
_RESCALE = gl.constexpr({n: _rescaling(n // 2) for n in (16, 32, 64, 128, 256)})
_RESCALE_CONSTRAINTS = gl.constexpr({n: _rescaling_constraints(n // 2) for n in (16, 32, 64, 128, 256)})


@gluon.jit
def contract(a, b, acc, LIVE: gl.constexpr, USE_ACC: gl.constexpr = True):
    """Start acc + a bᵀ of two tiles in shared memory; without USE_ACC a bᵀ."""
    BLOCK: gl.constexpr = a.shape[1]
    HALF: gl.constexpr = BLOCK // 2
    if LIVE == BLOCK:
        return warpgroup_mma(a, b.permute((1, 0)), acc, use_acc=USE_ACC, is_async=True)
    else:
        acc = warpgroup_mma(a.slice(0, HALF, dim=1), b.slice(0, HALF, dim=1).permute((1, 0)), acc, use_acc=USE_ACC,
                            is_async=True)  # fmt: skip
        return warpgroup_mma(a.slice(HALF, LIVE - HALF, dim=1), b.slice(HALF, LIVE - HALF, dim=1).permute((1, 0)), acc,
                             is_async=True)  # fmt: skip


@gluon.constexpr_function
def layout_of(columns, widest=256, K=16):
    """Of accumulators of 64 rows, in 4 warps. widest, K: columns of an instruction, and what it contracts: 32 bytes."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, min(columns, widest), K])


@gluon.jit
def accumulators(ROWS: gl.constexpr, BLOCK: gl.constexpr, LIVE: gl.constexpr, WIDEST: gl.constexpr = 256):
    """Zeros of ROWS rows and the columns that count, in one tensor or two."""
    HALF: gl.constexpr = BLOCK // 2
    if LIVE == BLOCK or BLOCK < 256:
        return (gl.zeros([ROWS, BLOCK], gl.float32, layout_of(BLOCK, WIDEST)),)
    else:
        left = gl.zeros([ROWS, HALF], gl.float32, layout_of(HALF, WIDEST))
        return left, gl.zeros([ROWS, LIVE - HALF], gl.float32, layout_of(LIVE - HALF, WIDEST))


@gluon.jit
def as_operand(a, acc):
    """a as left operand of a product that acc takes; what is in shared memory is one."""
    if isinstance(a, gl.tensor):
        return gl.convert_layout(a, gl.DotOperandLayout(0, acc.type.layout, 32 // a.dtype.primitive_bitwidth))
    else:
        return a


@gluon.jit
def accumulate(a, b, acc):
    """Start acc + a b of a tile b in shared memory. Each tensor of acc is a group to wait for."""
    if len(acc) == 1:
        return (warpgroup_mma(as_operand(a, acc[0]), b, acc[0], is_async=True),)
    else:
        LEFT: gl.constexpr = acc[0].shape[1]
        left = warpgroup_mma(as_operand(a, acc[0]), b.slice(0, LEFT, dim=1), acc[0], is_async=True)
        return left, warpgroup_mma(as_operand(a, acc[1]), b.slice(LEFT, acc[1].shape[1], dim=1), acc[1], is_async=True)


@gluon.jit
def wait(acc):
    """acc when all products are done."""
    if len(acc) == 1:
        return (warpgroup_mma_wait(0, deps=[acc[0]]),)
    else:
        left, rest = warpgroup_mma_wait(0, deps=[acc[0], acc[1]])
        return left, rest


@gluon.jit
def per_row(factors, x):
    """factors of the rows of x, to multiply it with."""
    return gl.convert_layout(factors, gl.SliceLayout(1, x.type.layout))[:, None]


@gluon.jit
def scale(acc, factors):
    """factors: a number, or one a row."""
    scaled = ()
    for i in gl.static_range(len(acc)):
        scaled = scaled + (_scaled(acc[i], factors),)
    return scaled


@gluon.jit
def _scaled(x, factors):
    if factors.type.is_block():
        return x * per_row(factors, x)
    else:
        return x * factors


@gluon.jit
def scale_rarely(acc, factors):
    """`scale` by one number a row, where that is nearly always 1."""
    if len(acc) == 1:
        return (scaled_rarely(acc[0], factors),)
    else:
        return scaled_rarely(acc[0], factors), scaled_rarely(acc[1], factors)


@gluon.jit
def scaled_rarely(x, factors):
    """One tensor times one number a row, nearly always 1: a warp whose rows all have 1 multiplies nothing."""
    COLUMNS: gl.constexpr = x.shape[1]
    return gl.inline_asm_elementwise(_RESCALE[COLUMNS], _RESCALE_CONSTRAINTS[COLUMNS], [x, per_row(factors, x)],
                                     dtype=gl.float32, is_pure=True, pack=COLUMNS // 2)  # fmt: skip


@gluon.jit
def hide(x, first, end):
    """x of 64 or 128 columns, in the layout of `layout_of`, with -inf in columns before first, if that is not None, and from
    end on: one a row.

    A comparison has its column in the instruction. As tensors of columns the compiler computes them before a loop, and keeps
    them in registers.
    """
    COLUMNS: gl.constexpr = x.shape[1]
    gl.static_assert(x.type.layout.instr_shape[1] == COLUMNS)
    if first is None:
        return gl.inline_asm_elementwise(_HIDE[COLUMNS, False], _HIDE_CONSTRAINTS[COLUMNS, False], [x, per_row(end, x)],
                                         dtype=gl.float32, is_pure=True, pack=COLUMNS // 2)  # fmt: skip
    else:
        return gl.inline_asm_elementwise(_HIDE[COLUMNS, True], _HIDE_CONSTRAINTS[COLUMNS, True],
                                         [x, per_row(end, x), per_row(first, x)], dtype=gl.float32, is_pure=True,
                                         pack=COLUMNS // 2)  # fmt: skip


@gluon.jit
def halves(x):
    """Left and right columns of x; every element stays in its register."""
    return x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute((0, 2, 1)).split()


@gluon.jit
def beside(left, right):
    """The tensor whose `halves` they are, as far as elements go."""
    return gl.join(left, right).permute((0, 2, 1)).reshape([left.shape[0], 2 * left.shape[1]])


@gluon.jit
def store(acc, tile):
    """Into a tile (ROWS, BLOCK) in shared memory, in its dtype; columns that do not count stay as they are."""
    if len(acc) == 1:
        tile.store(acc[0].to(tile.dtype))
    else:
        for i in gl.static_range(len(acc)):
            tile.slice(i * acc[0].shape[1], acc[i].shape[1], dim=1).store(acc[i].to(tile.dtype))
