"""What names mean: kernels of every library that the table knows, ranges, and a user's own table."""

from __future__ import annotations

from pathlib import Path

import pytest

from dbo_greenlet.errors import ConfigurationError
from dbo_greenlet.trace.kernels import Annotation, KernelTable, function_name
from tests.trace.profiles import COMBINE, DISPATCH, FLASH, GEMM, LOW_LATENCY_COMBINE, LOW_LATENCY_DISPATCH

COMMUNICATION = [
    # DeepEP as released: high throughput between and within nodes, low latency; also as a mangled name.
    (DISPATCH, "DeepEP", "dispatch", "dispatch"),
    (COMBINE, "DeepEP", "combine", "combine"),
    ("void deep_ep::intranode::combine<__nv_bfloat16, 8, 768, 4096>(__nv_bfloat16*)", "DeepEP", "combine", "combine"),
    ("void deep_ep::intranode::notify_dispatch<8>(int const*)", "DeepEP", "layout", "dispatch"),
    ("void deep_ep::intranode::cached_notify_combine<8>(void**)", "DeepEP", "layout", "combine"),
    ("void deep_ep::internode::cached_notify<false, 2>(int)", "DeepEP", "layout", ""),
    ("void deep_ep::layout::get_dispatch_layout<256, 32, 8>(long const*)", "DeepEP", "layout", "dispatch"),
    ("void deep_ep::intranode::barrier<8>(int**, int)", "DeepEP", "layout", ""),
    ("_ZN7deep_ep9intranode7combineI13__nv_bfloat16Li8EEEvPT_", "DeepEP", "combine", "combine"),
    (LOW_LATENCY_DISPATCH, "DeepEP low latency", "dispatch", "dispatch"),
    (LOW_LATENCY_COMBINE, "DeepEP low latency", "combine", "combine"),
    ("_ZN7deep_ep12internode_ll8dispatchILb1ELb0ELi7168EEEvPvS1_", "DeepEP low latency", "dispatch", "dispatch"),
    # DeepSeek's own build.
    ("void dpsk::ep::internode::dispatch<false, 8, true, 8>(int4*)", "DeepEP", "dispatch", "dispatch"),
    ("void dpsk::ep::internode::combine<false, 8, __nv_bfloat16>(int4*)", "DeepEP", "combine", "combine"),
    ("void dpsk::ep::cuda::get_dispatch_layout<256, 32, 8>(long const*)", "DeepEP", "layout", "dispatch"),
    ("void dpsk::ep::internode::dispatch_ll<7168>(void*)", "DeepEP low latency", "dispatch", "dispatch"),
    ("void dpsk::ep::internode::combine_ll<7168>(void*)", "DeepEP low latency", "combine", "combine"),
    # DeepEP 2.
    ("void deep_ep::elastic::dispatch_impl<true, 3>(void*)", "DeepEP", "dispatch", "dispatch"),
    ("void deep_ep::elastic::hybrid_combine_impl<8>(void*)", "DeepEP", "combine", "combine"),
    ("void deep_ep::elastic::dispatch_copy_epilogue_impl<true>(void*)", "DeepEP", "dispatch", "dispatch"),
    # nixl, pplx, MORI, TensorRT-LLM.
    ("void uccl::internode_ll::combine<true, 7168>(void*)", "DeepEP low latency", "combine", "combine"),
    ("void nixl_ep::ep_kernels::combine<7168>(void*)", "nixl low latency", "combine", "combine"),
    ("_ZN7nixl_ep10ep_kernels8dispatchILb1EEEvPv", "nixl low latency", "dispatch", "dispatch"),
    ("void nixl_ep::ht::dispatch<8>(int4*)", "nixl", "dispatch", "dispatch"),
    ("void nixl_ep::ht::notify_dispatch<8>(int const*)", "nixl", "layout", ""),
    ("void hybrid_ep::dispatch_kernel<16>(void*)", "hybrid EP", "dispatch", "dispatch"),
    ("nixlGpuPostXferReq", "nixl", "", ""),
    ("void mori::moe::EpDispatchInterNodeKernel<float>(mori::Args)", "MORI", "dispatch", "dispatch"),
    ("void mori::moe::EpCombineIntraNodeKernel<float>(mori::Args)", "MORI", "combine", "combine"),
    ("void tensorrt_llm::kernels::moe_comm::moeAllToAllKernel<1>(x)", "TensorRT-LLM", "all to all", ""),
    # NCCL and RCCL, new and old names.
    ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "NCCL or RCCL", "send and receive", ""),
    ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "NCCL or RCCL", "all-gather", ""),
    ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevComm*)", "NCCL or RCCL", "reduce-scatter", ""),
    ("ncclKernel_AllReduce_RING_LL_Sum_bfloat16(ncclDevComm*)", "NCCL or RCCL", "all-reduce", ""),
    ("ncclSymkDevKernel_AllGather_LLMC(ncclSymkDevWorkArgs4K)", "NCCL or RCCL", "all-gather", ""),
    ("ncclDevKernel_Generic_1(ncclDevKernelArgsStorage<4096ul>)", "NCCL or RCCL", "", ""),
    ("ncclAllGatherRingLLKernel_sum_i8(ncclColl)", "NCCL or RCCL", "all-gather", ""),
    # NVSHMEM, peer memory, copies.
    ("nvshmemi_proxy_rma_entrypoint(void*, void*)", "NVSHMEM", "", ""),
    ("void nvshmemi_alltoall_on_stream_kernel<int>(int)", "NVSHMEM", "all to all", ""),
    ("void vllm::cross_device_reduce_1stage<__nv_bfloat16, 2>(x)", "peer memory", "all-reduce", ""),
    ("Memcpy PtoP (Device -> Device)", "copy engine", "peer copy", ""),
    ("CopyPeerToPeer", "copy engine", "peer copy", ""),
]


