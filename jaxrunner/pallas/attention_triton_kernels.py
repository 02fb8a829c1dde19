"""The Triton kernels of paged attention. Importing this needs Triton; see `attention_triton` for what they compute.

Scores and the running softmax are in units of log2. A row of a matrix tile is one head of one token, token-major: the
`HEADS` heads of a tile's tokens share a KV head and so read their keys once.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _keys(
    state, q, blocks, table, base, start, live_from, live_to, position, MASKED: tl.constexpr, SCALE: tl.constexpr,
    SOFT_CAP: tl.constexpr, WINDOW: tl.constexpr, ROW: tl.constexpr, VALUES: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr, TILE_KV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of keys, from `start` on, enters the running softmax of all rows.

    MASKED: some row may not see some key. Only keys in [live_from, live_to) are read: what lies in the others may be
    NaN. base: index of the first element of the layer's keys for this KV head.
    """
    top, total, acc = state
    key = start + tl.arange(0, TILE_KV)
    column = tl.arange(0, COLUMNS)
    live = (key >= live_from) & (key < live_to)
    if MASKED:
        block = tl.load(table + key // BLOCK_SIZE, mask=live, other=0).to(tl.int64)
    else:
        block = tl.load(table + key // BLOCK_SIZE).to(tl.int64)
    row = base + (block * BLOCK_SIZE + key % BLOCK_SIZE) * ROW
    keys = blocks + row[None, :] + column[:, None]
    values = blocks + VALUES + row[:, None] + column[None, :]
    if COLUMNS != HEAD_DIM:
        inside = column < HEAD_DIM
        if MASKED:
            k = tl.load(keys, mask=live[None, :] & inside[:, None], other=0.0)
            v = tl.load(values, mask=live[:, None] & inside[None, :], other=0.0)
        else:
            k = tl.load(keys, mask=inside[:, None], other=0.0)
            v = tl.load(values, mask=inside[None, :], other=0.0)
    elif MASKED:
        k = tl.load(keys, mask=live[None, :], other=0.0)
        v = tl.load(values, mask=live[:, None], other=0.0)
    else:
        k = tl.load(keys)
        v = tl.load(values)
    scores = tl.dot(q, k, input_precision=PRECISION)
    if SOFT_CAP > 0:
        # tanh(x) = 2 sigmoid(2x) - 1
        scores = (2.0 * tl.sigmoid(scores * (2.0 * SCALE / SOFT_CAP)) - 1.0) * (SOFT_CAP * LOG2E)
    else:
        scores = scores * (SCALE * LOG2E)
    if MASKED:
        seen = live[None, :] & (key[None, :] <= position[:, None])
        if WINDOW:
            seen = seen & (key[None, :] > position[:, None] - WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    finite_top = new_top
    if MASKED:
        finite_top = tl.where(new_top == float("-inf"), 0.0, new_top)
    keep = tl.exp2(top - finite_top)
    p = tl.exp2(scores - finite_top[:, None])
    total = total * keep + tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, acc * keep[:, None], input_precision=PRECISION)
    return new_top, total, acc


@triton.jit
def attend(
    q_of, blocks, layer_of, tables, seq_lens, starts, sinks, out, lse, SCALE: tl.constexpr, SOFT_CAP: tl.constexpr,
    WINDOW: tl.constexpr, HAS_SINKS: tl.constexpr, QUERY_LEN: tl.constexpr, NUM_TOKENS: tl.constexpr,
    NUM_REQS: tl.constexpr, WIDTH: tl.constexpr, NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr, HEADS: tl.constexpr, HEAD_TILES: tl.constexpr, TOKENS: tl.constexpr, HEAD_DIM: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCK_SIZE: tl.constexpr, NUM_BLOCKS: tl.constexpr, ROWS: tl.constexpr,
    TILE_KV: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A program is a share of the keys of a tile of rows: TOKENS tokens of one request, HEADS heads of one KV head.

    QUERY_LEN: of a uniform decode, or 0: then the request of a tile is found by its number, as request r begins at tile
    starts[r] // TOKENS + r, and the tokens behind the last live one are a request without keys. With one share the
    result is final, otherwise it is that of the share, normalised, with the log2 of its sum beside it.
    """
    # The tiles with most keys, the last of a long prompt, are started first.
    tile = tl.num_programs(0) // (NUM_KV_HEADS * HEAD_TILES) - 1 - tl.program_id(0) // (NUM_KV_HEADS * HEAD_TILES)
    kv_head = tl.program_id(0) % (NUM_KV_HEADS * HEAD_TILES) // HEAD_TILES
    head_tile = tl.program_id(0) % HEAD_TILES
    share = tl.program_id(1)
    if QUERY_LEN:
        tiles_of_request: tl.constexpr = (QUERY_LEN + TOKENS - 1) // TOKENS
        request = tile // tiles_of_request
        first = tile % tiles_of_request * TOKENS
        begin = request * QUERY_LEN
        query_len = QUERY_LEN
        seq_len = tl.load(seq_lens + request)
    else:
        low = 0
        high = NUM_REQS + 1
        while low < high:  # the number of requests, the tail's included, that begin at this tile or before it
            middle = (low + high) // 2
            if tl.load(starts + middle) // TOKENS + middle <= tile:
                low = middle + 1
            else:
                high = middle
        request = low - 1
        begin = tl.load(starts + request)
        end = tl.load(starts + request + 1, mask=request < NUM_REQS, other=NUM_TOKENS)
        query_len = end - begin
        first = (tile - begin // TOKENS - request) * TOKENS
        if first >= query_len:
            return
        seq_len = tl.load(seq_lens + request, mask=request < NUM_REQS, other=0)

    row = tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    token = first + row // HEADS
    head = head_tile * HEADS + row % HEADS
    valid = (row // HEADS < TOKENS) & (token < query_len) & (head < GROUP)
    head = kv_head * GROUP + head
    position = seq_len - query_len + token
    flat = (begin + token).to(tl.int64) * NUM_HEADS + head
    inside = valid[:, None] & (column[None, :] < HEAD_DIM)
    q = tl.load(q_of + flat[:, None] * HEAD_DIM + column[None, :], mask=inside, other=0.0)

    # Keys that any row sees: [oldest, newest). Keys that every row sees end at the first row's own.
    first_position = seq_len - query_len + first
    newest = tl.maximum(tl.minimum(first_position + TOKENS, seq_len), 0)
    oldest = 0
    if WINDOW:
        oldest = tl.maximum(first_position - WINDOW + 1, 0)
    key = oldest // TILE_KV * TILE_KV
    share_len = tl.cdiv(tl.cdiv(tl.maximum(newest - key, 0), TILE_KV), SPLITS) * TILE_KV
    key += share * share_len
    last = tl.minimum(key + share_len, newest)
    table = tables + request.to(tl.int64) * WIDTH
    layer = tl.load(layer_of).to(tl.int64)
    ROW: tl.constexpr = NUM_KV_HEADS * HEAD_DIM
    VALUES: tl.constexpr = NUM_BLOCKS * BLOCK_SIZE * ROW
    base = layer * 2 * VALUES + kv_head * HEAD_DIM
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    if not QUERY_LEN:  # a decode reads too few keys for loops of its own for those that all rows see
        whole = key
        if WINDOW:
            whole = tl.cdiv(tl.maximum(first_position + TOKENS - WINDOW, 0), TILE_KV) * TILE_KV
            whole = tl.minimum(tl.maximum(whole, key), last)
            for start in tl.range(key, whole, TILE_KV, num_stages=STAGES):
                top, total, acc = _keys(
                    (top, total, acc), q, blocks, table, base, start, oldest, newest, position, True, SCALE, SOFT_CAP,
                    WINDOW, ROW, VALUES, BLOCK_SIZE, HEAD_DIM, COLUMNS, TILE_KV, PRECISION,
                )  # fmt: skip
            whole = tl.cdiv(whole, TILE_KV) * TILE_KV
        key = tl.maximum(tl.minimum(tl.maximum(first_position + 1, 0) // TILE_KV * TILE_KV, last), whole)
        for start in tl.range(whole, key, TILE_KV, num_stages=STAGES):
            top, total, acc = _keys(
                (top, total, acc), q, blocks, table, base, start, oldest, newest, position, False, SCALE, SOFT_CAP,
                WINDOW, ROW, VALUES, BLOCK_SIZE, HEAD_DIM, COLUMNS, TILE_KV, PRECISION,
            )  # fmt: skip
    for start in tl.range(key, last, TILE_KV, num_stages=STAGES):
        top, total, acc = _keys(
            (top, total, acc), q, blocks, table, base, start, oldest, newest, position, True, SCALE, SOFT_CAP,
            WINDOW, ROW, VALUES, BLOCK_SIZE, HEAD_DIM, COLUMNS, TILE_KV, PRECISION,
        )  # fmt: skip

    safe_total = tl.where(total > 0, total, 1.0)
    if SPLITS == 1 and HAS_SINKS:
        sink = tl.load(sinks + head, mask=valid, other=0.0).to(tl.float32) * LOG2E
        highest = tl.maximum(top, sink)
        keep = tl.exp2(top - highest)
        acc = acc * (keep / (total * keep + tl.exp2(sink - highest)))[:, None]
    else:
        acc = acc / safe_total[:, None]
    flat = flat * SPLITS + share
    tl.store(out + flat[:, None] * HEAD_DIM + column[None, :], acc.to(out.dtype.element_ty), mask=inside)
    if SPLITS > 1:
        tl.store(lse + flat, tl.where(total > 0, top + tl.log2(safe_total), float("-inf")), mask=valid)


@triton.jit
def combine(
    partial, lse, sinks, out, HAS_SINKS: tl.constexpr, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    COLUMNS: tl.constexpr, SPLITS: tl.constexpr, SPLITS_PADDED: tl.constexpr,
):  # fmt: skip
    """The shares of one head of one token become its result: weighted by their sums, the sink among them."""
    row = tl.program_id(0).to(tl.int64)
    share = tl.arange(0, SPLITS_PADDED)
    column = tl.arange(0, COLUMNS)
    sums = tl.load(lse + row * SPLITS + share, mask=share < SPLITS, other=float("-inf"))
    top = tl.max(sums, 0)
    if HAS_SINKS:
        sink = tl.load(sinks + row % NUM_HEADS).to(tl.float32) * LOG2E
        top = tl.maximum(top, sink)
    top = tl.where(top == float("-inf"), 0.0, top)
    weight = tl.exp2(sums - top)
    total = tl.sum(weight, 0)
    if HAS_SINKS:
        total += tl.exp2(sink - top)
    inside = (share[:, None] < SPLITS) & (column[None, :] < HEAD_DIM)
    values = tl.load(partial + (row * SPLITS + share[:, None]) * HEAD_DIM + column[None, :], mask=inside, other=0.0)
    result = tl.sum(values * weight[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(out + row * HEAD_DIM + column, result.to(out.dtype.element_ty), mask=column < HEAD_DIM)
