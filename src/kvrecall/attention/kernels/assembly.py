"""The search's inner loops in LLVM's intermediate language, for x86 processors with AVX512-VNNI.

One instruction there adds up 64 products of unsigned by signed bytes, for 16 sums of four. Codes
are signed, so their top bit is turned, which adds 128 to each; what that adds to a sum, 128 times
the query's coordinates, is taken off at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

CHUNK = 64
"""Bytes that one instruction multiplies."""

MOST_IN_A_GROUP = 16
"""Query heads of a KV head whose sums fit the registers."""

FIELDS = (
    "codes", "head_stride", "block_stride", "row_stride", "heads", "blocks", "rows", "chunks",
    "ahead", "places", "query", "turned", "scales", "best",
)  # fmt: skip
"""Of a task, 64 bits each: addresses, and counts of bytes or things.

``ahead``: blocks by which memory is asked for before it is read; ``places``: 0, or int64 ``[heads,
blocks]``; ``query``: int8 ``[heads, chunks, group, CHUNK]``, aligned to CHUNK; ``turned``: int32
``[heads, group]``, 128 times the sums of the query; ``scales``: float32 ``[heads, group]``;
``best``: float32 ``[heads, group, blocks]``."""

CODING = ("query", "heads", "chunks", "dim", "split", "scale", "codes", "turned", "scales")
"""Of a task of coding, 64 bits each.

``query``: float32 ``[heads, group, dim]``; ``split``: 1 if codes above zero come first, then those
below, 0 if they stay together; ``scale``: address of a float32 that all scales are multiplied by;
``codes``, ``turned``, ``scales``: what is found, as ``query``, ``turned`` and ``scales`` above."""

LANES = 16
"""Numbers that are coded at a time; a head's dimension is a multiple of it."""