@pytest.mark.parametrize(("name", "library", "operation", "stage"), COMMUNICATION)
def test_communication(name: str, library: str, operation: str, stage: str) -> None:
    found = KernelTable().classify(name)
    assert (found.kind, found.library, found.operation, found.stage) == ("communication", library, operation, stage)
    assert found.background == library.endswith("low latency")


@pytest.mark.parametrize(
    ("name", "kind", "stage"),
    [
        (GEMM, "compute", ""),
        (FLASH, "compute", "attention"),
        (
            "void cutlass::device_kernel<flash::FlashAttnBwd<flash::CollectiveMainloopBwd<2>>>(P)",
            "compute",
            "attention",
        ),
        ("void flashinfer::norm::RMSNormKernel<8, __nv_bfloat16>(x)", "compute", ""),
        ("void flashinfer::BatchDecodeWithPagedKVCacheMLAKernel<1>(x)", "compute", "attention"),
        ("void k<thrust::device_properties>(x)", "compute", ""),
        ("vllm::rotary_embedding_kernel<__nv_bfloat16, true>", "compute", "attention"),
        ("fused_moe_kernel", "compute", "experts"),
        ("void deep_gemm::sm90_fp8_m_grouped_gemm_contiguous_impl<7168>(x)", "compute", "experts"),
        # Types of a communication library among the parameters or template arguments say nothing about the kernel.
        ("void my::permute<deep_ep::internode::SourceMeta>(int)", "compute", ""),
        ("void my::permute<8>(deep_ep::internode::SourceMeta*, int)", "compute", ""),
        ("Memcpy DtoD (Device -> Device)", "copy", ""),
        ("Memcpy HtoD (Pinned -> Device)", "copy", ""),
        ("Memset (Device)", "copy", ""),
        ("sm100_fp8_mega_moe_impl<7168>", "fused", "experts"),
    ],
)
def test_everything_else(name: str, kind: str, stage: str) -> None:
    found = KernelTable().classify(name)
    assert (found.kind, found.stage) == (kind, stage)
    assert not found.doubtful


