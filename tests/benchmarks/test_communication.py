"""What `benchmarks/communication.py` reads from programs: pieces of compiled ones, for GPUs and for TPUs, cut down."""

import doctest

import communication
import hlo
import pytest

GPU = """HloModule jit_body, is_scheduled=true

%gemm (p: f32[8,8]) -> f32[8,8] {
  %p = f32[8,8]{1,0} parameter(0)
  ROOT %dot.1 = f32[8,8]{1,0} dot(%p, %p), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%body (q: (s32[], f32[8,8])) -> (s32[], f32[8,8]) {
  %q = (s32[], f32[8,8]{1,0}) parameter(0)
  %x = f32[8,8]{1,0} get-tuple-element(%q), index=1
  %all-gather-start.1 = (f32[8,8]{1,0}, f32[32,8]{1,0}) all-gather-start(%x), replica_groups=[2,4]<=[8], dimensions={0}
  %bitcast.1 = f32[8,8]{1,0} bitcast(%x)
  %all-gather-done.1 = f32[32,8]{1,0} all-gather-done(%all-gather-start.1)
  %product = f32[8,8]{1,0} fusion(%bitcast.1), kind=kCustom, calls=%gemm, metadata={op_name="step/optimizer/while/dot"}
  ROOT %t = (s32[], f32[8,8]{1,0}) tuple(%q, %product)
}

%condition (c: (s32[], f32[8,8])) -> pred[] {
  %c = (s32[], f32[8,8]{1,0}) parameter(0)
  ROOT %less = pred[] compare(%c, %c), direction=LT
}

ENTRY %main (a: f32[8,8], b: f32[4]) -> f32[8,8] {
  %a = f32[8,8]{1,0} parameter(0)
  %b = f32[4]{0} parameter(1)
  %reduce-scatter-start = ((f32[8,8]{1,0}), f32[1,8]{1,0}) reduce-scatter-start(%a), \
replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%sum, metadata={op_name="step/optimizer/reduce_scatter"}, \
backend_config={"is_sync":false}
  %first = f32[8,8]{1,0} fusion(%a), kind=kCustom, calls=%gemm, metadata={op_name="step/transpose(jvp())/dot_general"}
  %loop = (s32[], f32[8,8]{1,0}) while(%first), condition=%condition, body=%body, \
metadata={op_name="step/optimizer/while"}, backend_config={"known_trip_count":{"n":"3"}}
  %reduce-scatter-done = f32[1,8]{1,0} reduce-scatter-done(%reduce-scatter-start)
  %all-reduce-start = f32[4]{0} all-reduce-start(%b), replica_groups={{0,1},{2,3}}, to_apply=%sum
  %second = f32[8,8]{1,0} fusion(%a), kind=kCustom, calls=%gemm
  %all-reduce-done = f32[4]{0} all-reduce-done(%all-reduce-start)
  ROOT %slice = f32[2]{0} slice(%all-reduce-done), slice={[0:2]}, metadata={op_name="step/optimizer/psum"}
}
"""