_TURN = ", ".join(["i32 -2139062144"] * (CHUNK // 4))  # 0x80 in each byte
_SUMS = f"<{CHUNK // 4} x i32>"
_MULTIPLY = "@llvm.x86.avx512.vpdpbusd.512"


def module_of(group: int) -> str:
    """``search(task)``: for each head and block the largest product of a row with each of
    ``group`` query heads, times both scales. ``share(task)``: this thread's part of the blocks, if
    it is one of a team of OpenMP's. ``code(task)``: queries rounded as rows are."""
    assert 0 < group <= MOST_IN_A_GROUP
    return "\n".join([_DECLARED, _ENTRIES, _span(group), _code(group)])


_DECLARED = f"""
declare {_SUMS} {_MULTIPLY}({_SUMS}, {_SUMS}, {_SUMS})
declare i32 @llvm.vector.reduce.add.v16i32({_SUMS})
declare i32 @llvm.smax.i32(i32, i32)
declare i64 @llvm.smin.i64(i64, i64)
declare void @llvm.prefetch.p0(ptr, i32, i32, i32)
declare <16 x float> @llvm.fabs.v16f32(<16 x float>)
declare <16 x float> @llvm.maxnum.v16f32(<16 x float>, <16 x float>)
declare <16 x float> @llvm.rint.v16f32(<16 x float>)
declare float @llvm.maxnum.f32(float, float)
declare float @llvm.vector.reduce.fmax.v16f32(<16 x float>)
declare {_SUMS} @llvm.smax.v16i32({_SUMS}, {_SUMS})
declare {_SUMS} @llvm.smin.v16i32({_SUMS}, {_SUMS})
declare i32 @omp_get_thread_num()
declare i32 @omp_get_num_threads()
"""


def _field(name: str, register: str | None = None, fields: Sequence[str] = FIELDS) -> str:
    register = register or name
    return (
        f"  %at_{register} = getelementptr i64, ptr %task, i64 {fields.index(name)}\n"
        f"  %{register} = load i64, ptr %at_{register}"
    )


def _pointer(name: str, fields: Sequence[str] = FIELDS) -> str:
    return f"{_field(name, f'{name}_bits', fields)}\n  %{name} = inttoptr i64 %{name}_bits to ptr"


_ENTRIES = f"""
define void @search(ptr %task) {{
{_field("blocks")}
  call void @span(ptr %task, i64 0, i64 %blocks)
  ret void
}}

define void @share(ptr %task) {{
{_field("blocks")}
  %thread32 = call i32 @omp_get_thread_num()
  %threads32 = call i32 @omp_get_num_threads()
  %thread = sext i32 %thread32 to i64
  %threads = sext i32 %threads32 to i64
  %next = add i64 %thread, 1
  %before = mul i64 %blocks, %thread
  %after = mul i64 %blocks, %next
  %first = sdiv i64 %before, %threads
  %end = sdiv i64 %after, %threads
  call void @span(ptr %task, i64 %first, i64 %end)
  ret void
}}
"""


def _span(group: int) -> str:
    """Blocks ``first`` to ``end`` of every head. While a block's rows are read, a later one's are
    asked for: blocks lie too far apart for the processor to do so by itself."""
    parts = [_entry(group), _head(group), _block(), _rows(group), _found(group)]
    return "\n" + "".join(parts)


def _each(group: int, line: Callable[[int], str]) -> str:
    return "\n".join("  " + line(g) for g in range(group))


def _entry(group: int) -> str:
    """What the task says, and whether there is anything to do."""
    return f"""define internal void @span(ptr %task, i64 %first, i64 %end) {{
entry:
{_pointer("codes")}
{_field("head_stride")}
{_field("block_stride")}
{_field("row_stride")}
{_field("heads")}
{_field("blocks")}
{_field("rows")}
{_field("chunks")}
{_field("ahead")}
{_pointer("places")}
{_pointer("query")}
{_pointer("turned")}
{_pointer("scales")}
{_pointer("best")}
  %width = mul i64 %chunks, {CHUNK}
  %query_bytes = mul i64 %width, {group}
  %last = sub i64 %end, 1
  %is_plain = icmp eq i64 %places_bits, 0
  %any_blocks = icmp slt i64 %first, %end
  %any_heads = icmp sgt i64 %heads, 0
  %any = and i1 %any_blocks, %any_heads
  br i1 %any, label %head_begin, label %done

"""


def _head(group: int) -> str:
    """A head's query, and where what is found goes."""
    return f"""head_begin:
  %head = phi i64 [0, %entry], [%head_next, %head_end]
  %head_offset = mul i64 %head, %head_stride
  %head_codes = getelementptr i8, ptr %codes, i64 %head_offset
  %query_offset = mul i64 %head, %query_bytes
  %head_query = getelementptr i8, ptr %query, i64 %query_offset
  %of_head = mul i64 %head, {group}
  %places_offset = mul i64 %head, %blocks
  %head_places = getelementptr i64, ptr %places, i64 %places_offset
{_each(group, lambda g: f"%of_{g} = add i64 %of_head, {g}")}
{_each(group, lambda g: f"%at_turned_{g} = getelementptr i32, ptr %turned, i64 %of_{g}")}
{_each(group, lambda g: f"%turned_{g} = load i32, ptr %at_turned_{g}")}
{_each(group, lambda g: f"%at_scale_{g} = getelementptr float, ptr %scales, i64 %of_{g}")}
{_each(group, lambda g: f"%scale_{g} = load float, ptr %at_scale_{g}")}
{_each(group, lambda g: f"%best_offset_{g} = mul i64 %of_{g}, %blocks")}
{_each(group, lambda g: f"%best_{g} = getelementptr float, ptr %best, i64 %best_offset_{g}")}
  br label %block_begin

"""


def _block() -> str:
    """Where a block lies, and the one to ask for meanwhile."""
    return """block_begin:
  %block = phi i64 [%first, %head_begin], [%block_next, %block_end]
  %block_next = add i64 %block, 1
  %block_far = add i64 %block, %ahead
  %block_ahead = call i64 @llvm.smin.i64(i64 %block_far, i64 %last)
  br i1 %is_plain, label %block_go, label %placed
placed:
  %at_place = getelementptr i64, ptr %head_places, i64 %block
  %placed_here = load i64, ptr %at_place
  %at_ahead_place = getelementptr i64, ptr %head_places, i64 %block_ahead
  %placed_ahead = load i64, ptr %at_ahead_place
  br label %block_go
block_go:
  %place = phi i64 [%block, %block_begin], [%placed_here, %placed]
  %place_ahead = phi i64 [%block_ahead, %block_begin], [%placed_ahead, %placed]
  %block_offset = mul i64 %place, %block_stride
  %block_codes = getelementptr i8, ptr %head_codes, i64 %block_offset
  %ahead_offset = mul i64 %place_ahead, %block_stride
  %ahead_codes = getelementptr i8, ptr %head_codes, i64 %ahead_offset
  br label %row_begin

"""


def _rows(group: int) -> str:
    """The largest sums of a block's rows."""
    return f"""row_begin:
  %row = phi i64 [0, %block_go], [%row_next, %row_end]
{_each(group, lambda g: f"%most_{g} = phi i32 [-2147483648, %block_go], [%more_{g}, %row_end]")}
  %row_offset = mul i64 %row, %row_stride
  br label %chunk
chunk:
  %at = phi i64 [0, %row_begin], [%at_next, %chunk]
{_each(group, lambda g: f"%sums_{g} = phi {_SUMS} [zeroinitializer, %row_begin], [%added_{g}, %chunk]")}
  %offset = add i64 %row_offset, %at
  %at_later = getelementptr i8, ptr %ahead_codes, i64 %offset
  call void @llvm.prefetch.p0(ptr %at_later, i32 0, i32 3, i32 1)
  %at_codes = getelementptr i8, ptr %block_codes, i64 %offset
  %signed = load {_SUMS}, ptr %at_codes, align 1
  %unsigned = xor {_SUMS} %signed, <{_TURN}>
  %queries = mul i64 %at, {group}
{_each(group, lambda g: f"%query_at_{g} = add i64 %queries, {CHUNK * g}")}
{_each(group, lambda g: f"%at_query_{g} = getelementptr i8, ptr %head_query, i64 %query_at_{g}")}
{_each(group, lambda g: f"%query_{g} = load {_SUMS}, ptr %at_query_{g}, align {CHUNK}")}
{_each(group, lambda g: f"%added_{g} = call {_SUMS} {_MULTIPLY}({_SUMS} %sums_{g}, {_SUMS} %unsigned, {_SUMS} %query_{g})")}
  %at_next = add i64 %at, {CHUNK}
  %more_chunks = icmp slt i64 %at_next, %width
  br i1 %more_chunks, label %chunk, label %row_end
row_end:
{_each(group, lambda g: f"%sum_{g} = call i32 @llvm.vector.reduce.add.v16i32({_SUMS} %added_{g})")}
{_each(group, lambda g: f"%more_{g} = call i32 @llvm.smax.i32(i32 %most_{g}, i32 %sum_{g})")}
  %row_next = add i64 %row, 1
  %more_rows = icmp slt i64 %row_next, %rows
  br i1 %more_rows, label %row_begin, label %block_end

"""  # noqa: E501


def _found(group: int) -> str:
    """A block's best products, and on to the next block, or head."""
    return f"""block_end:
  %at_scale = getelementptr i8, ptr %block_codes, i64 %width
  %scale = load float, ptr %at_scale, align 1
{_each(group, lambda g: f"%exact_{g} = sub i32 %more_{g}, %turned_{g}")}
{_each(group, lambda g: f"%number_{g} = sitofp i32 %exact_{g} to float")}
{_each(group, lambda g: f"%factor_{g} = fmul float %scale_{g}, %scale")}
{_each(group, lambda g: f"%product_{g} = fmul float %number_{g}, %factor_{g}")}
{_each(group, lambda g: f"%at_best_{g} = getelementptr float, ptr %best_{g}, i64 %block")}
{_each(group, lambda g: f"store float %product_{g}, ptr %at_best_{g}")}
  %more_blocks = icmp slt i64 %block_next, %end
  br i1 %more_blocks, label %block_begin, label %head_end
head_end:
  %head_next = add i64 %head, 1
  %more_heads = icmp slt i64 %head_next, %heads
  br i1 %more_heads, label %head_begin, label %done
done:
  ret void
}}
"""


def _code(group: int) -> str:
    return _queries(group) + _largest() + _rounded(group)


def _queries(group: int) -> str:
    """Each query of each head."""
    fields = "\n".join(_field(name, fields=CODING) for name in ("heads", "chunks", "dim", "split"))
    pointers = ("query", "scale", "codes", "turned", "scales")
    return f"""
define void @code(ptr %task) {{
entry:
{fields}
{chr(10).join(_pointer(name, CODING) for name in pointers)}
  %factor = load float, ptr %scale
  %is_split = icmp eq i64 %split, 1
  %width = mul i64 %chunks, {CHUNK}
  %queries = mul i64 %heads, {group}
  br label %query_begin
query_begin:
  %at_query = phi i64 [0, %entry], [%query_next, %query_end]
  %head = udiv i64 %at_query, {group}
  %place = urem i64 %at_query, {group}
  %row_offset = mul i64 %at_query, %dim
  %row = getelementptr float, ptr %query, i64 %row_offset
  %head_bytes = mul i64 %width, {group}
  %head_offset = mul i64 %head, %head_bytes
  %place_offset = mul i64 %place, {CHUNK}
  %codes_offset = add i64 %head_offset, %place_offset
  %codes_here = getelementptr i8, ptr %codes, i64 %codes_offset
  br label %largest
"""


def _largest() -> str:
    """The scale: that of the largest coordinate."""
    return f"""largest:
  %seen = phi i64 [0, %query_begin], [%seen_next, %largest]
  %most = phi <16 x float> [zeroinitializer, %query_begin], [%more, %largest]
  %at_seen = getelementptr float, ptr %row, i64 %seen
  %numbers = load <16 x float>, ptr %at_seen, align 4
  %sizes = call <16 x float> @llvm.fabs.v16f32(<16 x float> %numbers)
  %more = call <16 x float> @llvm.maxnum.v16f32(<16 x float> %most, <16 x float> %sizes)
  %seen_next = add i64 %seen, {LANES}
  %unseen = icmp slt i64 %seen_next, %dim
  br i1 %unseen, label %largest, label %scaled
scaled:
  %top = call float @llvm.vector.reduce.fmax.v16f32(<16 x float> %more)
  %step_or_none = fdiv float %top, 127.0
  %step = call float @llvm.maxnum.f32(float %step_or_none, float 0x3810000000000000)
  %lane = insertelement <16 x float> poison, float %step, i32 0
  %steps = shufflevector <16 x float> %lane, <16 x float> poison, <16 x i32> zeroinitializer
  br label %round
"""


def _rounded(group: int) -> str:
    """The codes, in chunks of which each has all the head's queries."""
    return f"""round:
  %done = phi i64 [0, %scaled], [%done_next, %round_end]
  %sums = phi {_SUMS} [zeroinitializer, %scaled], [%added, %round_end]
  %at_done = getelementptr float, ptr %row, i64 %done
  %plain = load <16 x float>, ptr %at_done, align 4
  %parts = fdiv <16 x float> %plain, %steps
  %near = call <16 x float> @llvm.rint.v16f32(<16 x float> %parts)
  %whole = fptosi <16 x float> %near to {_SUMS}
  %added = add {_SUMS} %sums, %whole
  %high = call {_SUMS} @llvm.smax.v16i32({_SUMS} %whole, {_SUMS} zeroinitializer)
  %low = call {_SUMS} @llvm.smin.v16i32({_SUMS} %whole, {_SUMS} zeroinitializer)
  %first = select i1 %is_split, {_SUMS} %high, {_SUMS} %whole
{_stored("first", "done", group)}
  br i1 %is_split, label %second, label %round_end
second:
  %later = add i64 %done, %dim
{_stored("low", "later", group)}
  br label %round_end
round_end:
  %done_next = add i64 %done, {LANES}
  %undone = icmp slt i64 %done_next, %dim
  br i1 %undone, label %round, label %query_end
query_end:
  %sum = call i32 @llvm.vector.reduce.add.v16i32({_SUMS} %added)
  %turned_here = mul i32 %sum, 128
  %at_turned_here = getelementptr i32, ptr %turned, i64 %at_query
  store i32 %turned_here, ptr %at_turned_here
  %scale_here = fmul float %step, %factor
  %at_scale_here = getelementptr float, ptr %scales, i64 %at_query
  store float %scale_here, ptr %at_scale_here
  %query_next = add i64 %at_query, 1
  %more_queries = icmp slt i64 %query_next, %queries
  br i1 %more_queries, label %query_begin, label %finished
finished:
  ret void
}}
"""


def _stored(name: str, at: str, group: int) -> str:
    """Sixteen codes, from coordinate ``at`` on."""
    return f"""  %chunk_{name} = udiv i64 %{at}, {CHUNK}
  %within_{name} = urem i64 %{at}, {CHUNK}
  %chunk_offset_{name} = mul i64 %chunk_{name}, {CHUNK * group}
  %offset_{name} = add i64 %chunk_offset_{name}, %within_{name}
  %at_{name} = getelementptr i8, ptr %codes_here, i64 %offset_{name}
  %bytes_{name} = trunc {_SUMS} %{name} to <16 x i8>
  store <16 x i8> %bytes_{name}, ptr %at_{name}, align 1"""