def test_what_looks_like_communication_is_doubtful() -> None:
    found = KernelTable().classify("void acme::moe_all_to_all_v3<8>(void*)")
    assert (found.kind, found.doubtful) == ("compute", True)
    local = "void flash_fwd_splitkv_combine_kernel<64>(flash::Params)"
    assert not KernelTable().classify(local).doubtful


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("attn(F)", Annotation("attention")),
        ("mlp(B)", Annotation("experts")),
        ("layer3.dispatch", Annotation("dispatch", 3)),
        ("model.layers.12.self_attn", Annotation("attention", 12)),
        ("layer 3 shared experts", Annotation("shared", 3)),
        ("ubatch 1 layer 7 combine", Annotation("combine", 7, 1)),
        ("microbatch_0", Annotation(microbatch=0)),
        ("ProfilerStep#12", Annotation()),
        ("latent_player 3", Annotation()),
    ],
)
def test_ranges(name: str, expected: Annotation) -> None:
    assert KernelTable().annotation(name) == expected


def test_function_name() -> None:
    assert function_name(DISPATCH) == "deep_ep::internode::dispatch"
    assert function_name("void (anonymous namespace)::k<1>(int)") == "anonymous::k"
    assert function_name("Memcpy PtoP (Device -> Device)") == "Memcpy PtoP (Device -> Device)"


def test_a_users_rules_come_first(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(
        "[[kernel]]\npattern = 'acme::send'\nkind = 'communication'\nlibrary = 'acme'\nstage = 'dispatch'\n"
        "background = true\n"
        "[[kernel]]\npattern = 'deep_ep::internode::combine'\nkind = 'compute'\nstage = 'mine'\n"
        "[[kernel]]\npattern = 'Traits<1>'\nsearch = 'whole'\nkind = 'fused'\n"
        "[[annotation]]\npattern = 'L(?P<layer>\\d+)/(?P<microbatch>\\d+)'\nstage = 'experts'\n"
    )
    table = KernelTable(file)
    sent = table.classify("void acme::send<1>(int)")
    assert (sent.kind, sent.library, sent.stage, sent.background) == ("communication", "acme", "dispatch", True)
    assert (table.classify(COMBINE).kind, table.classify(COMBINE).stage) == ("compute", "mine")
    assert table.classify("void k<Traits<1>>(int)").kind == "fused"
    assert table.classify(DISPATCH) == KernelTable().classify(DISPATCH)
    assert table.annotation("L12/1") == Annotation("experts", 12, 1)
    assert table.annotation("attn(F)") == Annotation("attention")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (None, "cannot be read: no such file"),
        ("[[kernel", "is no TOML"),
        ("[kernels]\n", "unknown table 'kernels'; use [[kernel]] and [[annotation]]"),
        ("[kernel]\npattern = 'a'\n", "kernel is no list of tables; write [[kernel]]"),
        ("[[kernel]]\nkind = 'compute'\n", "[[kernel]] 1 needs a pattern"),
        ("[[kernel]]\npattern = '('\nkind = 'compute'\n", "is no regular expression"),
        ("[[kernel]]\npattern = 'a'\n", "[[kernel]] 1: kind is None; use one of communication, compute, copy, fused"),
        ("[[kernel]]\npattern = 'a'\nkind = 'compute'\ncolour = 'red'\n", "unknown key 'colour'"),
        ("[[kernel]]\npattern = 'a'\nkind = 'compute'\nstage = 3\n", "stage is 3; use a string"),
        ("[[kernel]]\npattern = 'a'\nkind = 'compute'\nbackground = 1\n", "background is 1; use true or false"),
        ("[[annotation]]\npattern = 'a'\nlayer = 3\n", "[[annotation]] 1: unknown key 'layer'"),
    ],
)
def test_a_table_that_cannot_be_meant(tmp_path: Path, text: str | None, sentence: str) -> None:
    file = tmp_path / "mine.toml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigurationError) as error:
        KernelTable(file)
    assert sentence in str(error.value) and str(file) in str(error.value)