TPU = """HloModule jit_body, is_scheduled=true

%starts (p: bf16[4,8]) -> (bf16[4,8], bf16[16,8]) {
  %p = bf16[4,8]{1,0:T(8,128)(2,1)} parameter(0)
  %all-gather.1 = bf16[16,8]{1,0:T(8,128)(2,1)} all-gather(%p), channel_id=5, replica_groups={{0,1,2,3}}, \
dimensions={0}, frontend_attributes={chain_id="9"}, metadata={op_name="step/jvp()/all_gather"}
  ROOT %call.1 = (bf16[4,8], bf16[16,8]) custom-call(%all-gather.1), custom_call_target="AsyncCollectiveStart"
}

%goes_on (p.1: bf16[4,8], q: f32[8,8]) -> f32[8,8] {
  %p.1 = bf16[4,8]{1,0:T(8,128)(2,1)} parameter(0)
  %q = f32[8,8]{1,0:T(8,128)} parameter(1)
  %all-gather.2 = bf16[16,8]{1,0} all-gather(%p.1), replica_groups={{0,1,2,3}}, frontend_attributes={chain_id="9"}
  ROOT %convolution.1 = f32[8,8]{1,0} convolution(%q, %q), dim_labels=bf_io->bf, metadata={op_name="step/jvp()/dot"}
}

%awaits (p.2: bf16[4,8]) -> bf16[16,8] {
  %p.2 = bf16[4,8]{1,0:T(8,128)(2,1)} parameter(0)
  %all-gather.3 = bf16[16,8]{1,0} all-gather(%p.2), replica_groups={{0,1,2,3}}, frontend_attributes={chain_id="9"}
  ROOT %call.2 = bf16[16,8]{1,0} custom-call(%p.2, %all-gather.3), custom_call_target="AsyncCollectiveDone"
}

%all-reduce-scatter.1 (input: f32[16,8]) -> f32[4,8] {
  %input = f32[16,8]{1,0:T(8,128)} parameter(0)
  %all-reduce.1 = f32[16,8]{1,0:T(8,128)} all-reduce(%input), replica_groups={{0,1,2,3}}, to_apply=%sum
  ROOT %dynamic-slice.1 = f32[4,8]{1,0:T(8,128)} dynamic-slice(%all-reduce.1), dynamic_slice_sizes={4,8}
}

%layer (s: (u32[], bf16[4,8], f32[8,8])) -> (u32[], bf16[4,8], f32[8,8]) {
  %s = (u32[], bf16[4,8], f32[8,8]) parameter(0)
  %w = bf16[4,8]{1,0:T(8,128)(2,1)} get-tuple-element(%s), index=1
  %x = f32[8,8]{1,0:T(8,128)} get-tuple-element(%s), index=2
  %async-collective-start = (bf16[4,8], bf16[16,8]) fusion(%w), kind=kCustom, calls=%starts
  %fusion.1 = f32[8,8]{1,0} fusion(%w, %x), kind=kCustom, calls=%goes_on
  %async-collective-done = bf16[16,8]{1,0} fusion(%w), kind=kCustom, calls=%awaits
  ROOT %t = (u32[], bf16[4,8], f32[8,8]) tuple(%s, %w, %fusion.1)
}

%until (u: (u32[], bf16[4,8], f32[8,8])) -> pred[] {
  %u = (u32[], bf16[4,8], f32[8,8]) parameter(0)
  %i = u32[] get-tuple-element(%u), index=0
  %n = u32[] constant(32)
  ROOT %less = pred[] compare(%i, %n), direction=LT
}

ENTRY %main (a: f32[16,8]) -> f32[4,8] {
  %a = f32[16,8]{1,0:T(8,128)} parameter(0)
  %while.1 = (u32[], bf16[4,8], f32[8,8]) while(%a), condition=%until, body=%layer
  %negated = f32[16,8]{1,0} negate(%a), metadata={op_name="step/transpose(jvp())/neg"}
  ROOT %fusion.2 = f32[4,8]{1,0} fusion(%negated), kind=kCustom, calls=%all-reduce-scatter.1
}
"""


def test_gpu():
  scatter, gather, reduce = communication.collectives(GPU)
  assert (scatter.kind, scatter.runs, scatter.sent, scatter.asynchronous) == ('reduce-scatter', 1, 256 * 7 / 8, True)
  assert scatter.products == ('step/transpose(jvp())/dot_general', 'step/optimizer/while')
  # Nothing but a bitcast stands between its start and its end; the loop runs three times.
  assert (gather.kind, gather.runs, gather.sent, gather.asynchronous) == ('all-gather', 3, 3 * 256 * 3, False)
  assert gather.loops == ('step/optimizer/while',) and gather.products == ()
  # The compiler's own: it goes by what uses it.
  assert (reduce.kind, reduce.sent, reduce.scope) == ('all-reduce', 16.0, 'step/optimizer/psum')
  assert reduce.products == ('second',)


def test_sync_start_overlaps_nothing():
  (scatter, *_) = communication.collectives(GPU.replace('"is_sync":false', '"is_sync":true'))
  assert not scatter.asynchronous and scatter.products == ()


def test_tpu_chain_of_fusions_is_one_collective():
  gather, scatter = communication.collectives(TPU)
  assert (gather.kind, gather.runs, gather.sent, gather.asynchronous) == ('all-gather', 32, 32 * 64 * 3, True)
  assert gather.products == ('step/jvp()/dot',) and gather.loops == ('step/jvp()/all_gather',)
  assert (scatter.kind, scatter.sent, scatter.asynchronous) == ('reduce-scatter', 512 * 3 / 4, False)
  assert scatter.scope == 'step/transpose(jvp())/neg'


def test_unknown_groups_raise():
  with pytest.raises(ValueError, match='replica groups'):
    communication.collectives(GPU.replace('replica_groups={{0,1},{2,3}}', 'replica_groups={}'))


def test_examples():
  assert doctest.testmod(hlo) == (0, 1)
  assert doctest.testmod(communication) == (0, 1)
