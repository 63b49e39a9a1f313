"""Tests of the classes of kernels, on names as profiles of Hopper GPUs show them, and of times and shares."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright_bench.gpu.kernel_classes import Busy, KernelClass, below_peak, classify, own_times, times_by_class

NAMES = {
    KernelClass.PRODUCTS: (
        "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NTN",
        "nvjet_qqtst_256x128_128x4_2x1_v_bz_coopA_TNT",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel__5x_cublas",
        "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_128x128_64x3_nn_align8>(Params)",
        "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cutlass::gemm::GroupProblemShape>>",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>(cublasSplitKParams)",
        "void gemv2T_kernel_val<int, int, __nv_bfloat16, float>(cublasGemvParamsEx)",
        "triton_tem_fused_addmm_mm_7",
        "aten::mm",
        "aten::_scaled_mm",
    ),
    KernelClass.ATTENTION: (
        "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4, false>>",
        "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<64>>",
        "void pytorch_flash::flash_bwd_dot_do_o_kernel<true, Flash_bwd_kernel_traits<64>>(Flash_bwd_params)",
        "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<flash::CollectiveMainloop>>>",
        "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_1_128x64x64_4x1x1_cga1x1x1_kernel0_0",
        "fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel)",
        "triton_tem_fused_flex_attention_backward_3",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
    ),
    KernelClass.ELEMENTWISE: (
        "triton_poi_fused__to_copy_mul_silu_4",
        "triton_red_fused__fused_rms_norm_add_2",
        "triton_per_fused__scaled_dot_product_flash_attention_backward_sum_9",
        "triton_poi_fused_mm_mul_1",
        "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, std::array<char*, 3ul>>",
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float, float>>>",
        "void at::native::(anonymous namespace)::embedding_backward_feature_kernel<float>",
        "void at::native::(anonymous namespace)::cunn_SoftMaxForward<8, float, float, float>",
        "_liger_cross_entropy_kernel",
        "aten::mul",
    ),
    KernelClass.OPTIMIZER: (
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor<float>>",
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<LpNormFunctor<float>>",
        "aten::_fused_adamw_",
        "aten::_foreach_mul_",
    ),
    KernelClass.COPIES: (
        "Memcpy DtoD (Device -> Device)",
        "Memset (Device)",
        "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)>",
        "void at::native::vectorized_elementwise_kernel<8, at::native::bfloat16_copy_kernel_cuda>",
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<TensorListMetadata<2>, CopyFunctor<float>>",
        "void at::native::(anonymous namespace)::CatArrayBatchedCopy_aligned16_contig<OpaqueType<4u>, unsigned int>",
        "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, std::array<char*, 1ul>>",
        "triton_poi_fused__to_copy_t_3",
        "aten::copy_",
    ),
    KernelClass.COMMUNICATION: ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "gloo:all_reduce"),
    KernelClass.OTHER: ("void at_cuda_detail::cub::DeviceRadixSortOnesweepKernel<Policy900>", "aten::view", ""),
}  # fmt: skip


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in NAMES.items() for name in names])
def test_a_kernel_is_classified_by_its_name(kind, name):
    assert classify(name) is kind


SAMPLES = [names[0] for names in NAMES.values()]
INTERVALS = st.lists(st.tuples(st.sampled_from(SAMPLES), st.integers(-5, 40), st.integers(0, 20)), max_size=12)


@given(INTERVALS)
def test_times_sum_to_the_span_and_idle_is_where_nothing_runs(intervals):
    busy = [Busy(name, start, duration) for name, start, duration in intervals]
    spent = times_by_class(busy, start_us=0, end_us=30)
    runs = [any(start <= tick < start + duration for _, start, duration in intervals) for tick in range(30)]
    assert sum(spent.values()) == pytest.approx(30)
    assert spent[KernelClass.IDLE] == pytest.approx(runs.count(False))
    assert min(spent.values()) >= 0


def test_where_kernels_overlap_the_first_one_counts():
    busy = [Busy("Memset (Device)", 4, 4), Busy("nvjet_tst", 0, 6)]
    spent = times_by_class(busy, start_us=0, end_us=10)
    assert spent[KernelClass.PRODUCTS] == 6
    assert spent[KernelClass.COPIES] == 2
    assert spent[KernelClass.IDLE] == 2


def test_nested_operators_have_their_own_times():
    busy = [
        Busy("outer", 0, 10),
        Busy("inner", 2, 5),
        Busy("innermost", 3, 1),
        Busy("next", 10, 2),
        Busy("late", 15, 1),
    ]
    own: dict[str, float] = {}
    for one in own_times(busy):
        own[one.name] = own.get(one.name, 0.0) + one.duration_us
    assert own == {"outer": 5, "inner": 4, "innermost": 1, "next": 2, "late": 1}


@given(INTERVALS, st.floats(0, 1))
def test_what_is_below_the_peak_sums_to_what_the_mfu_lacks(intervals, mfu):
    busy = [Busy(name, start, duration) for name, start, duration in intervals]
    spent = times_by_class(busy, start_us=0, end_us=30)
    lacking = below_peak({kind: time / 30 for kind, time in spent.items()}, mfu)
    assert sum(lacking.values()) == pytest.approx(1 - mfu)
    assert list(lacking.values()) == sorted(lacking.values(), reverse=True)


def test_products_at_the_peak_rate_lack_only_the_other_classes():
    shares = dict.fromkeys(KernelClass, 0.0) | {
        KernelClass.PRODUCTS: 0.4,
        KernelClass.ATTENTION: 0.1,
        KernelClass.IDLE: 0.5,
    }
    lacking = below_peak(shares, 0.5)
    assert lacking.pop("idle") == 0.5
    assert max(map(abs, lacking.values())) < 1e-12
